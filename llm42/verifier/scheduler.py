"""The verifier: packs windows of many requests, prompt chunks and the rows of those that it decodes itself
into canonical steps, and answers with commits.

One thread owns everything. `step()` is the whole loop: admit, plan, run, settle. A pipelined runner gets the
next step before the one that runs is settled, when a full step is waiting or when somebody decodes: the token
of one step then feeds the next on the device, and results are read one step late. Else the next step is
better planned afterwards, with what has arrived by then. Answers are a function of tokens and sampling alone;
the queue, the packing and the cache decide only when they come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from llm42.cache import BlockPool
from llm42.errors import StepFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, VerifyTimings
from llm42.sampling import Sampled
from llm42.verifier.admission import Admission
from llm42.verifier.followers import NOT_FINITE
from llm42.verifier.front import Message
from llm42.verifier.jobs import Decode, Follower, Job, StepInFlight
from llm42.verifier.kv_store import KVStore
from llm42.verifier.outbox import Outbox
from llm42.verifier.planning import decode_limit, plan_rows
from llm42.verifier.runner import PipelinedRunner, Runner

log = logging.getLogger(__name__)
COUNT_S = 0.2
"""How often the KV that can be evicted is counted."""


class Verifier(Admission):
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
        super().__init__(pool, KVStore(pool, runner.copy_block), Outbox(fingerprint), max_waiting)
        self.manifest = manifest or {}
        self._runner = runner
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._in_flight: StepInFlight | None = None
        self._buckets, self.max_len, self.vocab_size = tuple(buckets), max_len, vocab_size
        self._on_thread_start, self._device_lost = on_thread_start, device_lost
        self.on_step: Callable[[float], None] = lambda _: None
        """Called with the seconds of each step, on the step thread; must not raise."""

    @property
    def places(self) -> int:
        """Rows of the largest step: as many requests can be decoded in each."""
        return self._buckets[-1]

    @property
    def fingerprint(self) -> str:
        """What every commit names, of both ways. Set before the start."""
        return self._followers.outbox.fingerprint

    @fingerprint.setter
    def fingerprint(self, name: str) -> None:
        self._followers.outbox.fingerprint = name

    def _loop(self) -> None:
        try:
            self._on_thread_start()
            while not self._closed:
                self._working_since = time.monotonic()
                if not self.step() and not self._closed:  # the step may have taken in what says so
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
        decodes: list[Decode] = []
        if self._followers.running:
            decodes = self._followers.plan(decode_limit(self._active, self._buckets[-1]))
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
        sequences = [d.ask(row) for row, d in enumerate(decodes)]
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
        if decoding:
            stats.decode_steps += 1
            stats.decode_s += seconds
            self._decode_times.add(decoding, flight.rows - decoding, seconds)
        else:
            self._window_times.add(flight.rows, 0, seconds)
        self._step_s += seconds
        self._followers.settle(flight.decodes, results[:decoding])
        for (job, count), sampled in zip(flight.plan, results[decoding:], strict=True):
            if job.abandoned:
                continue
            job.next += count
            job.sampled += sampled
            if job.next == job.end:
                self._active.remove(job)
                self._answer(job)
            elif not job.cold and job.sequence is not None:
                # of candidates only what stands is published: when the window is answered
                self._store.publish(job.sequence, min(job.next, len(job.window.tokens)))
        if now - self._counted_at >= COUNT_S:
            self._counted_at, self._in_use = now, self._pool.held - self._store.evictable

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Message) -> None:
        if isinstance(message, Job | Follower):
            if isinstance(message, Job):
                if not message.cold:
                    self._followers.retire(message.window.request_id)
                self._waiting.append(message)
            else:
                self._followers.add(message)
            with self._entry:  # afterwards: it is never counted in neither place
                self._entering -= 1
        elif isinstance(message, float):
            self._store.release_older(message)
            self._followers.forget_older(message)
            self._in_use = self._pool.held - self._store.evictable
        elif isinstance(message, str):
            self._followers.release(message)
            self._store.release(message)
            for job in (*self._waiting, *self._active):
                # a cold one belongs to an audit, which outlives the request
                job.released |= not job.cold and job.window.request_id == message
        elif message is not None:
            message()

    def _plan(self, decodes: int = 0) -> list[tuple[Job, int]]:
        """Rows per job, beside so many that are decoded."""
        return plan_rows(self._active, self._buckets[-1], decodes)

    def _answer(self, job: Job) -> None:
        window, sequence = job.window, job.sequence
        assert sequence is not None
        pairs = enumerate(zip(job.sampled, window.candidates, strict=False))
        accepted = next((i for i, (s, given) in pairs if s.token != given), len(window.candidates))
        if not all(s.finite for s in job.sampled[: accepted + 1]):
            self._store.discard_as_wrong(sequence)
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
        if job.follower is not None and not window.candidates:
            self._stats.decoded += 1
        elif not job.cold and not window.score:
            self._stats.verified += accepted + 1
        waited = job.started - job.arrived
        self._stats.queue_s += waited
        if job.follower is None and not job.cold and not window.score:
            self._waited.add(waited)
        self._stats.cached_rows += job.cached
        timings = VerifyTimings(waited, now - job.started, job.end - job.cached, job.cached)
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
