"""YAML files of settings: a mapping, in which no name stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from llm42.errors import LLM42Error


class YamlProblem(LLM42Error):
    """A file of settings cannot be read, or is no mapping; the message names it."""

    code = "bad_file"


class _Loader(yaml.SafeLoader):
    """PyYAML's own keeps the last of two equal names and drops the first without a word."""


def _mapping_of(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name is not None and key.tag != "tag:yaml.org,2002:merge" and name in seen:
            raise yaml.constructor.ConstructorError(
                "while reading a mapping",
                node.start_mark,
                f"{name!r} is there twice: remove one",
                key.start_mark,
            )
        seen.add(name)
    loader.flatten_mapping(node)
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
            for key, value in node.value}  # fmt: skip


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_of)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file; an empty file is an empty one. Raises YamlProblem."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError, TypeError) as error:
        raise YamlProblem(f"{path}: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise YamlProblem(f"{path}: the file must be a mapping of names to values, not {type(data).__name__}")
    return data
