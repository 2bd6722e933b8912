"""strftime for chat templates: English names, UTC, the same text on every platform and in every locale."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable

import jinja2

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_DIRECTIVE = re.compile(r"%([-_0^#]?)(.?)", re.DOTALL)
_WIDTHS = {"d": 2, "e": 2, "H": 2, "k": 2, "I": 2, "l": 2, "j": 3, "m": 2, "M": 2, "S": 2, "y": 2}
_WIDTHS |= {"g": 2, "G": 4, "V": 2, "U": 2, "W": 2, "C": 2, "Y": 4, "u": 1, "w": 1, "s": 1}
"""Directives that are numbers, and their digits."""
_SAME = {"e": "d", "k": "H", "l": "I"}
"""Those that differ from others only in their blanks."""
_WORDS: dict[str, Callable[[datetime.datetime], str]] = {
    "a": lambda t: _DAYS[t.weekday()][:3],
    "A": lambda t: _DAYS[t.weekday()],
    "b": lambda t: _MONTHS[t.month - 1][:3],
    "h": lambda t: _MONTHS[t.month - 1][:3],
    "B": lambda t: _MONTHS[t.month - 1],
    "p": lambda t: "AM" if t.hour < 12 else "PM",
    "P": lambda t: "am" if t.hour < 12 else "pm",
    "f": lambda t: f"{t.microsecond:06}",
    "z": lambda _: "+0000",
    "Z": lambda _: "UTC",
    "%": lambda _: "%",
    "n": lambda _: "\n",
    "t": lambda _: "\t",
}
_COMPOUND = {
    "c": "%a %b %e %H:%M:%S %Y",
    "D": "%m/%d/%y",
    "x": "%m/%d/%y",
    "F": "%Y-%m-%d",
    "r": "%I:%M:%S %p",
    "R": "%H:%M",
    "T": "%H:%M:%S",
    "X": "%H:%M:%S",
}


def strftime(moment: datetime.datetime, pattern: str) -> str:
    """As the C library does it in the C locale, of a moment in UTC, with glibc's flags. Raises
    jinja2.TemplateError naming a directive that is none."""
    return _DIRECTIVE.sub(lambda found: _directive(moment, found[1], found[2]), pattern)


def _directive(moment: datetime.datetime, flag: str, name: str) -> str:
    if name in _COMPOUND:
        text = strftime(moment, _COMPOUND[name])
    elif name in _WORDS:
        text = _WORDS[name](moment)
    elif name in _WIDTHS:
        blank = flag == "_" or (name in "ekl" and flag != "0")
        width = 0 if flag == "-" else _WIDTHS[name]
        return str(_number(moment, name)).rjust(width, " " if blank else "0")
    else:
        raise jinja2.TemplateError(f"strftime_now: '%{flag}{name}' is not supported")
    if flag == "^":
        return text.upper()
    if flag == "#":
        return text.lower() if name in "pZ" else text.upper()
    return text


def _number(moment: datetime.datetime, name: str) -> int:
    """As the C library has it: no locale changes a number. But its `s` is local; not all have `C` and `g`."""
    match name:
        case "s":
            return int(moment.timestamp())
        case "C":
            return moment.year // 100
        case "g":
            return moment.isocalendar().year % 100
    return int(moment.strftime(f"%{_SAME.get(name, name)}"))
