"""What the policy is told of a replica, of its verifier and of a request. Pure: no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from llm42.step_times import NOTHING, Costs, VerifierLoad

Way = Literal["verify", "direct"]
WAYS: tuple[Way, Way] = ("verify", "direct")
Plan = Literal["verify", "direct", "moved"]
"""The way of all deterministic requests of a replica; "moved": direct, and best effort with them."""
LEAST_LEFT = 128
"""A request is expected to go on for as long as it has been going on, but for so many tokens at least, within
max_tokens: few outputs are as long as they may be."""


class Rounds(NamedTuple):
    """Seconds in which as many tokens come as requests are in progress (rounds.py)."""

    verify: float
    """The fast path decodes all, verifiers compute windows."""
    direct: float
    """Verifiers decode the deterministic requests."""
    moved: float
    """And all best effort that they can."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is known of the replica and its verifier."""

    best_effort: int = 0
    """Requests that need no verifier."""
    movable: int = 0
    """Of these, those that it could decode."""
    moves: bool = False
    """Whether they go there now (plan "moved")."""
    deterministic: int = 1
    """The replica's, in both ways."""
    fast: Costs = NOTHING
    """Of the fast path's steps."""
    verifier: VerifierLoad | None = None
    """None: none is known."""
    one_device: bool = True
    """Whether the fast path and the verifier share one."""
    plan: Way | None = None
    """The way of all deterministic requests (standing.py); None: too little is known."""
    promised: float = 0.0
    """KV, in tokens, that those of the replica who go direct have not taken yet."""
    coming: int = 0
    """Those of them who are in no count of the verifier's yet."""
    prompts: float = 0.0
    """Tokens of prompts per token of output, of best effort."""
    kv_each: float = 0.0
    """KV, in tokens, that a typical best-effort request comes to hold."""
    begins: float | None = None
    """Share of deterministic requests among those that begin; None: as among those in progress."""
    rounds: Rounds | None = None
    """Of each way, for requests as they are typically; None: too little is known, or nobody asks."""
    behind: int | None = None
    """Of the movable ones, those that the fast path has; None: all."""

    @property
    def is_known(self) -> bool:
        """Whether both have been measured."""
        return bool(self.fast.times) and self.verifier is not None and self.verifier.is_measured

    @property
    def decode(self) -> Costs:
        """What is known of the verifier's decoding; of more requests than it decoded of late at once, or of
        fewer, what the fast path tells, which computes the same model."""
        assert self.verifier is not None
        known, fast = self.verifier.decode, self.fast
        measured = self.verifier.decode_steps.times
        if not fast.times:
            return known
        if not measured:
            return replace(fast, row_s=self.verifier.prompt_row_s)
        most, seconds = measured[-1]
        ratio = seconds / fast.at(most)
        more = tuple((n, s * ratio) for n, s in fast.times if n > most)
        least, seconds = measured[0]
        ratio = seconds / fast.at(least)
        fewer = tuple((n, s * ratio) for n, s in fast.times if n < least)
        return replace(self.verifier.decode_steps, times=(*fewer, *measured, *more))

    def window_s(self, rows: float) -> float:
        """Seconds of a verifier's step of so many rows of windows. They share their contexts: at most what so
        many rows of a prompt cost beside one that is decoded."""
        assert self.verifier is not None
        beside_s = self.decode.at(1.0) + rows * self.verifier.prompt_row_s
        known = self.verifier.window_steps
        return min(beside_s, known.at(rows)) if known.times else beside_s

    @property
    def prompt_row_s(self) -> float:
        """Seconds that a row of a prompt costs on the fast path; before one was measured there, what it costs
        its verifier."""
        assert self.verifier is not None
        return self.fast.row_s or self.verifier.prompt_row_s

    @property
    def count(self) -> int:
        """Requests in progress."""
        return self.best_effort + self.deterministic

    @property
    def share(self) -> float:
        """Of deterministic requests among those that begin."""
        return self.deterministic / self.count if self.begins is None else self.begins

    @property
    def joined(self) -> float:
        """Of the replica's requests, those of one verifier if it decodes all that it can."""
        assert self.verifier is not None
        return (self.deterministic + self.movable) * self.verifier.share

    @property
    def here(self) -> float:
        """Of the deterministic requests, those of one verifier."""
        assert self.verifier is not None
        return self.deterministic * self.verifier.share


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of the request."""

    way: Way | None = None
    """None: it has not begun. Best effort on the fast path goes verify, as it were: an engine has it."""
    length: int = 1
    """Prompt and output so far."""
    output: int = 0
    """The output so far."""
    most: int = 1
    """The longest that the output may be."""
    held: int = 0
    """How many of these tokens the fast path is believed to have computed."""
    wasted: float = 0.0
    """Candidates thrown away per committed token."""
    window: float = 15
    """Candidates of a window."""
    ahead: int = 128
    """How far the fast path may be ahead of the commits, in candidates."""
    typical: int = LEAST_LEFT
    """How long outputs are in general."""
    deadline_s: float = math.inf
    """A window is sent so long after a commit, however short it is."""

    @property
    def left(self) -> int:
        """Tokens that are expected to come."""
        expected = self.typical if self.way is None else LEAST_LEFT
        return max(0, min(self.most - self.output, max(self.output, expected)))
