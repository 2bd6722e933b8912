"""A `tokenizers` tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The pre-tokenizers are those of the models' own tokenizer.json; GGUF only names them (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llm42.models.errors import ModelFileError, UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4
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


def build_tokenizer(path: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that `metadata` (keys `tokenizer.ggml.*`) describes. UnsupportedModel names the key."""
    get = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}.get
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
    bos = get("bos_token_id")
    if bos is not None and get("add_bos_token", bos_by_default):
        result.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    if get("add_eos_token", False):
        raise UnsupportedModel(
            f"{path}: tokenizer.ggml.add_eos_token is not supported", "tokenizer.ggml.add_eos_token"
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
    by_kind = {
        kind: [t for t, k in zip(tokens, kinds, strict=False) if k == kind]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    result.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in by_kind[_CONTROL]]
    )
    result.add_tokens([AddedToken(token, normalized=False) for token in by_kind[_USER_DEFINED]])
