"""From committed tokens to text: incremental detokenisation and stop strings, one token at a time, so that
the result does not depend on how tokens were grouped into commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm42.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True)
class OutputText:
    """Text of one output. `push` returns what may be shown; a part that could begin a stop string is held
    back."""

    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    include_stop: bool = False
    stopped: bool = False
    _held: str = ""
    _detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Adds tokens; returns the text to show and how many tokens were used (fewer once a stop string is
        found)."""
        shown = ""
        for used, token in enumerate(tokens, 1):
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
        found = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if found:
            at, s = min(found)
            self.stopped = True
            shown, self._held = self._held[: at + (len(s) if self.include_stop else 0)], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self.stop), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
