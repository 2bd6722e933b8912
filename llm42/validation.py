"""What is wrong with a request's body, a receipt or a setting, in plain words instead of pydantic's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WORDS = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "has too many digits",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "none_required": "must be null",
    "extra_forbidden": "is no field that is known here",
}
"""By pydantic's kinds of errors; what it says of others is said as it is."""
_EXAMPLES = {"date": "2025-01-31"}
"""Of fields that follow a pattern."""
_MUST = "must be "
_FIELD = re.compile(r"(?!(str|int|float|bool|dict|list|none|literal|texts|ids|batch)$)[a-z][a-z0-9_]*")
"""Not the names of a union's types, nor of a prompt's forms: pydantic puts them between the fields."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """The error that is told."""

    kind: str
    """Pydantic's name of it."""
    loc: tuple[int | str, ...]
    text: str
    """With the place in the body before it, as `messages[1].content[0].type`."""
    param: str | None
    """The field of the body; None: of the body as a whole."""


def complaint(found: Sequence[Any]) -> Complaint:
    """Of pydantic's errors; `found` has one at least."""
    first = _most_telling(found)
    loc = tuple(first["loc"])
    fields = [str(part) for part in loc if part != "body"]
    param = fields[0] if fields else (first.get("ctx") or {}).get("param")
    place = _place(loc) or param
    said = words(first)
    if first["type"] == "string_pattern_mismatch" and param in _EXAMPLES:
        said = f"must be written as {_EXAMPLES[param]}"
    return Complaint(first["type"], loc, f"{place}: {said}" if place else said, param)


def words(error: Mapping[str, Any]) -> str:
    """What is wrong, without where: of one of pydantic's errors."""
    ctx, kind = error.get("ctx") or {}, error["type"]
    if kind in ("string_too_short", "too_short") and ctx.get("min_length") == 1:
        return "must not be empty"
    if "forms" in error:
        return _MUST + " or ".join(error["forms"])
    try:
        return _WORDS[kind].format(**{name: _short(value) for name, value in ctx.items()})
    except KeyError:  # an error of our own, which has its words
        return str(error["msg"]).removeprefix("Value error, ")


def _short(value: Any) -> Any:
    """0 for 0.0: a limit is written as people write it."""
    return f"{value:g}" if isinstance(value, float) else value


def _place(loc: Sequence[int | str]) -> str:
    parts = [part for part in loc if isinstance(part, int) or _FIELD.fullmatch(part)]
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part != "body")
    return "".join(steps).removeprefix(".")


def _most_telling(found: Sequence[Any]) -> Any:
    """The first error; for a field of several forms (stop) the first that is about a value, not a form."""
    first = found[0]
    same = [e for e in found if e["loc"][:2] == first["loc"][:2]]
    values = [e for e in same if not e["type"].endswith("_type")]
    if len(same) > 1 and not values:
        forms = dict.fromkeys(words(e).removeprefix(_MUST) for e in same)
        return first | {"forms": list(forms)}
    return values[0] if values else first
