"""Requests on one fast path and one verifier, simulated event by event around the real session.

Times are of an 8B shape on an H200: a step of n requests takes 6 ms + 0.028 ms x n (64: 6.5 measured, 256:
13.2); a verifier's step 35,000 rows/s, at least 5 ms, at most 1,024 rows; a window's way there and back
`round_trip`; 15 ms from a rollback, or from the answer to a request that stood at its bound, until the fast
path may take it again. A candidate differs from the verifier's token with probability p, independently.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

from llm42.config import SessionSettings
from llm42.protocol import Commit, Request, TokenLogprob, VerifyTimings, Window
from llm42.session.actions import Action, Emit, Extend, Rollback
from llm42.session.machine import Session

RIGHT, WRONG = 1, 0
LOGPROB = TokenLogprob(RIGHT, 0.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in seconds, sizes in tokens or rows."""

    step: float = 6e-3
    step_per_request: float = 28e-6
    host_per_output: float = 0.0
    host_per_window: float = 0.0
    prefill_rate: float = 40_000.0
    verifier_rate: float = 35_000.0
    verifier_step: float = 5e-3
    verifier_rows: int = 1024
    round_trip: float = 10e-3
    resubmit: float = 15e-3
    prompt: int = 0
    output: int = 256


@dataclass(eq=False, slots=True)
class Stream:
    """One request: its session, and where the fast path is with it."""

    session: Session
    position: int = 0
    """Output tokens that the driver was given."""
    pending: int = 0
    """Decoded and not reported yet."""
    limit: int = 0
    queued: bool = False
    """In the batch, before it, or on the way to it."""
    attempt: int = 0
    rollbacks: int = 0
    lost: int = 0
    sent: float = 0.0
    timer: float = -1.0


@dataclass(slots=True)
class Totals:
    """What happened after the warm-up."""

    committed: int = 0
    decoded: int = 0
    lost: int = 0
    rollbacks: int = 0
    windows: int = 0
    latency: float = 0.0
    stood: int = 0
    running: int = 0
    steps: int = 0


@dataclass
class Simulation:
    """`run` gives the figures of one load."""

    rate: float
    slots: int
    clients: int
    costs: Costs = field(default_factory=Costs)
    settings: SessionSettings = field(default_factory=SessionSettings)
    make: Callable[..., Session] = Session
    seed: int = 0
    now: float = 0.0
    total: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.rng, self.order = Random(self.seed), count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.batch: dict[Stream, None] = {}
        self.waiting: tuple[deque[Stream], deque[Stream]] = deque(), deque()  # resubmitted, new
        self.stepping = self.verifying = self.hosting = self.reporting = False
        self.reported: dict[Stream, None] = {}  # with pending tokens
        self.host: deque[tuple[Callable[[], float], Callable[[], None]]] = deque()  # cost, event
        self.windows: list[list[Any]] = []  # [stream, window, arrival, rows left, first row's time]

    def run(self, seconds: float, warm: float = 5.0) -> dict[str, float]:
        """Figures of `seconds` after a warm-up, in simulated time. wasted_share: what was rolled back of what
        was decoded; stood_per_1000: how often a request reached its bound per 1,000 committed tokens."""
        for _ in range(self.clients):  # outputs of any length at first: no two requests in step
            self._enter(1 + self.rng.randrange(self.costs.output))
        measured = False
        while self.events[0][0] < warm + seconds:
            self.now, _, event = heapq.heappop(self.events)
            if not measured and self.now >= warm:
                self.total, measured = Totals(), True
            event()
        t = self.total
        return {
            "committed_tok_s": t.committed / seconds,
            "wasted_share": t.lost / t.decoded,
            "lost_per_rollback": t.lost / t.rollbacks if t.rollbacks else 0.0,
            "rollbacks_per_1000": 1000 * t.rollbacks / t.committed,
            "commit_ms": 1000 * t.latency / t.windows,
            "tokens_per_window": t.committed / t.windows,
            "stood_per_1000": 1000 * t.stood / t.committed,
            "running": t.running / t.steps,
        }

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), event))

    # ---- the fast path

    def _enter(self, output: int) -> None:
        request = Request("r", (RIGHT,), output, deterministic=True)
        session = self.make(request, self.settings, self.now)
        stream = Stream(session, limit=session.limit, queued=True)
        self.waiting[1].append(stream)
        self._step()

    def _resubmit(self, stream: Stream) -> None:
        self.batch.pop(stream, None)
        self.reported.pop(stream, None)
        stream.pending = 0
        stream.queued, stream.attempt = True, stream.attempt + 1
        attempt = stream.attempt

        def arrive() -> None:
            if attempt == stream.attempt and not stream.session.done:
                self.waiting[0].append(stream)
                self._step()

        self._at(self.now + self.costs.resubmit, arrive)

    def _step(self) -> None:
        """Begins a step if none is under way."""
        if self.stepping:
            return
        new = 0
        for index, queue in enumerate(self.waiting):
            while queue and len(self.batch) < self.slots:
                self.batch[queue.popleft()] = None
                new += index
        if self.batch:
            running, c = [(s, s.attempt) for s in self.batch], self.costs
            self.stepping = True
            took = c.step + c.step_per_request * len(running) + new * c.prompt / c.prefill_rate
            self._at(self.now + took, lambda: self._stepped(running))

    def _stepped(self, running: list[tuple[Stream, int]]) -> None:
        self.stepping = False
        self.total.steps += 1
        self.total.running += len(running)
        for stream, attempt in running:
            self.total.decoded += 1
            if attempt != stream.attempt or stream.session.done:
                continue
            stream.pending += 1
            self.reported[stream] = None
        if self.reported and not self.reporting:
            self.reporting = True
            self._on_host(lambda: self.costs.host_per_output * len(self.reported), self._report)
        self._step()

    # ---- the driver's process: one thing at a time; tokens that wait for it come together

    def _on_host(self, cost: Callable[[], float], event: Callable[[], None]) -> None:
        self.host.append((cost, event))
        if not self.hosting:
            self._next_on_host()

    def _next_on_host(self) -> None:
        self.hosting = bool(self.host)
        if self.host:
            cost, event = self.host.popleft()

            def done() -> None:
                event()
                self._next_on_host()

            self._at(self.now + cost(), done)

    def _report(self) -> None:
        """Passes on what the fast path has decoded, up to each request's bound."""
        self.reporting = False
        reported, self.reported = self.reported, {}
        for stream in reported:
            session, start = stream.session, stream.position
            many = min(stream.pending, stream.limit - start)
            tokens = [WRONG if self.rng.random() < self.rate else RIGHT for _ in range(many)]
            stream.pending, stream.position = 0, start + many
            if stream.position >= stream.limit:
                self.batch.pop(stream, None)
                stream.queued = False
                self.total.stood += stream.limit < session.request.max_tokens
            if many and not session.done:
                self._apply(stream, session.candidates(session.epoch, start, tokens))

    def _apply(self, stream: Stream, actions: list[Action]) -> None:
        """What the driver does after an event."""
        session = stream.session
        for action in actions:
            if isinstance(action, Rollback):
                stream.position, stream.limit = len(action.output), action.limit
                self._resubmit(stream)
            elif isinstance(action, Extend):
                stream.limit = action.limit
                if not stream.queued and stream.position < stream.limit:
                    self._resubmit(stream)
            if isinstance(action, Emit):
                self.total.committed += len(action.tokens)
        self.total.rollbacks += session.stats.rollbacks - stream.rollbacks
        self.total.lost += session.stats.rolled_back_tokens - stream.lost
        stream.rollbacks, stream.lost = session.stats.rollbacks, session.stats.rolled_back_tokens
        if session.done:
            self.batch.pop(stream, None)
            self.reported.pop(stream, None)
            self._enter(self.costs.output)
        else:
            self._ask(stream)

    def _ask(self, stream: Stream) -> None:
        """Sends the window that is due, or asks again at the deadline."""
        session = stream.session
        window, deadline = session.due(self.now), session.deadline(self.now)
        if window is not None:
            stream.sent = self.now
            rows = len(window.candidates) + 1 + (self.costs.prompt if session.stats.windows == 1 else 0)
            self._at(
                self.now + self.costs.round_trip / 2,
                lambda: self._arrive([stream, window, self.now, rows, 0.0]),
            )
        elif deadline is not None and deadline > max(self.now, stream.timer):
            stream.timer = deadline
            self._at(deadline, lambda: None if session.done else self._ask(stream))

    # ---- the verifier

    def _arrive(self, entry: list[Any]) -> None:
        self.windows.append(entry)
        self._verify()

    def _verify(self) -> None:
        """Begins a step if none is under way: windows first, a quarter for the oldest prompt."""
        if self.verifying or not self.windows:
            return
        size = self.costs.verifier_rows
        long = [entry for entry in self.windows if entry[3] > size // 2]
        short = [entry for entry in self.windows if entry[3] <= size // 2]
        room = size
        for entry in (*short, *long):
            free = room - (size // 4 if long and entry[3] <= size // 2 else 0)
            taken = min(max(0, free), entry[3])
            room, entry[3] = room - taken, entry[3] - taken
            entry[4] = entry[4] or (self.now if taken else 0.0)
        done = [entry for entry in self.windows if not entry[3]]
        self.windows = [entry for entry in self.windows if entry[3]]
        self.verifying = True
        took = max(self.costs.verifier_step, (size - room) / self.costs.verifier_rate)
        self._at(self.now + took, lambda: self._verified(done))

    def _verified(self, done: list[list[Any]]) -> None:
        self.verifying = False
        for stream, window, arrival, _, began in done:
            commit = answer(window, VerifyTimings(queue_s=began - arrival))
            self._at(self.now + self.costs.round_trip / 2, partial(self._back, stream, commit))
        self._verify()

    def _back(self, stream: Stream, commit: Commit) -> None:
        self._on_host(lambda: self.costs.host_per_window, lambda: self._committed(stream, commit))

    def _committed(self, stream: Stream, commit: Commit) -> None:
        self.total.windows += 1
        self.total.latency += self.now - stream.sent
        self._apply(stream, stream.session.commit(commit, self.now))


def answer(window: Window, timings: VerifyTimings) -> Commit:
    """The verifier's: every token is RIGHT."""
    sent = window.candidates
    accepted = sent.index(WRONG) if WRONG in sent else len(sent)
    return Commit("r", len(window.tokens), accepted, RIGHT, (LOGPROB,) * (accepted + 1), "f", timings)
