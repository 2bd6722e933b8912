"""From committed tokens to text: incremental detokenisation and stop strings, one token at a time, so that
the result does not depend on how tokens were grouped into commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from llm42.protocol import Request
from llm42.text.detokenizer import Detokenizer
from llm42.text.tokenizer import Tokenizer


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
    _count: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _ends: frozenset[int] = field(init=False)
    _searches: list[StopSearch] = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, prompt=self.prompt)
        self._ends = frozenset(() if self.include_stop else self.stop_token_ids)
        self._searches = [StopSearch(s) for s in self.stop]

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
        self._searches = [StopSearch(s) for s in self.stop]
        return shown

    def _add(self, piece: str) -> str:
        before = len(self._held)
        self._held += piece
        ends = [(search.push(piece), search.stop) for search in self._searches]
        found = [(before + end - len(s), s) for end, s in ends if end]
        if found and not (self.min_tokens and self._count <= self.min_tokens):
            at, s = min(found)
            self.stopped = True
            shown, self._held = self._held[: at + (len(s) if self.include_stop else 0)], ""
            return shown
        split = len(self._held) - self._pending()
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def _pending(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max((search.matched for search in self._searches), default=0)


class StopSearch:
    """One stop string in a text that grows (Knuth, Morris and Pratt): each character costs a constant, on
    average, whatever the text and the stop string have in common."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest end of the text that is a proper beginning of the stop string."""
        self._borders = [0, 0]
        """[n]: the same of stop[:n], looked up only as far as the text has matched."""

    def push(self, piece: str) -> int:
        """Adds a piece of text; where in it (one past) the first occurrence ends, 0: none ends in it."""
        if not self.matched and self.stop[0] not in piece:
            return 0
        first = 0
        for at, character in enumerate(piece, 1):
            self.matched = self._extended(self.matched, character)
            if self.matched == len(self.stop):
                first = first or at
                self.matched = self._border(self.matched)
        return first

    def _extended(self, matched: int, character: str) -> int:
        """How much is matched after one more character."""
        while matched and self.stop[matched] != character:
            matched = self._border(matched)
        return matched + (self.stop[matched] == character)

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) <= length:
            borders.append(self._extended(borders[-1], self.stop[len(borders) - 1]))
        return borders[length]
