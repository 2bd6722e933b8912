"""The values of a stored record: what JSON may hold and a record may not, and fields of one type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llm42.receipt import InvalidReceipt, require_token_ids

MAX_DEPTH = 100
"""Lists and objects inside each other; no request, reply or manifest comes near it."""


class BadRecord(InvalidReceipt):
    """One record cannot be audited as it stands."""


def require_plain(value: Any) -> None:
    """Raises BadRecord for what a reader of JSON lets through and nobody can write, hash or compare: lone
    surrogates, numbers beyond a double (1e999), and nesting without end."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _require_text(item)
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise BadRecord("a number is NaN, infinite, or too large for a double")
            elif isinstance(item, Mapping):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return
        level = below
    raise BadRecord(f"lists and objects are nested deeper than {MAX_DEPTH} levels")


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"a text is not valid Unicode: {error.reason}") from error


def text_of(value: Mapping[str, Any], name: str) -> str | None:
    """A field of text, if it is there. Raises BadRecord."""
    found = value.get(name)
    if found is not None and not isinstance(found, str):
        raise BadRecord(f"{name}: text is needed")
    return found


def object_of(value: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A field that is an object, if it is there. Raises BadRecord."""
    found = value.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise BadRecord(f"{name}: a JSON object is needed")
    return found


def ids_of(value: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """A field of token ids, if it is there. Raises BadRecord, and InvalidReceipt for a number that is no
    id."""
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(t) is int for t in found):
        raise BadRecord(f"{name}: a list of token ids is needed")
    require_token_ids(found, name)
    return tuple(found)


def floats_of(value: Mapping[str, Any], name: str) -> tuple[float, ...] | None:
    """A field of numbers, if it is there. Raises BadRecord."""
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(p) in (int, float) for p in found):
        raise BadRecord(f"{name}: a list of numbers is needed")
    try:
        return tuple(float(p) for p in found)
    except OverflowError as error:
        raise BadRecord(f"{name}: {error}") from error
