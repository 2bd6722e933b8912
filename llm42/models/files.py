"""The JSON files of a model, and the one form of a refusal for what stands in them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from llm42.errors import ModelFileError, UnsupportedModel


def words(text: str) -> frozenset[str]:
    """Names in a text with spaces between them."""
    return frozenset(text.split())


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFileError naming the file."""
    if not file.is_file():
        raise ModelFileError(f"{file}: no such file")
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise ModelFileError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: not a JSON object")
    return value


def read_json_if_there(file: Path) -> dict[str, Any]:
    """The same; empty where there is no such file."""
    return read_json(file) if file.is_file() else {}


def require_known(
    values: Mapping[str, Any],
    where: str,
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    prefix: str = "",
) -> None:
    """Raises UnsupportedModel, naming the field, unless every field is `known` or has a value at which it
    changes nothing."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key in neutral:
            if not any(value == allowed and type(value) in kinds(allowed) for allowed in neutral[key]):
                raise UnsupportedModel(f"{where}: {name} = {value!r:.80} is not supported", name)
        elif key not in known:
            raise UnsupportedModel(f"{where}: {name} is not a known field: it may change the answers", name)


def kinds(allowed: Any) -> tuple[type, ...]:
    """Types that may stand for a neutral value: False must not pass for 0, but 1 may for 1.0."""
    return (int, float) if type(allowed) in (int, float) else (type(allowed),)


def dropped(given: Any, taken: Any, path: str) -> Iterable[str]:
    """Dotted names of what stands in a file and not in what a library says it has read of it."""
    if isinstance(given, Mapping) and isinstance(taken, Mapping):
        for key, value in given.items():
            if key not in taken:
                yield f"{path}.{key}"
            else:
                yield from dropped(value, taken[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(taken, list):
        for index, (one, other) in enumerate(zip(given, taken, strict=False)):
            yield from dropped(one, other, f"{path}[{index}]")
