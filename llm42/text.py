"""From committed tokens to text: incremental detokenisation and stop strings, one token at a time, so that
the result does not depend on how tokens were grouped into commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from llm42.protocol import Request
from llm42.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True)
class OutputText:
    """Text of one output. `push` returns what may be shown; a part that could begin a stop string is held
    back.

    The rules are vLLM's: a token of `stop_token_ids` ends the output, and its text is no part of it unless
    `include_stop`; a stop string that is complete within the text of the first `min_tokens` tokens ends
    nothing. `prompt` is what the output follows: only the first text of a sequence loses leading spaces.
    """

    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    prompt: Sequence[int] = ()
    stopped: bool = False
    _held: str = ""
    _exempt: int = 0
    """Characters at the start of `_held` in which no stop string may end."""
    _count: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, prompt=self.prompt)
        self._ends = frozenset(() if self.include_stop else self.stop_token_ids)

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: Request) -> Self:
        """The text of a request's output, from its first token on."""
        least = request.sampling.min_tokens
        ends = (request.stop, request.include_stop, request.stop_token_ids)
        return cls(tokenizer, *ends, min_tokens=least, prompt=request.prompt)

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Adds tokens; returns the text to show and how many tokens were used (fewer once the output has
        ended)."""
        if not self.stop and self._ends.isdisjoint(tokens):  # nothing can end here: all at once is cheaper
            self._count += len(tokens)
            return self._detokenizer.push(tokens), len(tokens)
        shown = ""
        for used, token in enumerate(tokens, 1):
            self._count += 1
            if token in self._ends:
                shown += self.flush()
                self.stopped = True
            else:
                shown += self._add(self._detokenizer.push([token]))
            if self.stopped:
                return shown, used
        return shown, len(tokens)

    def flush(self) -> str:
        """The rest, at the end of the output."""
        if self.stopped:
            return ""
        shown = self._add(self._detokenizer.flush()) + self._held
        self._held = ""
        return shown

    def _add(self, piece: str) -> str:
        self._held += piece
        if self.min_tokens and self._count <= self.min_tokens:
            self._exempt = len(self._held)
        if found := [(at, s) for s in self.stop if (at := self._find(s)) >= 0]:
            at, s = min(found)
            self.stopped = True
            shown, self._held = self._held[: at + (len(s) if self.include_stop else 0)], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self.stop), default=0)
        split = len(self._held) - keep
        self._exempt = max(0, self._exempt - split)
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def _find(self, stop: str) -> int:
        """Where in `_held` the first stop string lies that ends after the exempt part; -1: nowhere."""
        return self._held.find(stop, max(0, self._exempt - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
