"""A tokenizer from a Hugging Face directory: tokenizer.json, and what tokenizer_config.json says besides.

tokenizer.json is what encodes. A field of tokenizer_config.json is honoured, known to leave the ids alone, or
refused by name; where both speak of one thing, it is as transformers has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models import generation
from llm42.models.families import token_ids
from llm42.models.files import read_json_if_there, require_known, words
from llm42.text.templates import read_templates
from llm42.text.tokenizer_json import read_backend
from llm42.text.tokenizer_parts import TokenizerParts, added_around

CONFIG = "tokenizer_config.json"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
_MORE = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_USED = frozenset(NAMED) | set(_MORE) | words("chat_template added_tokens_decoder")
_HARMLESS = words(
    "tokenizer_class model_max_length max_length padding_side truncation_side truncation_strategy stride"
    " pad_to_multiple_of pad_token_type_id clean_up_tokenization_spaces legacy use_default_system_prompt"
    " spaces_between_special_tokens errors name_or_path special_tokens_map_file tokenizer_file vocab_file"
    " merges_file processor_class model_input_names return_token_type_ids backend is_local local_files_only"
    " verbose use_fast from_slow trust_remote_code init_inputs response_schema unsloth_version _commit_hash"
)
"""Bookkeeping, limits and sides for training, decoding of another class. clean_up_tokenization_spaces is for
reading: texts here are exactly those of their tokens, as in vLLM."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "split_special_tokens": (None, False),
    "do_lower_case": (None, False),
    "fix_mistral_regex": (None, False),
    "auto_map": (None, {}),
    "sp_model_kwargs": (None, {}, {"enable_sampling": False}),
    "add_eos_token": (None, False),
    "add_bos_token": (None, False, True),
    "add_prefix_space": (None, False, True),
}
"""Field -> the values that are honoured."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_directory(path: Path) -> TokenizerParts:
    """Raises ModelFileError, or UnsupportedModel naming the field."""
    backend = read_backend(path / "tokenizer.json")
    where = str(path / CONFIG)
    settings = read_json_if_there(path / "special_tokens_map.json") | read_json_if_there(path / CONFIG)
    require_known(settings, where, _USED | _HARMLESS, _NEUTRAL)
    _add_described(backend, settings.get("added_tokens_decoder") or {}, where)
    special = {name: _content(settings[name]) for name in NAMED if settings.get(name)}
    for name, token in _special_tokens(settings):
        _require_special(backend, token, name, where)
    _require_begin(backend, settings.get("add_bos_token"), special.get("bos_token"), where)
    _require_prefix(backend, settings.get("add_prefix_space"), where)
    ends = generation.end_ids(path)
    if ends is None:
        ends = token_ids(read_json_if_there(path / "config.json").get("eos_token_id"))
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return TokenizerParts(
        backend, (*ends, *(() if own is None else (own,))), read_templates(path, settings), special
    )


def _content(value: Any) -> str:
    return str(value["content"] if isinstance(value, Mapping) else value)


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(field, token as a text or an object) of every token that is called special."""
    for name in NAMED:
        if settings.get(name):
            yield name, settings[name]
    for name in _MORE:
        values = settings.get(name) or []
        yield from ((name, v) for v in (values.values() if isinstance(values, Mapping) else values))


def _add_described(backend: tokenizers.Tokenizer, described: Mapping[str, Any], where: str) -> None:
    """transformers gives an added token the flags that stand here, whatever tokenizer.json says."""
    known = backend.get_added_tokens_decoder()
    for index, entry in sorted(described.items(), key=lambda item: int(item[0])):
        name = f"added_tokens_decoder.{index}"
        require_known(entry, where, {"content", "__type", *_FLAGS}, {}, f"{name}.")
        wanted = AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in _FLAGS if flag in entry})
        if repr(known.get(int(index))) != repr(wanted):
            (backend.add_special_tokens if wanted.special else backend.add_tokens)([wanted])
        if backend.token_to_id(wanted.content) != int(index):
            raise ModelFileError(f"{where}: {name} ({wanted.content!r}) has another id in tokenizer.json")


def _require_special(backend: tokenizers.Tokenizer, token: Any, name: str, where: str) -> None:
    """A token that is called special is one, as in transformers; it must have a row in the vocabulary."""
    content = _content(token)
    index = backend.token_to_id(content)
    if index is None:
        raise UnsupportedModel(f"{where}: {name} {content!r} is not in the tokenizer's vocabulary", name)
    added = backend.get_added_tokens_decoder().get(index)
    if added is None:
        backend.add_special_tokens([AddedToken(content, normalized=False, special=True)])


def _require_begin(backend: tokenizers.Tokenizer, wanted: bool | None, token: str | None, where: str) -> None:
    """add_bos_token, where it is given, must be what tokenizer.json does: which of them counts has changed
    from one version of transformers to the next."""
    index = backend.token_to_id(token) if token is not None else None
    if wanted is not None and added_around(backend)[0] != ((index,) if wanted else ()):
        raise _opposite(where, "add_bos_token", wanted)


def _require_prefix(backend: tokenizers.Tokenizer, wanted: bool | None, where: str) -> None:
    """add_prefix_space, where it is given, must be what tokenizer.json does."""
    if wanted is None:
        return
    text = backend.normalizer.normalize_str("a") if backend.normalizer is not None else "a"
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    does = text[:1] in (" ", "\u2581", "\u0120")
    if does != wanted:
        raise _opposite(where, "add_prefix_space", wanted)


def _opposite(where: str, name: str, wanted: bool) -> UnsupportedModel:
    text = (
        f"{where}: {name} is {str(wanted).lower()}, and tokenizer.json does something else: make them agree"
    )
    return UnsupportedModel(text, name)
