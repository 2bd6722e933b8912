"""What the verifier keeps of a window while it is computed, and what it counts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from llm42.protocol import Commit, Failure, Window
from llm42.sampling import Sampled
from llm42.verifier.kv_store import HeldKV
from llm42.verifier.runner import SequenceRows

Answer = Commit | Failure


@dataclass(slots=True, eq=False)
class Job:
    """One window on its way through the verifier; rows [next, end) are still to be computed, and those
    before `issued` are in a step that runs. Compared by identity: a list of them is searched in each step."""

    window: Window
    future: Future[Answer]
    arrived: float
    started: float = 0.0
    sequence: HeldKV | None = None
    next: int = 0
    issued: int = 0
    cached: int = 0
    cold: bool = False
    """Nothing is taken from the cache and nothing left in it."""
    released: bool = False
    abandoned: bool = False
    sampled: list[Sampled] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the last position to compute."""
        return len(self.window.tokens) + len(self.window.candidates)

    @property
    def left(self) -> int:
        """Rows that no step has yet."""
        return self.end - self.issued

    def rows(self, count: int) -> SequenceRows:
        """The next `count` rows, as a runner wants them."""
        assert self.sequence is not None
        return SequenceRows(
            tokens=self.sequence.tokens,
            start=self.issued,
            count=count,
            block_table=self.sequence.blocks,
            first_logit=len(self.window.tokens) - 1,
            prompt_len=self.window.prompt_len,
            sampling=self.window.sampling,
            num_logprobs=self.window.num_logprobs,
            score=self.window.score,
        )


@dataclass(slots=True)
class StepInFlight:
    """A step that runs, or that a pipelined runner has queued."""

    plan: list[tuple[Job, int]]
    rows: int
    bucket: int
    began: float
    pending: Any = None
    """What the runner knows it by."""


@dataclass(slots=True)
class VerifierStats:
    """Counters since the start; times in seconds."""

    windows: int = 0
    steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    cached_rows: int = 0
    step_s: float = 0.0
    queue_s: float = 0.0
    failures: int = 0
    waiting: int = 0
    active: int = 0
    kv_held_blocks: int = 0
    kv_cached_blocks: int = 0
    kv_blocks: int = 0
    idle_sequences: int = 0
    cache_hits: int = 0
    evictions: int = 0
