"""The forms in which a model's files keep chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm42.errors import ModelFileError
from llm42.models.files import read_json_if_there

DEFAULT, TOOL_USE = "default", "tool_use"
_MORE = "additional_chat_templates"
_METADATA = "tokenizer.chat_template"


def read_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source, of a Hugging Face directory: files of their own come before tokenizer_config.json, and
    chat_template.json, which belongs to a processor, comes last."""
    files = {file.stem: read_text(file) for file in sorted((path / _MORE).glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files[DEFAULT] = read_text(path / "chat_template.jinja")
    if files:
        return files
    value = settings.get("chat_template") or read_json_if_there(path / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, Mapping):
        return {str(name): str(source) for name, source in value.items()}
    return {} if value is None else {DEFAULT: str(value)}


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source, of a GGUF file's metadata."""
    named = {
        key.removeprefix(f"{_METADATA}."): source
        for key, source in metadata.items()
        if key.startswith(f"{_METADATA}.")
    }
    return named | ({DEFAULT: metadata[_METADATA]} if _METADATA in metadata else {})


def read_text(file: Path) -> str:
    """A template's source. Raises ModelFileError naming the file."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{file}: {error}") from error
