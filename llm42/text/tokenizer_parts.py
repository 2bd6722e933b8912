"""What a tokenizer is made of, whichever file it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """`llm42.text.tokenizer.Tokenizer` is made of these."""

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    templates: Mapping[str, str]
    """Chat templates by name: "default", and "tool_use" where requests with tools have one of their own."""
    special: Mapping[str, str]
    """Texts of special tokens that templates may use (bos_token, ...)."""


def added_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], bool]:
    """The ids that the tokenizer puts in front of a text, and whether it puts any behind it."""
    encoding = backend.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    front = mask.index(0) if 0 in mask else len(mask)
    return tuple(encoding.ids[:front]), 1 in mask[front:]
