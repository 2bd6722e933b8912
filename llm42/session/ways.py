"""Who is decoded which way in a replica, and when the policy is asked."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from llm42.config import Settings
from llm42.engine.base import SAME_ID, Engine
from llm42.host.cores import usable_cores
from llm42.protocol import Request
from llm42.session.backoff import Backoff
from llm42.session.interfaces import VerifierClient
from llm42.session.load import WAYS, Load, Progress, Rounds, Way
from llm42.session.machine import Session
from llm42.session.outputs import EngineFailed
from llm42.session.policy import (
    HOLD,
    choose,
    choose_best_effort,
    has_room_for_all,
    kv_needed,
    patience_of_best_effort_s,
    patience_s,
    rates,
    settled_window,
)
from llm42.session.promises import Promises
from llm42.session.rounds import rounds
from llm42.session.standing import Done, Lengths, Standing
from llm42.step_times import VerifierLoad

log = logging.getLogger(__name__)
Decide = Callable[[Progress, Load], Way]
"""What says which way a request takes. It may say what it will: the output is the same."""
AFTER = 8
"""Times HOLD: so many tokens a request stays where it is that had to leave its way because nothing came."""
PLAN_S, MANY_MORE = 0.1, 1.5
"""How often a plan is made, and at once for so many times the requests: a burst comes within less."""
MEMORY = 1 << 16
"""Committed tokens after which what was learnt of rollbacks counts half."""


@dataclass(slots=True)
class Acceptance:
    """How well the fast path's candidates stand, over all requests."""

    committed: float = 0.0
    rollbacks: float = 0.0
    wasted: float = 0.0

    def add(self, committed: int, rollbacks: int, wasted: int) -> None:
        """What has come since."""
        keep = 0.5 if self.committed > MEMORY else 1.0
        self.committed = keep * self.committed + committed
        self.rollbacks = keep * self.rollbacks + rollbacks
        self.wasted = keep * self.wasted + wasted

    @property
    def wasted_share(self) -> float:
        """Candidates thrown away per committed token."""
        return self.wasted / max(1.0, self.committed)

    def run(self, ahead: int) -> float:
        """Tokens per rollback, as if so many had stood before; infinite without one."""
        return (self.committed + ahead) / self.rollbacks if self.rollbacks else math.inf


class Ways:
    """One per generator; belongs to its event loop."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        decide: Decide = choose,
        decide_best_effort: Decide = choose_best_effort,
    ) -> None:
        self._settings, self._engine = settings.session, engine
        self._places = settings.engine.places
        self._one_device = shares_device(settings)
        self.decide, self.decide_best_effort, self.hold = decide, decide_best_effort, HOLD
        self.best_effort = self.movable = 0
        """Requests in progress that need no verifier, and those of them that it could decode."""
        self.moved: set[str] = set()
        """Ids of best-effort requests that a verifier is to decode."""
        self.deterministic: set[str] = set()
        """Ids of those in progress that a verifier decides on."""
        self.acceptance, self.promises = Acceptance(), Promises()
        self._ids: set[str] = set()
        self.done, self._standing = Done(), Standing(self._one_device)
        self._moves, self._plan = False, cast("Way | None", None)
        """Whether best effort goes to verifiers, and the way that is cheaper for all others."""
        self._rounds: Rounds | None = None
        """How long a round is in each, as of the last plan."""
        self._planned_at, self._planned_for = 0.0, 0
        self.lengths, self._of_best_effort = Lengths(), Lengths()
        """Of deterministic requests and of the others."""
        self.backoff = Backoff()
        """Whether best effort goes to verifiers after some has come back."""
        self.returns = Counter[str]()
        """How often, by reason, best effort left a verifier, or was asked and stayed where all is to move."""
        self._failed = False
        """The policy has raised something, and that was logged."""

    def meet(self, verifier: VerifierClient) -> None:
        """Where both share a device, each is told of the other: what it takes is no cost of theirs."""
        if self._one_device and not self.pinned:
            times = self._engine.times
            times.neighbour, times.row_s = (lambda: verifier.worked_s), (lambda: _row_s(verifier.load(None)))
            verifier.beside(lambda: times.worked.seconds)

    @property
    def pinned(self) -> bool:
        """Whether a setting says which way all take."""
        return self._settings.mode != "auto"

    @contextmanager
    def counted(self, request: Request, verified: bool) -> Iterator[None]:
        """A request while it is in progress. verified: a verifier decides on its tokens. Raises EngineFailed
        for an id that is in use: where it may go both ways, an engine would only find that on the way."""
        name, known = request.request_id, self._settings.mode != "verify"
        if known and name in self._ids:
            raise EngineFailed(SAME_ID)
        moves = not verified and may_move(request)
        if known:
            self._ids.add(name)
        if verified:
            self.deterministic.add(name)
        self.best_effort += not verified
        self.movable += moves
        self.done.begin(verified, time.monotonic())
        (self.lengths if verified else self._of_best_effort).begin(len(request.prompt))
        try:
            yield
        finally:
            self._ids.discard(name)
            self.deterministic.discard(name)
            self.moved.discard(name)
            self.promises.end(name)
            self.best_effort -= not verified
            self.movable -= moves
            self.done.end(time.monotonic(), self.best_effort + len(self.deterministic))

    # ---- decisions

    def first(self, session: Session, verifier: VerifierClient) -> Way:
        """For a deterministic request that has not begun."""
        return session.way if self.pinned else self.next(session, None, 0, verifier)

    def next(self, session: Session, way: Way | None, held: int, verifier: VerifierClient) -> Way:
        """For one that is under way. held: tokens that the engine has computed of it."""
        return self._asked(self.decide, session.request, self.progress(session, way, held), verifier)

    def next_best_effort(
        self, request: Request, output: int, way: Way | None, held: int, verifier: VerifierClient
    ) -> Way:
        """For a best-effort request, with so many tokens of output."""
        if way != "direct" and self.backoff.holds(time.monotonic()):
            return "verify"
        length = len(request.prompt) + output
        progress = replace(
            self._typical(way), length=length, output=output, most=request.max_tokens, held=held
        )
        found = self._asked(self.decide_best_effort, request, progress, verifier)
        if self._moves and way is None and found == "verify":
            self.returned("stays")
        return found

    def returned(self, reason: str) -> None:
        """A best-effort request has gone back to the engine."""
        self.returns[reason] += 1

    def came_back(self) -> None:
        """A best-effort request had to leave its verifier."""
        self.backoff.failed(time.monotonic())

    def came_on(self) -> None:
        """A verifier has begun to decode a best-effort request."""
        self.backoff.worked()

    def _asked(self, decide: Decide, request: Request, progress: Progress, verifier: VerifierClient) -> Way:
        name, way = request.request_id, progress.way or "verify"
        try:
            way = decide(progress, self.load(verifier, request))
        except Exception:  # of what may only cost time nobody's request ends
            self._say_once()
        if way == "direct":
            later = progress.left
            self.promises.give(name, later if progress.way == "direct" else kv_needed(progress), later)
        else:
            self.promises.end(name)
        return way

    def _say_once(self) -> None:
        if not self._failed:
            log.exception("which way is cheaper cannot be said: requests stay in theirs")
        self._failed = True

    def ended(self, session: Session) -> None:
        """Learns from a deterministic request that is over."""
        self.lengths.end(len(session.committed))

    def came(self, tokens: int) -> None:
        """Output of a request."""
        self.done.tokens += tokens

    def ended_best_effort(self, output: int) -> None:
        """Learns from a best-effort request that is over. output: its tokens."""
        self._of_best_effort.end(output)

    def patience_s(self, session: Session, begun: bool, verifier: VerifierClient) -> float:
        """How long one that is decoded directly may wait for its next token. begun: it has had one there."""
        progress, deadline_s = self.progress(session, "direct", 0), self._settings.commit_deadline_s
        try:
            return patience_s(progress, self.load(verifier, session.request), deadline_s, begun)
        except Exception:
            self._say_once()
            return patience_s(progress, Load(), deadline_s, begun)

    def patience_of_best_effort_s(self, request: Request, output: int, verifier: VerifierClient) -> float:
        """How long one that is to be decoded by a verifier may wait for its first token there."""
        progress, deadline_s = self._typical("direct"), self._settings.commit_deadline_s
        progress = replace(progress, length=max(progress.length, len(request.prompt) + output))
        try:
            return patience_of_best_effort_s(progress, self.load(verifier, request), deadline_s)
        except Exception:
            self._say_once()
            return patience_of_best_effort_s(progress, Load(), deadline_s)

    # ---- what the policy is told

    def load(self, verifier: VerifierClient, request: Request | None = None) -> Load:
        """Of this replica and of the verifier that has the request or would get it."""
        promised = self.promises.total - (0 if request is None else self.promises.of(request.request_id))
        others = self._of_best_effort
        load = Load(
            min(self.best_effort, self._places),
            min(self.movable, self._places),
            self._moves,
            len(self.deterministic),
            self._engine.times.costs,
            verifier.load(request),
            self._one_device,
            self._plan,
            promised,
            self.promises.coming,
            others.prompt / max(1.0, others.output),
            others.prompt + others.output,
            self.done.begins,
            self._rounds,
            max(0, self.movable - len(self.moved)),
        )
        soon = self._plan is not None and time.monotonic() - self._planned_at < PLAN_S
        many_more = load.count > MANY_MORE * max(1, self._planned_for)
        return load if soon and not many_more else self._planned(load)

    def _planned(self, load: Load) -> Load:
        """Makes a plan."""
        now, typical, backoff = time.monotonic(), self._typical(), self.backoff
        self._planned_at, self._planned_for = now, load.count
        load = replace(load, rounds=rounds(typical, load))
        self._rounds = load.rounds
        room = has_room_for_all(typical, load) and not backoff.lasts(now)
        plan = self._standing.next(now, load.count, self.done, load.rounds, room, backoff.holds(now))
        self._moves, self._plan = plan == "moved", "direct" if plan == "moved" else plan
        return replace(load, plan=self._plan, moves=self._moves)

    def progress(self, session: Session, way: Way | None, held: int) -> Progress:
        """Of a deterministic request; by what others have shown until it has shown something itself."""
        request, stats, output = session.request, session.stats, len(session.committed)
        typical, mine = self._typical(way), stats.verified_tokens - stats.direct_tokens
        if mine >= HOLD:
            wasted = (stats.rolled_back_tokens - session.dropped) / mine
            typical = replace(typical, wasted=wasted, window=session.target)
        length, most = len(request.prompt) + output, request.max_tokens
        return replace(typical, length=length, output=output, most=most, held=held)

    def _typical(self, way: Way | None = None) -> Progress:
        s, acceptance = self._settings, self.acceptance
        run, wasted = acceptance.run(s.max_window), acceptance.wasted_share
        window = settled_window(run, s.min_window, s.max_window)
        found = Progress(way, wasted=wasted, window=window)
        length, most = round(self.lengths.prompt), round(self.lengths.output)
        return replace(
            found, length=length, most=most, ahead=s.lookahead, deadline_s=s.commit_deadline_s, typical=most
        )

    def expected(self, verifier: VerifierClient) -> dict[Way, float]:
        """Tokens per second of the deterministic requests that the model expects in each way now; zeros where
        it knows too little, is not asked, or there are none."""
        found = dict.fromkeys(WAYS, 0.0)
        if self.pinned:
            return found
        try:
            return found | rates(self.load(verifier))
        except Exception:
            log.exception("what is expected of each way cannot be said")
            return found


def _row_s(verifier: VerifierLoad | None) -> float:
    return verifier.prompt_row_s if verifier is not None and verifier.is_measured else 0.0


def may_move(request: Request) -> bool:
    """Whether a verifier decodes a best-effort request as well as an engine does. Not one with a schema, or
    with a seed, whose noise is the engine's, nor one that wants what comes with the prompt. Nor one whose
    output counts for its penalties: to an engine that it goes back to, what it has of it may be prompt."""
    sampling = request.sampling
    drawn = request.seeded and sampling.temperature > 0.0
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    with_prompt = request.prompt_logprobs is not None or not request.max_tokens
    return not (drawn or penalised or with_prompt or request.json_schema is not None)


def shares_device(settings: Settings) -> bool:
    """Whether an engine and a verifier compute on the same GPU, or on the same cores."""
    engine, verifier = settings.engine, settings.verifier
    if settings.model.device == "cuda":
        return engine.gpus + verifier.gpus <= 1.0
    return engine.thread_count + verifier.threads > usable_cores()
