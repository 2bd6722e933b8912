"""The verifier: packs windows of many requests and prompt chunks into canonical steps and answers with
commits.

One thread owns everything. `step()` is the whole loop: admit, plan, run, settle. A pipelined runner gets the
next step before the one that runs is settled, but only when a full step is waiting: else the next step is
better planned afterwards, with what has arrived by then. Answers are a function of the window's tokens and
sampling alone; the queue, the packing and the cache decide only when they come.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from llm42.cache import BlockPool
from llm42.errors import LLM42Error, Overloaded, StepFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, VerifyTimings, Window
from llm42.sampling import Sampled
from llm42.verifier.jobs import Answer, Job, StepInFlight, VerifierStats
from llm42.verifier.kv_store import KVStore
from llm42.verifier.refusal import refusal_of
from llm42.verifier.runner import PipelinedRunner, Runner

log = logging.getLogger(__name__)


class Verifier:
    """Thread-safe front (`submit`, `verify`, `release`) over a runner that one thread owns."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        *,
        buckets: Sequence[int],
        max_len: int,
        vocab_size: int,
        fingerprint: str,
        manifest: dict[str, Any] | None = None,
        max_waiting: int = 256,
        on_thread_start: Callable[[], None] = lambda: None,
        device_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """device_lost: asked after a step has failed; a verifier whose device is lost ends."""
        self.fingerprint, self.manifest = fingerprint, manifest or {}
        self._runner, self._pool = runner, pool
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._in_flight: StepInFlight | None = None
        self._store = KVStore(pool, runner.copy_block)
        self._buckets, self.max_len, self.vocab_size = tuple(buckets), max_len, vocab_size
        self._max_waiting = max_waiting
        self._inbox: queue.SimpleQueue[Job | str | float | None] = queue.SimpleQueue()
        self._entering, self._entry = 0, threading.Lock()
        """Windows in the inbox, where releases lie too; the lock is for the count."""
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._stats = VerifierStats(kv_blocks=pool.num_blocks)
        self._on_thread_start, self._device_lost = on_thread_start, device_lost
        self._thread: threading.Thread | None = None
        self._closed = False
        self._settled = 0.0
        self._working_since: float | None = None
        self.on_step: Callable[[float], None] = lambda _: None
        """Called with the seconds of each step, on the step thread; must not raise."""

    # ---- front, any thread

    def start(self) -> Verifier:
        """Starts the step thread."""
        self._thread = threading.Thread(target=self._loop, name="verifier", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread; windows that wait fail with VerifierUnavailable."""
        self._closed = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def alive(self) -> bool:
        """Whether the step thread runs; a verifier whose thread has ended never answers again."""
        return not self._closed and self._thread is not None and self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """How long the present step has been running, in seconds; 0.0 while there is nothing to do."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, window: Window, cold: bool = False) -> Future[Answer]:
        """Queues one window; cold: all its rows are computed anew. Raises Overloaded when too many wait,
        VerifierUnavailable when closed."""
        if self._closed:
            raise VerifierUnavailable("the verifier is closed")
        future: Future[Answer] = Future()
        refusal = refusal_of(window, self.max_len, self.vocab_size, self._store.fits)
        if refusal is not None:
            future.set_result(refusal)
            return future
        with self._entry:
            if self._queued >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} windows are already waiting for the verifier")
            self._entering += 1
        self._inbox.put(Job(window, future, time.monotonic(), cold=cold))
        if self._closed:  # asked after the put: either the thread's end sees the job, or this does
            raise VerifierUnavailable("the verifier is closed")
        return future

    @property
    def _queued(self) -> int:
        """Windows that wait to be admitted."""
        return self._entering + len(self._waiting)

    async def verify(self, windows: Sequence[Window], cold: bool = False) -> list[Answer]:
        """Awaits all answers, in the order of the windows. cold, errors: as `submit`."""
        return list(await asyncio.gather(*map(asyncio.wrap_future, self._submit_all(windows, cold))))

    def _submit_all(self, windows: Sequence[Window], cold: bool) -> list[Future[Answer]]:
        """All or none: when one is refused, those before it are not computed for nobody."""
        futures: list[Future[Answer]] = []
        try:
            for window in windows:
                futures.append(self.submit(window, cold))
        except LLM42Error:
            for future in futures:
                future.cancel()
            raise
        return futures

    def release(self, request_id: str) -> None:
        """The request is over: its private KV may go."""
        self._inbox.put(request_id)

    def forget_idle(self, age_s: float) -> None:
        """Frees what is held for requests that have sent no window for `age_s` seconds: their replica may
        have died without a word. One that does come back is computed anew."""
        if self._store.idle:
            self._inbox.put(time.monotonic() - age_s)

    def stats(self) -> VerifierStats:
        """The counters, with the present queue and cache sizes."""
        s, pool = self._stats, self._pool
        s.waiting, s.active = self._queued, len(self._active)
        s.kv_held_blocks, s.kv_cached_blocks = pool.held, pool.cached
        s.idle_sequences, s.cache_hits, s.evictions = self._store.idle, pool.hits, pool.evictions
        return s

    # ---- the step thread

    def _loop(self) -> None:
        try:
            self._on_thread_start()
            while not self._closed:
                self._working_since = time.monotonic()
                if not self.step():
                    self._working_since = None
                    self._receive(self._inbox.get())
            if self._in_flight is not None:
                self._collect(self._in_flight)
        except Exception:
            log.exception("the verifier's loop failed")
        finally:
            self._closed, self._working_since = True, None
            self._drain()
            for job in (*self._active, *self._waiting):
                if job.future.running() or job.future.set_running_or_notify_cancel():
                    job.future.set_exception(VerifierUnavailable("the verifier was closed"))

    def step(self) -> bool:
        """One canonical step; False when there is nothing to do."""
        self._drain()
        self._admit()
        plan = self._plan()
        rows = sum(count for _, count in plan)
        before, self._in_flight = self._in_flight, None
        if before is not None and rows < self._buckets[-1]:
            self._collect(before)
            return True
        if plan:
            self._dispatch(plan, rows)
        if before is not None:
            self._collect(before)
        return bool(plan)

    def _dispatch(self, plan: list[tuple[Job, int]], rows: int) -> None:
        flight = StepInFlight(plan, rows, next(b for b in self._buckets if b >= rows), time.monotonic())
        sequences = [job.rows(count) for job, count in plan]
        for job, count in plan:
            job.issued += count
        try:
            if self._pipelined is not None:
                flight.pending = self._pipelined.begin(flight.bucket, sequences)
                self._in_flight = flight
                return
            results = self._runner.step(flight.bucket, sequences)
        except Exception as error:
            self._abandon(plan, error)
            return
        self._settle(flight, results)

    def _collect(self, flight: StepInFlight) -> None:
        assert self._pipelined is not None
        try:
            results = self._pipelined.finish(flight.pending)
        except Exception as error:
            self._abandon(flight.plan, error)
            return
        self._settle(flight, results)

    def _settle(self, flight: StepInFlight, results: list[list[Sampled]]) -> None:
        now, stats = time.monotonic(), self._stats
        seconds, self._settled = now - max(flight.began, self._settled), now
        stats.steps += 1
        stats.rows += flight.rows
        stats.padding_rows += flight.bucket - flight.rows
        stats.step_s += seconds
        self.on_step(seconds)
        for (job, count), sampled in zip(flight.plan, results, strict=True):
            if job.abandoned:
                continue
            job.next += count
            job.sampled += sampled
            if job.next == job.end:
                self._active.remove(job)
                self._answer(job)

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Job | str | float | None) -> None:
        if isinstance(message, Job):
            self._waiting.append(message)  # first: it is never counted in neither place
            with self._entry:
                self._entering -= 1
        elif isinstance(message, float):
            self._store.release_older(message)
        elif message is not None:
            self._store.release(message)
            for job in (*self._waiting, *self._active):
                # a cold one belongs to an audit, which outlives the request
                job.released |= not job.cold and job.window.request_id == message

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if job.released or job.future.cancelled():
                self._waiting.popleft()
                # not cancelled: a late release of an earlier try must not end a live request
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(VerifierUnavailable("released while its window was waiting"))
                continue
            sequence = self._store.admit(job.window, job.cold)
            if sequence is None:
                return  # whole requests only, in order: no deadlock among half-prefilled prompts
            self._waiting.popleft()
            if not job.future.set_running_or_notify_cancel():  # cancelled just now
                self._store.discard(sequence)
                continue
            job.sequence, job.started = sequence, time.monotonic()
            job.next = job.issued = job.cached = sequence.computed
            self._active.append(job)

    def _plan(self) -> list[tuple[Job, int]]:
        """Rows per job, at most the largest bucket: windows first, but a quarter is kept for the oldest
        prompt."""
        budget, plan, used = self._buckets[-1], list[tuple[Job, int]](), 0
        short = [job for job in self._active if 0 < job.left <= budget // 2]
        long = [job for job in self._active if job.left > budget // 2]
        for jobs, limit in ((short, budget - (budget // 4 if long else 0)), (long, budget)):
            for job in jobs:
                if used >= limit:
                    break
                count = min(job.left, limit - used)
                plan.append((job, count))
                used += count
        return plan

    def _answer(self, job: Job) -> None:
        window, sequence = job.window, job.sequence
        assert sequence is not None
        pairs = enumerate(zip(job.sampled, window.candidates, strict=False))
        accepted = next((i for i, (s, given) in pairs if s.token != given), len(window.candidates))
        if not all(s.finite for s in job.sampled[: accepted + 1]):
            self._store.discard(sequence)
            self._stats.failures += 1
            text = "the model's logits hold NaN or no finite value for this request"
            job.future.set_result(Failure(window.request_id, "non_finite_logits", text))
            return
        if job.cold:
            self._store.discard(sequence)
        else:
            self._store.settle(sequence, len(window.tokens) + accepted)
        if job.released:
            self._store.release(window.request_id)
        now = time.monotonic()
        self._stats.windows += 1
        self._stats.queue_s += job.started - job.arrived
        self._stats.cached_rows += job.cached
        timings = VerifyTimings(
            job.started - job.arrived, now - job.started, job.end - job.cached, job.cached
        )
        job.future.set_result(
            Commit(
                window.request_id,
                len(window.tokens),
                accepted,
                job.sampled[accepted].token,
                tuple(s.logprob for s in job.sampled[: accepted + 1]),
                self.fingerprint,
                timings,
            )
        )

    def _abandon(self, plan: list[tuple[Job, int]], error: Exception) -> None:
        log.error("a verifier step failed; its windows may be retried", exc_info=error)
        for job, _ in plan:
            if job.abandoned:
                continue
            assert job.sequence is not None
            job.abandoned = True
            self._active.remove(job)
            self._store.discard(job.sequence)
            self._stats.failures += 1
            reason = StepFailed(f"a verifier step failed: {type(error).__name__}: {error}")
            job.future.set_exception(reason)
        if self._device_lost():
            log.error("the device is lost: this verifier ends")
            self._closed = True
