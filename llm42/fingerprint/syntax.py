"""The meaning of Python source as a hash: its syntax tree without what cannot matter.

Comments, blank lines, line breaks, quotes and docstrings do not count; names, constants, operators, defaults,
decorators and annotations do. Python's own `ast.dump` differs between versions of Python; this does not
(3.11 to 3.13), so that a service and an audit elsewhere agree about equal code.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Write = Callable[[str], None]

_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of nodes that follow from their place (ctx: loaded or stored), or that Python ignores."""


@cache
def meaning(source: bytes) -> str:
    """SHA-256, in hex, of what a module's source means. Raises SyntaxError."""
    parts: list[str] = []
    _node(ast.parse(source), parts.append)
    return hashlib.sha256("".join(parts).encode("ascii")).hexdigest()


def _node(node: ast.AST, write: Write) -> None:
    """`(Kind name=value ...)`; absent and empty fields are left out, for newer versions of Python have more
    of them."""
    write(f"({type(node).__name__}")
    if isinstance(node, ast.Constant | ast.MatchSingleton):
        write(" " + _constant(node.value))
    else:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                value = _elements(node, value)
            if name not in _WITHOUT_MEANING and not _is_absent(node, name, value):
                write(f" {name}=")
                _value(value, write)
    write(")")


def _is_absent(node: ast.AST, name: str, value: Any) -> bool:
    if value is None or value == []:
        return True
    if isinstance(node, ast.ImportFrom) and name == "level":
        return bool(value == 0)
    # f"{x:}" is f"{x}"
    return isinstance(value, ast.JoinedStr) and name == "format_spec" and not _elements(value, value.values)


def _value(value: Any, write: Write) -> None:
    if isinstance(value, ast.AST):
        _node(value, write)
    elif isinstance(value, list):
        write("[")
        for element in value:
            _value(element, write)
            write(",")
        write("]")
    else:
        write(_constant(value))


def _elements(node: ast.AST, values: Sequence[Any]) -> list[Any]:
    """Without statements that do nothing. An f-string's literal text, which Python cuts differently from
    version to version, in one piece."""
    if not isinstance(node, ast.JoinedStr):
        return [v for v in values if not _does_nothing(v)]
    joined: list[Any] = []
    for value in values:
        if isinstance(value, ast.Constant) and joined and isinstance(joined[-1], ast.Constant):
            joined[-1] = ast.Constant(str(joined[-1].value) + str(value.value))
        else:
            joined.append(value)
    return [v for v in joined if not (isinstance(v, ast.Constant) and v.value == "")]


def _does_nothing(value: Any) -> bool:
    """`pass`, `...`, and strings that stand for themselves: docstrings."""
    return isinstance(value, ast.Pass) or (
        isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant)
    )


def _constant(value: Any) -> str:
    """In ASCII, exactly, and with the type: 1, 1.0, True and "1" differ. Python's `repr` of a string asks
    which characters can be printed, which its versions answer differently."""
    match value:
        case str():
            return json.dumps(value)
        case bytes():
            return f"b{value.hex()}"
        case bool() | None:
            return str(value)
        case int():
            return hex(value)
        case float():
            return f"f{value.hex()}"
        case complex():
            return f"c{value.real.hex()},{value.imag.hex()}"
    if value is ...:
        return "Ellipsis"
    raise TypeError(f"no constant of Python's grammar: {value!r}")
