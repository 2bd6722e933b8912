"""The verifier: packs windows of many requests, prompt chunks and the rows of those that it decodes itself
into canonical steps, and answers with commits.

One thread owns everything. `step()` is the whole loop: admit, plan, run, settle. A pipelined runner gets the
next step before the one that runs is settled, when a full step is waiting or when somebody decodes: the token
of one step then feeds the next on the device, and results are read one step late. Else the next step is
better planned afterwards, with what has arrived by then. Answers are a function of tokens and sampling alone;
the queue, the packing and the cache decide only when they come.
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
from functools import partial
from typing import Any

from llm42.cache import BlockPool
from llm42.errors import LLM42Error, Overloaded, StepFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, VerifyTimings, Window
from llm42.sampling import Sampled
from llm42.verifier.followers import NOT_FINITE, Followers
from llm42.verifier.jobs import Answer, Decode, Follower, Job, Sink, StepInFlight, VerifierStats
from llm42.verifier.kv_store import HeldKV, KVStore
from llm42.verifier.outbox import Outbox
from llm42.verifier.refusal import refusal_of
from llm42.verifier.runner import PipelinedRunner, Runner

log = logging.getLogger(__name__)

Message = Job | Follower | str | float | Callable[[], None] | None
"""To the step thread: a window, a request's id at its end, a moment before which idle KV goes, something to
do, or only that it should look up."""


class Verifier:
    """Thread-safe front (`submit`, `verify`, `follow`, `renew`, `release`) over a runner that one thread
    owns."""

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
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._entering, self._entry = 0, threading.Lock()
        """Windows in the inbox, where releases lie too; the lock is for the count."""
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._stats = VerifierStats(kv_blocks=pool.num_blocks)
        self._followers = Followers(self._store, self._active, Outbox(fingerprint), self._stats)
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
        self._enter(Job(window, future, time.monotonic(), cold=cold))
        return future

    def follow(self, window: Window, sink: Sink) -> None:
        """Computes a window and decodes on within its credit. sink is called on the step thread, once a step
        at most: with the window's Commit, then with one for each token; they end with the output, or with a
        Failure (for good) or an error (a new window may go on). An older follower of the same id sends
        nothing any more. Raises as `submit`."""
        if self._closed:
            raise VerifierUnavailable("the verifier is closed")
        refusal = refusal_of(window, self.max_len, self.vocab_size, self._store.fits)
        if refusal is not None:
            self._inbox.put(partial(sink, refusal))
            return
        self._enter(Follower.of(window, sink))

    def renew(self, request_id: str, until: int, told: Callable[[bool], None] = lambda _: None) -> None:
        """The request may be decoded up to `until` tokens of prompt and output; never lowers what was said
        before. One that was out of credit goes on from there, whether or not its KV is still held.

        told: called on the step thread; False where no window of the request has come here since its release,
        its failure or `forget_idle`, so that one must be sent in full. Raises VerifierUnavailable when
        closed."""
        if self._closed:
            raise VerifierUnavailable("the verifier is closed")
        self._inbox.put(partial(self._followers.renew, request_id, until, told))

    def _enter(self, entering: Job | Follower) -> None:
        with self._entry:
            if self._queued >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} windows are already waiting for the verifier")
            self._entering += 1
        self._inbox.put(entering)
        if self._closed:  # asked after the put: either the thread's end sees it, or this does
            raise VerifierUnavailable("the verifier is closed")

    @property
    def _queued(self) -> int:
        """Windows that wait to be admitted, not counting those that have been before."""
        return self._entering + len(self._waiting) + len(self._followers.fresh)

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
        """The request is over: its private KV may go, and nothing more is sent to its follower."""
        self._inbox.put(request_id)

    def forget_idle(self, age_s: float) -> None:
        """Frees what is held for requests that have had nothing to compute for `age_s` seconds: their replica
        may have died without a word. One that does come back is computed anew."""
        if self._store.idle or len(self._followers):
            self._inbox.put(time.monotonic() - age_s)

    def stats(self) -> VerifierStats:
        """The counters, with the present queue and cache sizes."""
        s, pool = self._stats, self._pool
        s.waiting, s.active = self._queued, len(self._active)
        s.kv_held_blocks, s.kv_cached_blocks = pool.held, pool.cached
        s.idle_sequences, s.cache_hits, s.evictions = self._store.idle, pool.hits, pool.evictions
        s.following = len(self._followers.running)
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
            closed, followers = VerifierUnavailable("the verifier was closed"), self._followers
            followers.close(closed)
            for job in (*self._active, *self._waiting, *followers.fresh, *followers.resuming):
                if job.future.running() or job.future.set_running_or_notify_cancel():
                    job.future.set_exception(closed)

    def step(self) -> bool:
        """One canonical step; False when there is nothing to do."""
        self._drain()
        self._admit()
        decodes = self._followers.plan(self._decode_limit()) if self._followers.running else []
        plan = self._plan(len(decodes))
        rows = len(decodes) + sum(count for _, count in plan)
        before, self._in_flight = self._in_flight, None
        if before is not None and not decodes and rows < self._buckets[-1]:
            self._collect(before)
            return True
        if rows:
            self._dispatch(decodes, plan, rows)
        if before is not None:
            self._collect(before)
        return rows > 0

    def _dispatch(self, decodes: list[Decode], plan: list[tuple[Job, int]], rows: int) -> None:
        bucket = next(b for b in self._buckets if b >= rows)
        flight = StepInFlight(decodes, plan, rows, bucket, time.monotonic())
        sequences = [d.rows() for d in decodes]
        for row, d in enumerate(decodes):
            d.row, d.issued = row, d.issued + 1
        sequences += [job.rows(count) for job, count in plan]
        for job, count in plan:
            job.issued += count
        try:
            if self._pipelined is not None:
                flight.pending = self._pipelined.begin(bucket, sequences)
                self._in_flight = flight
                return
            results = self._runner.step(bucket, sequences)
        except Exception as error:
            self._failed(flight, error)
            return
        self._settle(flight, results)

    def _collect(self, flight: StepInFlight) -> None:
        assert self._pipelined is not None
        try:
            results = self._pipelined.finish(flight.pending)
        except Exception as error:
            self._failed(flight, error)
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
        decoding = len(flight.decodes)
        self._followers.settle(flight.decodes, results[:decoding])
        for (job, count), sampled in zip(flight.plan, results[decoding:], strict=True):
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

    def _receive(self, message: Message) -> None:
        if isinstance(message, Job | Follower):
            if isinstance(message, Job):
                self._waiting.append(message)
            else:
                self._followers.add(message)
            with self._entry:  # afterwards: it is never counted in neither place
                self._entering -= 1
        elif isinstance(message, float):
            self._store.release_older(message)
            self._followers.forget_older(message)
        elif isinstance(message, str):
            self._followers.release(message)
            self._store.release(message)
            for job in (*self._waiting, *self._active):
                # a cold one belongs to an audit, which outlives the request
                job.released |= not job.cold and job.window.request_id == message
        elif message is not None:
            message()

    def _admit(self) -> None:
        """Windows first, then who has begun already, then who is new: whole requests only, in order, so that
        there is no deadlock among half-prefilled prompts."""
        followers = self._followers
        if self._admitted(self._waiting) and self._admitted(followers.resuming):
            self._admitted(followers.fresh)

    def _admitted(self, jobs: deque[Job]) -> bool:
        """Whether all of them have been."""
        while jobs:
            job = jobs[0]
            if job.released or job.future.cancelled():
                jobs.popleft()
                # not cancelled: a late release of an earlier try must not end a live request
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(VerifierUnavailable("released while its window was waiting"))
                continue
            sequence = self._room_for(job)
            if sequence is None:
                return False
            jobs.popleft()
            if not job.future.set_running_or_notify_cancel():  # cancelled just now
                self._store.discard(sequence)
                continue
            job.sequence, job.started = sequence, time.monotonic()
            job.next = job.issued = job.cached = sequence.computed
            self._active.append(job)
        return True

    def _room_for(self, job: Job) -> HeldKV | None:
        """The KV for a job, or None: it waits. A window of verify mode need not wait for those that decode
        on: the youngest of them give way."""
        if job.follower is not None and (spare := self._followers.spare):
            return self._store.admit(job.window, spare=spare)
        while (sequence := self._store.admit(job.window, job.cold)) is None:
            windows = sum(len(j.sequence.blocks) for j in self._active if j.sequence and not j.follower)
            if job.follower or not self._store.fits_beside(job.window, windows):
                return None
            if self._followers.preempt_youngest() is None:
                return None
        return sequence

    def _decode_limit(self) -> int:
        """Rows that may go to requests that are decoded: what windows and a quarter for prompts leave, but a
        quarter at least."""
        full, quarter = self._buckets[-1], self._quarter
        short, long = self._by_length()
        return max(quarter, full - sum(job.left for job in short) - (quarter if long else 0))

    def _plan(self, decodes: int = 0) -> list[tuple[Job, int]]:
        """Rows per job, at most the largest bucket with those of `decodes`: windows first, but a quarter is
        kept for the oldest prompt."""
        budget, plan, used = self._buckets[-1] - decodes, list[tuple[Job, int]](), 0
        short, long = self._by_length()
        for jobs, limit in ((short, budget - (self._quarter if long else 0)), (long, budget)):
            for job in jobs:
                if used >= limit:
                    break
                count = min(job.left, limit - used)
                plan.append((job, count))
                used += count
        return plan

    @property
    def _quarter(self) -> int:
        return max(self._buckets[-1] // 4, min(1, self._buckets[-1] - 1))

    def _by_length(self) -> tuple[list[Job], list[Job]]:
        """Jobs that have rows to compute: windows, and prompts, which share what windows leave. What a
        request needs before it is decoded here is a prompt, but for a few rows."""
        most = self._buckets[-1] // 2
        short, long = list[Job](), list[Job]()
        for job in self._active:
            if job.left > 0:
                (short if job.left <= (most if job.follower is None else most // 8) else long).append(job)
        return short, long

    def _answer(self, job: Job) -> None:
        window, sequence = job.window, job.sequence
        assert sequence is not None
        pairs = enumerate(zip(job.sampled, window.candidates, strict=False))
        accepted = next((i for i, (s, given) in pairs if s.token != given), len(window.candidates))
        if not all(s.finite for s in job.sampled[: accepted + 1]):
            self._store.discard(sequence)
            self._stats.failures += 1
            job.future.set_result(Failure(window.request_id, "non_finite_logits", NOT_FINITE))
            return
        if job.cold:
            self._store.discard(sequence)
        elif job.follower is not None:
            self._followers.go_on(job, accepted)
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

    def _failed(self, flight: StepInFlight, error: Exception) -> None:
        log.error("a verifier step failed; its windows may be retried", exc_info=error)
        reason = StepFailed(f"a verifier step failed: {type(error).__name__}: {error}")
        self._followers.fail(flight.decodes, reason)
        self._abandon(flight.plan, error)
        if self._device_lost():
            log.error("the device is lost: this verifier ends")
            self._closed = True

    def _abandon(self, plan: list[tuple[Job, int]], error: Exception) -> None:
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
