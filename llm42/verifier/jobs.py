"""What the verifier keeps of a window while it is computed and of a request that it decodes itself, and what
it counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure, Window
from llm42.sampling import Sampled
from llm42.verifier.prefixes import HeldKV
from llm42.verifier.runner import SequenceRows

AUDIT_PATIENCE_S = 10.0
"""How long an audit waits for room that comes by itself. Then it takes its turn, and room, as others do: its
caller waits no longer than session.verify_timeout_s."""
Answer = Commit | Failure
Sink = Callable[[Commit | Failure | LLM42Error], None]
"""Where a follower's answers go. Called on the step thread, at most once a step; must not raise or wait."""


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
    awaited: bytes | None = None
    """A block that is being computed for another one, and that it would compute again: it waits for it."""
    keys: list[bytes] = field(default_factory=list)
    """Of the first blocks of its prompt, as far as they were needed to know that."""
    released: bool = False
    abandoned: bool = False
    sampled: list[Sampled] = field(default_factory=list)
    follower: Follower | None = None
    """For whom the window is computed, if the verifier is to go on after it."""

    @property
    def end(self) -> int:
        """One past the last position to compute."""
        return len(self.window.tokens) + len(self.window.candidates)

    @property
    def left(self) -> int:
        """Rows that no step has yet."""
        return self.end - self.issued

    @property
    def patient(self) -> bool:
        """Whether others may pass it while it has no room: nobody waits for an audit."""
        return self.cold and time.monotonic() - self.arrived < AUDIT_PATIENCE_S

    @property
    def yields(self) -> bool:
        """Whether it gives way to others."""
        return self.window.yields

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


@dataclass(slots=True, eq=False)
class Follower:
    """A request that the verifier decodes by itself, from its window until its end or release.

    What computes it is `work`: a job for its window, or for what is missing of its KV after a pause or a
    preemption; then a `Decode`. Without work it is idle: at its end, or out of credit."""

    window: Window
    sink: Sink
    number: int = 0
    """The youngest has the highest."""
    until: int = 0
    """Length of prompt and output together up to which its credit reaches. A window's credit counts from its
    commit, so it is added then."""
    end: int = 0
    """The length that it may reach now: within its credit, and no longer than the output may be."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output as far as they are known here; empty before the first commit. It grows in place."""
    work: Job | Decode | None = None
    ended: bool = False
    idle_since: float = 0.0
    stops: frozenset[int] = frozenset()

    @classmethod
    def of(cls, window: Window, sink: Sink) -> Follower:
        """One that has just come."""
        return cls(window, sink, stops=frozenset(window.stop_token_ids))

    @property
    def age(self) -> tuple[bool, int]:
        """The oldest has the least; who gives way to others is younger than all of them."""
        return self.window.yields, self.number

    def extend(self, until: int) -> None:
        """Its credit reaches up to `until`; it is never lowered."""
        self.until = max(self.until, until)
        self.end = min(self.until, self.window.max_len)

    def job(self, now: float) -> Job:
        """The window that computes its next token from all that is known of it. `work` becomes it."""
        window = self.window
        if self.tokens:
            window = replace(window, tokens=tuple(self.tokens), candidates=())
        self.work = job = Job(window, Future(), now, follower=self)
        return job


@dataclass(slots=True, eq=False)
class Decode:
    """A follower that takes one row of each step. Its KV is in `sequence`, whose tokens are the follower's;
    rows before `issued` are computed, or the last of them is in a step that runs."""

    follower: Follower
    sequence: HeldKV
    issued: int
    asked: SequenceRows
    """Its row in a step, as a runner wants it: the same object each time, with another position."""
    row: int = -1
    """The logit row in the last step that it took part in."""
    abandoned: bool = False

    @classmethod
    def of(cls, follower: Follower, sequence: HeldKV, issued: int) -> Decode:
        """One whose first `issued` rows are computed."""
        window, asked_for = follower.window, follower.window.num_logprobs
        rows = SequenceRows(
            follower.tokens, issued, 1, sequence.blocks, issued, window.prompt_len, window.sampling,
            asked_for, decodes=True,
        )  # fmt: skip
        return cls(follower, sequence, issued, rows)

    def ask(self, row: int) -> SequenceRows:
        """Its next row, which becomes logit row `row` of the next step."""
        at, rows = self.issued, self.asked
        rows.start, rows.feed = at, -1 if at < len(rows.tokens) else self.row
        self.row, self.issued = row, at + 1
        return rows


@dataclass(slots=True)
class StepInFlight:
    """A step that runs, or that a pipelined runner has queued. Its logit rows begin with those of
    `decodes`."""

    decodes: list[Decode]
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
    following: int = 0
    """Requests that are decoded in each step."""
    verified: int = 0
    """Tokens of commits that answer candidates; neither audits nor scores."""
    decoded: int = 0
    """Tokens that were decoded directly."""
    preemptions: int = 0
    direct: int = 0
    """Requests that are decoded directly, those too that wait for KV or for their prompt's rows."""
    decode_steps: int = 0
    """Steps in which requests were decoded."""
    decode_s: float = 0.0
    """The time of these."""
    yielding: int = 0
    """Of `direct`, those that give way to others."""
    yielding_kv: int = 0
    """What these hold of the KV, in tokens; blocks that they share count for each."""
