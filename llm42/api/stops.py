"""Stop strings that could never be met, because what they look for is no part of an output's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llm42.errors import RequestRejected
from llm42.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character, so any model can write it."""


def special_stops(stop: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of the stop strings that are special tokens: an output's text leaves those tokens out, so
    such a string ends it as a token does.

    Raises RequestRejected for a string that holds more than the special token (text around a token is never
    seen together with it), and for one with characters that no token of this model can write.
    """
    if not stop:
        return ()
    known = _spelling(tokenizer)
    ids = []
    for text in stop:
        if text in known.special:
            ids.append(known.special[text])
        elif reason := known.why_never(text):
            raise RequestRejected(f"stop: {text[:60]!r} would never be met: {reason}", "stop")
    return tuple(ids)


@dataclass(frozen=True)
class _Spelling:
    special: dict[str, int]
    """The text of each special token, longest first."""
    written: frozenset[int]
    """Bytes that the other tokens can write."""

    def why_never(self, text: str) -> str | None:
        """Why no output's text can have `text` in it; None: one may."""
        for token, index in self.special.items():
            if token in text:
                return (
                    f"{token!r} is a special token, which is no part of an output's text. Use stop_token_ids:"
                    f" [{index}], or {token!r} alone."
                )
        for char in text:
            if char != _REPLACEMENT and not self.written.issuperset(char.encode()):
                return f"no token of this model can write the character U+{ord(char):04X}."
        return None


@lru_cache(maxsize=2)
def _spelling(tokenizer: Tokenizer) -> _Spelling:
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: index for index, token in added.items() if token.special and token.content}
    ids = set(tokenizer.backend.get_vocab(with_added_tokens=True).values()) - set(special.values())
    written = frozenset(byte for index in ids for byte in tokenizer.token_bytes(index))
    return _Spelling(dict(sorted(special.items(), key=lambda item: -len(item[0]))), written)
