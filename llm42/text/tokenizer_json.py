"""tokenizer.json: read by the `tokenizers` library, and refused where the library would encode at random, or
drops what it does not know without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models.files import dropped, read_json, require_known, words
from llm42.text.tokenizer_parts import added_around

_TOP = words("version model normalizer pre_tokenizer post_processor decoder added_tokens truncation padding")
"""truncation and padding are for training: they are switched off, as for a prompt everywhere."""
_MODELS = {
    "BPE": words(
        "type vocab merges unk_token fuse_unk byte_fallback ignore_merges continuing_subword_prefix"
        " end_of_word_suffix"
    ),
    "Unigram": words("type vocab unk_id byte_fallback"),
}
_DETERMINISTIC: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0),
    "nbest_size": (None, 0),
    "alpha": (None, 0),
}
"""With other values the library, or a later one, splits the same text in another way each time."""
_ADDED = words("id content single_word lstrip rstrip normalized special")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_OLD_SPELLINGS = {"str_rep", "add_prefix_space"}
"""Of Metaspace, which the library reads as prepend_scheme and replacement."""


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer. Raises ModelFileError, or UnsupportedModel naming the field."""
    if not file.is_file():
        raise ModelFileError(f"{file}: no such file (a tokenizer.json is needed)")
    data = read_json(file)
    require_known(data, str(file), _TOP, {})
    _require_model(data, str(file))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{file}: {error}") from error
    _require_all_taken(data, backend, str(file))
    backend.no_padding()
    backend.no_truncation()
    if added_around(backend)[1]:
        raise UnsupportedModel(
            f"{file}: post_processor puts a token behind every text, which a prompt cannot have",
            "post_processor",
        )
    return backend


def _require_model(data: Mapping[str, Any], where: str) -> None:
    model = data.get("model")
    if not isinstance(model, dict):
        raise ModelFileError(f"{where}: model is missing")
    kind = model.get("type", "BPE")
    if kind not in _MODELS:
        raise UnsupportedModel(
            f"{where}: model.type = {kind!r} is not supported (only {', '.join(_MODELS)})", "model.type"
        )
    require_known(model, where, _MODELS[kind], _DETERMINISTIC, "model.")


def _require_all_taken(data: Mapping[str, Any], backend: tokenizers.Tokenizer, where: str) -> None:
    """The library ignores fields that it does not know, and gives an added token another id where the one in
    the file is not the next."""
    taken = json.loads(backend.to_str())
    for part in _PARTS:
        for name in dropped(data.get(part), taken[part], part):
            if name.rpartition(".")[2] not in _OLD_SPELLINGS:
                raise UnsupportedModel(f"{where}: {name} is not a known field: it may change the ids", name)
    for token in data.get("added_tokens") or []:
        require_known(token, where, _ADDED, {}, "added_tokens[].")
        found = backend.token_to_id(token["content"])
        if found != token["id"]:
            raise ModelFileError(
                f"{where}: added_tokens: {token['content']!r} has id {token['id']} there and {found} in the"
                " tokenizer"
            )
