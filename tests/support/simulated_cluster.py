"""A replica and its verifier as a simulation: steps take what two curves say, requests come and go, and the
real policy decides by what was measured, told as late as in a service.

One engine decodes best effort and candidates, one verifier windows and what it decodes by itself. On one
device each gets half of it while both have something to do, as time slicing shares a GPU; on two nobody
waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from llm42.engine.vllm.connection import Stats
from llm42.session.backoff import Backoff
from llm42.session.best_effort import ASK_S, ASKS
from llm42.session.load import LEAST_LEFT, Load, Progress, Rounds, Way
from llm42.session.policy import (
    HOLD,
    choose,
    choose_best_effort,
    has_room_for_all,
    patience_of_best_effort_s,
    settled_window,
)
from llm42.session.rounds import rounds
from llm42.session.standing import Done, Lengths, Standing
from llm42.session.ways import AFTER, MANY_MORE, PLAN_S, Acceptance
from llm42.step_times import Costs, Fading, Peak, StepTimes, VerifierLoad

LARGEST, CHUNK = 1024, 2048
"""Rows of a step of the verifier, and prompts' tokens in one of the engine."""
VLLM = Costs(
    ((1.0, 0.0049), (8.0, 0.0054), (32.0, 0.0072), (64.0, 0.0094), (128.0, 0.0105), (256.0, 0.0176)), 25e-6
)
DECODE = Costs(
    ((1.0, 0.0053), (8.0, 0.0056), (32.0, 0.0074), (64.0, 0.0096), (128.0, 0.0108), (256.0, 0.0181)), 33e-6
)
WINDOWS = Costs(
    ((1.0, 0.0053), (8.0, 0.0055), (64.0, 0.0060), (256.0, 0.0132), (512.0, 0.02), (1024.0, 0.035)), 33e-6
)
"""An 8B model on one H200: vLLM's steps, the verifier's by the requests that it decodes, and by the rows of
windows."""
LEAST, WINDOW, AHEAD, START, DEADLINE_S = 7, 63, 128, 15, 0.5
Choice = Callable[[Progress, Load], Way]
Patience = Callable[[Progress, Load, float], float]


@dataclass(slots=True, eq=False)
class Job:
    """A request in progress."""

    deterministic: bool
    prompt: int
    most: int
    way: Way | None = None
    output: int = 0
    """Committed, or of best effort all."""
    proposed: int = 0
    """Candidates after that."""
    window: int = 0
    """Candidates of the window in flight; 0: none is."""
    waits: bool = False
    """Whether it is."""
    sent_at: float = 0.0
    committed_at: float = 0.0
    to_prefill: int = 0
    """Tokens that the engine has still to compute before it decodes."""
    to_compute: int = 0
    """Rows that the verifier has still to compute before those of the window, or before it decodes."""
    held: int = 0
    """Tokens that the engine had computed when it was left."""
    decided_at: int = 0
    changes: int = 0
    target: int = START
    went_at: float = 0.0
    """When it took its way."""
    asked: int = 0
    """Times that it has asked since, without a token."""
    tries: int = 0
    """What was under way before the last of them is nobody's."""


@dataclass
class Cluster:
    """mode: pinned, or auto: `decide` and `decide_best_effort` are asked. late_s: how old the verifier's
    counts are. wrong: share of the candidates that are. One seed, one run."""

    fast: Costs = VLLM
    decode: Costs = DECODE
    windows: Costs = WINDOWS
    mode: str = "auto"
    devices: int = 1
    late_s: float = 1.5
    wrong: float = 0.0
    movable: bool = False
    seed: int = 0
    decide: Choice = choose
    decide_best_effort: Choice = choose_best_effort
    patience: Patience = patience_of_best_effort_s
    places: int = LARGEST
    kv_tokens: int = 10**9
    knows_peak: bool = True
    """False: counts of different moments are subtracted."""
    knows_neighbour: bool = True
    """False: what the other one did on the device meanwhile counts as each step's own time."""
    knows_behind: bool = True
    """False: all best effort counts as if the engine had it."""
    asks_again: bool = True
    """False: best effort decides once before its first token."""
    now: float = 0.0
    tokens: int = 0
    changes: int = 0
    moves: bool = False
    plan: Way | None = None
    rounds: Rounds | None = None
    planned_at: float = -1.0
    planned_for: int = 0
    ended: list[Job] = field(default_factory=list)
    work: list[tuple[float, Callable[[], None]] | None] = field(default_factory=lambda: [None, None])
    """The steps that run, of the engine and of the verifier: the seconds that each still needs of the device,
    and its end."""
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = lambda: self.now  # noqa: E731
        self.random = Random(self.seed)
        self.stats = Stats(times=StepTimes(clock, late=True))
        self.decode_times = StepTimes(clock)
        self.window_times = StepTimes(clock)
        if self.devices == 1 and self.knows_neighbour:
            engine, verifier = self.stats.times, self.decode_times
            engine.neighbour = lambda: verifier.worked.seconds
            engine.row_s = self._row_s
            verifier.neighbour = self.window_times.neighbour = lambda: engine.worked.seconds
        self.waited, self.mine, self.acceptance = Fading(clock), Peak(clock), Acceptance()
        self.done, self.standing = Done(), Standing(self.devices == 1)
        self.backoff = Backoff()
        self.came_back = 0
        """Best effort that had waited for a verifier in vain."""
        self.lengths = {True: Lengths(), False: Lengths()}
        self.said: deque[tuple[float, int]] = deque([(0.0, 0)])
        self.queue: deque[Job] = deque()

    # ---- what the policy is told

    def _row_s(self) -> float:
        load = VerifierLoad(self.decode_times.costs, self.window_times.costs)
        return load.prompt_row_s if load.is_measured else 0.0

    def load(self) -> Load:
        """As Ways.load."""
        direct = sum(j.way == "direct" for j in self.jobs)
        self.mine.set(direct)
        self.said.append((self.now, direct))
        while len(self.said) > 1 and self.said[1][0] <= self.now - self.late_s:
            self.said.popleft()
        said = self.said[0][1]
        others = max(0, said - (self.mine.most if self.knows_peak else direct))
        known = self.decode_times.costs, self.window_times.costs
        used = sum(j.prompt + j.output for j in self.jobs if j.way == "direct" and not j.to_compute)
        promised = sum(
            j.prompt + j.output if j.to_compute else LEAST_LEFT for j in self.jobs if j.way == "direct"
        )
        free = max(0, self.kv_tokens - used)
        limits = said, others, self.places, self.kv_tokens, free
        verifier = VerifierLoad(*known, *limits, self.waited.value)
        best_effort = sum(not j.deterministic for j in self.jobs)
        movable = best_effort if self.movable else 0
        count, fast = len(self.jobs) - best_effort, self.stats.times.costs
        load = Load(best_effort, movable, self.moves, count, fast, verifier, self.devices == 1, self.plan)
        load = replace(load, promised=promised, coming=max(0, direct - said))
        others = self.lengths[False]
        prompts, kv_each = others.prompt / max(1.0, others.output), others.prompt + others.output
        load = replace(load, prompts=prompts, kv_each=kv_each, begins=self.done.begins)
        behind = sum(not j.deterministic and j.way == "verify" for j in self.jobs) if self.movable else 0
        load = replace(load, behind=behind if self.knows_behind else None)
        many_more = load.count > MANY_MORE * max(1, self.planned_for)
        if self.plan is None or self.now - self.planned_at >= PLAN_S or many_more:
            self._plan(load)
        return replace(load, moves=self.moves, plan=self.plan, rounds=self.rounds)

    def _plan(self, load: Load) -> None:
        self.planned_at, self.planned_for = self.now, load.count
        typical = self._progress(
            Job(True, round(self.lengths[True].prompt), round(self.lengths[True].output)), None
        )
        load = replace(load, rounds=rounds(typical, load))
        self.rounds = load.rounds
        room = has_room_for_all(typical, load) and not self.backoff.lasts(self.now)
        kept = self.backoff.holds(self.now)
        plan = self.standing.next(self.now, len(self.jobs), self.done, load.rounds, room, kept)
        self.moves, self.plan = plan == "moved", "direct" if plan == "moved" else plan

    def _progress(self, job: Job, way: Way | None) -> Progress:
        run, wasted = self.acceptance.run(WINDOW), self.acceptance.wasted_share
        window = settled_window(run, LEAST, WINDOW)
        length = job.prompt + job.output
        known = job.output, job.most, job.held, wasted, window, AHEAD
        return Progress(way, length, *known, typical=round(self.lengths[True].output), deadline_s=DEADLINE_S)

    # ---- requests

    def start(self, job: Job) -> None:
        """One more."""
        self.jobs.append(job)
        self.done.begin(job.deterministic, self.now)
        self.lengths[job.deterministic].begin(job.prompt)
        self._go(job, self._way_of(job, None))

    def _way_of(self, job: Job, way: Way | None) -> Way:
        if self.mode != "auto":
            pinned: Way = "direct" if self.mode == "direct" and job.deterministic else "verify"
            return pinned
        if not job.deterministic and way != "direct" and self.backoff.holds(self.now):
            return "verify"
        decide = self.decide if job.deterministic else self.decide_best_effort
        return decide(self._progress(job, way), self.load())

    def _ask_again(self) -> None:
        """Best effort without a token of the engine asks whether it goes after all."""
        if self.mode != "auto" or not self.asks_again:
            return
        for job in self.jobs:
            asks = not job.deterministic and job.way == "verify" and not job.output and not job.changes
            if asks and job.asked < ASKS and self.now >= job.went_at + (job.asked + 1) * ASK_S:
                job.asked += 1
                if self._way_of(job, None) == "direct":
                    job.changes += 1
                    self._go(job, "direct")

    def _give_up(self) -> None:
        """Best effort that has waited for too long goes back, and stays."""
        moved = [j for j in self.jobs if not j.deterministic and j.way == "direct" and j.to_compute]
        load = self.load() if moved else None
        for job in moved:
            assert load is not None
            length = max(job.prompt + job.output, round(self.lengths[True].prompt))
            progress = replace(self._progress(job, "direct"), length=length)
            if self.now - job.went_at > self.patience(progress, load, DEADLINE_S):
                self.backoff.failed(self.now)
                self.came_back += 1
                job.changes += 1
                self._go(job, "verify")
                job.decided_at = job.output + AFTER * HOLD

    def _go(self, job: Job, way: Way) -> None:
        length = job.prompt + job.output
        job.proposed, job.waits, job.window, job.decided_at = 0, False, 0, job.output
        self.queue = deque(j for j in self.queue if j is not job)
        job.tries += 1
        job.went_at = self.now
        if way == "verify":
            job.to_prefill = length - job.held
            job.to_compute = length if job.way is None else 0
        elif job.way is None or not job.deterministic:
            job.to_compute = length
        if job.way == "verify" and way == "direct":
            job.held = length if job.to_prefill == 0 else 0
        job.way = way

    def _may_change(self, job: Job) -> None:
        later = job.changes if job.deterministic or job.way == "verify" else 0
        if self.mode != "auto" or job.output < job.decided_at + (HOLD << later):
            return
        job.decided_at = job.output
        way = self._way_of(job, job.way)
        if way != job.way:
            job.changes += 1
            self.changes += 1
            self._go(job, way)

    def _commit(self, job: Job, tokens: int) -> None:
        tokens, job.committed_at = min(tokens, job.most - job.output), self.now
        self.done.tokens += tokens
        job.output += tokens
        self.tokens += tokens
        if job.output >= job.most:
            self.jobs.remove(job)
            job.tries += 1
            self.ended.append(job)
            self.done.end(self.now, len(self.jobs))
            self.lengths[job.deterministic].end(job.output)

    # ---- steps

    def _engine_step(self) -> tuple[float, Callable[[], None]] | None:
        rows, chunk, ended = list[tuple[Job, int]](), 0, 0
        for job in self.jobs:
            if job.way != "verify":
                continue
            if job.to_prefill:
                part = min(job.to_prefill, CHUNK - chunk)
                job.to_prefill -= part
                chunk += part
                ended += job.prompt if part and not job.to_prefill else 0
            elif not job.deterministic or job.proposed < min(AHEAD, job.most - job.output):
                rows.append((job, job.tries))
        if not rows and not chunk:
            self.stats.rest()
            return None
        seconds = (self.fast.at(len(rows)) if rows else 0.0) + chunk * self.fast.row_s

        def end() -> None:
            self.stats.step(len(rows), ended, self.now)
            for job, tries in rows:
                if job.tries == tries:
                    self._decoded(job)

        return seconds, end

    def _decoded(self, job: Job) -> None:
        if not job.deterministic:
            self._commit(job, 1)
            if job.output < job.most:
                self._may_change(job)
            return
        job.proposed += 1
        self._send_due(job)

    def _send_due(self, job: Job) -> None:
        over = job.output + job.proposed >= job.most or self.now >= job.committed_at + DEADLINE_S
        if job.proposed and not job.waits and (job.proposed >= job.target or over):
            job.waits, job.window, job.sent_at = True, min(WINDOW, job.proposed), self.now
            self.queue.append(job)

    def _verifier_step(self) -> tuple[float, Callable[[], None]] | None:
        decodes = [(j, j.tries) for j in self.jobs if j.way == "direct" and not j.to_compute]
        rows, answered = 0, list[tuple[Job, int]]()
        coming = [j for j in self.jobs if j.way == "direct" and j.to_compute]
        for job in sorted(coming, key=lambda j: not j.deterministic):
            part = min(job.to_compute, LARGEST - len(decodes) - rows)
            job.to_compute -= part
            rows += part
        while self.queue:
            job = self.queue[0]
            room = LARGEST - len(decodes) - rows
            part = min(job.to_compute, room)
            job.to_compute -= part
            rows += part
            if job.to_compute or job.window + 1 > room - part:
                break
            rows += job.window + 1
            answered.append((self.queue.popleft(), job.tries))
            self.waited.add(self.now - job.sent_at)
        if not decodes and not rows:
            return None
        if decodes:
            seconds = self.decode.at(len(decodes)) + rows * self.decode.row_s
        else:
            seconds = self.windows.at(rows)
        began = self.now
        self.decode_times.worked.begin()

        def end() -> None:
            took_s = self.now - began
            if decodes:
                self.decode_times.add(len(decodes), rows, took_s)
            else:
                self.window_times.add(rows, 0, took_s)
            self.decode_times.worked.end()
            for job, tries in decodes:
                if job.tries == tries:
                    if not job.deterministic:
                        self.backoff.worked()
                    self._commit(job, 1)
                    if job.output < job.most:
                        self._may_change(job)
            for job, tries in answered:
                if job.tries == tries:
                    self._answer(job)

        return seconds, end

    def _answer(self, job: Job) -> None:
        accepted = next((i for i in range(job.window) if self.random.random() < self.wrong), job.window)
        full, lost = accepted == job.window, 0
        if full:
            job.proposed -= job.window + (job.proposed > job.window)
        else:
            lost, job.proposed = job.proposed - accepted, 0
        self.acceptance.add(accepted + 1, not full, lost)
        job.target = settled_window(self.acceptance.run(WINDOW), LEAST, WINDOW)
        job.waits = False
        self._commit(job, accepted + 1)
        if job.output < job.most:
            self._may_change(job)
            if job.way == "verify":
                self._send_due(job)

    # ---- time

    def rest(self, seconds: float) -> None:
        """All clients leave, and for so long nobody comes."""
        for job in [*self.jobs]:
            self.jobs.remove(job)
            job.tries += 1
            self.done.end(self.now, len(self.jobs))
        self.queue.clear()
        self.work[:] = [None, None]
        self.stats.rest()
        self.decode_times.worked.end()
        self.now += seconds

    def run(self, until: float, source: Iterator[Job], at_once: int) -> float:
        """Keeps so many requests in progress until then; returns output tokens per second."""
        began, before = self.now, self.tokens
        work = self.work
        while self.now < until:
            while len(self.jobs) < at_once:
                self.start(replace(next(source)))
            for at, step in enumerate((self._engine_step, self._verifier_step)):
                if work[at] is None:
                    work[at] = step()
            busy = [w for w in work if w is not None]
            assert busy, "nobody has anything to do"
            rate = 1.0 / len(busy) if self.devices == 1 else 1.0
            least = min(left for left, _ in busy)
            self.now += least / rate
            for at, found in enumerate(work):
                if found is None:
                    continue
                left, end = found
                work[at] = (left - least, end)
                if left - least <= 1e-12:
                    work[at] = None
                    end()
            self._give_up()
            self._ask_again()
        return (self.tokens - before) / (self.now - began)
