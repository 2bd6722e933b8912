"""A `tokenizers` tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The pre-tokenizers are those of the models' own tokenizer.json; GGUF only names them (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models.files import require_known, words
from llm42.models.gguf.config import eos_token_ids
from llm42.models.gguf.reader import metadata, open_gguf
from llm42.text.templates import gguf_templates
from llm42.text.tokenizer_parts import TokenizerParts

_CONTROL, _USER_DEFINED = 3, 4
_KINDS = range(1, 7)
"""Normal, unknown, control, user-defined, unused, byte."""
_IDS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    "sep_token": "seperator", "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip
"""What templates call a special token -> what the metadata call its id."""
_USED = words("model pre tokens token_type scores merges add_bos_token add_space_prefix") | {
    f"{name}_token_id" for name in (*_IDS.values(), "eot", "eom")
}
_HARMLESS = words(
    "token_type_count prefix_token_id suffix_token_id middle_token_id fim_pre_token_id fim_suf_token_id"
    " fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id"
)
"""Names of tokens for filling in, which a client writes by itself."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_eos_token": (False,),
    "add_sep_token": (False,),
    "remove_extra_whitespaces": (False,),
    "escape_whitespaces": (True,),
    "treat_whitespace_as_suffix": (False,),
}
_PREFIX = "tokenizer.ggml."
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_IGNORE_MERGES = {"llama-bpe", "llama3", "tekken"}
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "tekken"}


def read_gguf(path: Path) -> TokenizerParts:
    """Raises ModelFileError, or UnsupportedModel naming the key."""
    data = metadata(open_gguf(path))
    tokens = data.get("tokenizer.ggml.tokens") or []
    ids = {name: data.get(f"{_PREFIX}{key}_token_id") for name, key in _IDS.items()}
    for name, index in ids.items():
        if index is not None and not 0 <= index < len(tokens):
            raise ModelFileError(f"{path}: metadata {_PREFIX}{_IDS[name]}_token_id = {index} is no token")
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    return TokenizerParts(
        build_tokenizer(str(path), data), eos_token_ids(data.get), gguf_templates(data), special
    )


def build_tokenizer(path: str, data: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that `data` (keys `tokenizer.ggml.*`) describes. Raises ModelFileError for a missing key,
    and UnsupportedModel, which names the key."""
    values = {k.removeprefix(_PREFIX): v for k, v in data.items() if k.startswith(_PREFIX)}
    require_known(values, path, _USED | _HARMLESS, _NEUTRAL, _PREFIX)
    get = values.get
    tokens = get("tokens")
    if not tokens:
        raise ModelFileError(f"{path}: metadata tokenizer.ggml.tokens is missing")
    match get("model"):
        case "gpt2":
            result, bos_by_default = _byte_level(path, tokens, get), get("pre") in _BOS_BY_DEFAULT
        case "llama":
            result, bos_by_default = _sentencepiece(tokens, get), True
        case other:
            raise UnsupportedModel(
                f"{path}: tokenizer.ggml.model = {other!r} is not supported", "tokenizer.ggml.model"
            )
    _add_tokens(result, tokens, get("token_type") or [])
    bos, wanted = get("bos_token_id"), get("add_bos_token", bos_by_default)
    if get("add_bos_token") and bos is None:
        raise UnsupportedModel(
            f"{path}: {_PREFIX}add_bos_token is true, and no bos_token_id is named", f"{_PREFIX}add_bos_token"
        )
    if bos is not None and wanted:
        result.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return result


def _byte_level(path: str, tokens: list[str], get: Any) -> tokenizers.Tokenizer:
    name = get("pre")
    merges = [tuple(merge.split(" ", 1)) for merge in get("merges") or []]
    vocab = {token: index for index, token in enumerate(tokens)}
    result = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _IGNORE_MERGES))
    if name == "smollm":  # every digit on its own, then GPT-2's pattern
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif name in _SPLITS:
        first = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        known = ", ".join(["smollm", *_SPLITS])
        raise UnsupportedModel(
            f"{path}: tokenizer.ggml.pre = {name!r} is not supported (known: {known})", "tokenizer.ggml.pre"
        )
    result.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    result.decoder = decoders.ByteLevel()
    if name == "qwen2":
        result.normalizer = normalizers.NFC()
    return result


def _sentencepiece(tokens: list[str], get: Any) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, get("scores") or [])
    unknown = tokens[get("unknown_token_id", 0)]
    result = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "\u2581")
    prefix = get("add_space_prefix", True)
    result.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if prefix else [spaces])
    chain = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    result.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefix else chain)
    return result


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merge list: a pair may merge when the result is a token, better scores first."""
    ranked = []
    for token, index in vocab.items():
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        ranked += [(-scores[index], vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for _, _, _, left, right in sorted(ranked)]


def _add_tokens(result: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens become special; user-defined ones are matched whole but are ordinary text."""
    if odd := set(kinds).difference(_KINDS):
        raise UnsupportedModel(f"token_type {min(odd)} is not known", f"{_PREFIX}token_type")
    pairs = [*zip(tokens, kinds, strict=False)]
    control = [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL]
    result.add_special_tokens(control)
    result.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED])
