"""The requests that the verifier decodes by itself: who takes part in a step, whose KV grows, who has to give
way, what leaves.

A follower's bits do not depend on any of that: it can be paused, preempted and computed again from its tokens
at any row. All of this belongs to the step thread.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import attrgetter

from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import Failure, Window
from llm42.sampling import Sampled
from llm42.verifier.jobs import Answer, Decode, Follower, Job, VerifierStats
from llm42.verifier.kv_store import KVStore
from llm42.verifier.outbox import Outbox

NOT_FINITE = "the model's logits hold NaN or no finite value for this request"
_AGE = attrgetter("follower.age")


class Followers:
    """All that are known, by request id. A follower's job goes through `fresh` or `resuming` into the
    verifier's active jobs; `go_on` then takes it over into `running`."""

    def __init__(self, store: KVStore, active: list[Job], outbox: Outbox, stats: VerifierStats) -> None:
        """active: the verifier's, for those whose prompt is being computed."""
        self.store, self.outbox = store, outbox
        self._active, self._stats = active, stats
        self._known: dict[str, Follower] = {}
        self._count = 0
        self.fresh: deque[Job] = deque()
        """Windows of followers that have just come, the oldest first."""
        self.resuming: deque[Job] = deque()
        """What was preempted or has new credit, the oldest first."""
        self.running: dict[str, Decode] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def yielding(self) -> tuple[int, int]:
        """How many have work and give way to others, and the blocks that these hold. May be read from any
        thread."""
        works = [f.work for f in list(self._known.values()) if f.window.yields]
        held = [work.sequence for work in works if work is not None]
        return len(held), sum(len(sequence.blocks) for sequence in held if sequence is not None)

    # ---- what the front asks for

    def add(self, follower: Follower) -> None:
        """A new one. An older one of its id sends nothing any more; what it computed is used."""
        name = follower.window.request_id
        if name in self._known:
            self._stop(self._known[name], keep=True)
        self._count += 1
        follower.number = self._count
        self._known[name] = follower
        insort(self.fresh, self._job(follower), key=_AGE)

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        """It may decode up to `until` tokens. told: whether there is such a follower."""
        follower = self._known.get(request_id)
        told(follower is not None)
        if follower is None:
            return
        follower.extend(until)
        if follower.work is None and not follower.ended and len(follower.tokens) < follower.end:
            insort(self.resuming, self._job(follower), key=_AGE)

    def release(self, request_id: str) -> None:
        """The request is over: nothing of it is sent any more."""
        follower = self._known.pop(request_id, None)
        if follower is not None:
            self._stop(follower, keep=False)

    def retire(self, request_id: str) -> None:
        """A window without credit takes its place: it sends nothing any more, what it computed is used."""
        follower = self._known.pop(request_id, None)
        if follower is not None:
            self._stop(follower, keep=True)

    def forget_older(self, moment: float) -> None:
        """Forgets those that have been idle since before `moment` (time.monotonic)."""
        for name, f in list(self._known.items()):
            if f.work is None and f.idle_since < moment:
                del self._known[name]

    def close(self, error: LLM42Error) -> None:
        """Tells those that decode or wait for credit that they are not decoded any further."""
        for follower in list(self._known.values()):
            if not follower.ended and not isinstance(follower.work, Job):  # a job's future says it
                self.outbox.send(follower, error)

    # ---- a step

    @property
    def spare(self) -> int:
        """Blocks to leave when one more is admitted: else it would be the next to be preempted."""
        return max(1, self.store.pool.num_blocks // 100) if self.running else 0

    def plan(self, limit: int) -> list[Decode]:
        """Who takes a row of the next step, at most `limit`; each has a block for it."""
        size, ready, full = self.store.pool.block_size, list[Decode](), list[Decode]()
        for d in self.running.values():
            follower, at = d.follower, d.issued
            if at < follower.end - 1:  # within its credit; its token is known or about to be
                ready.append(d)
                if at % size == 0 and at == len(d.sequence.blocks) * size:
                    full.append(d)
        grown = True
        for d in sorted(full, key=_AGE):
            grown &= self._grow(d)
        if not grown:
            ready = [d for d in ready if not d.abandoned]
        if len(ready) > limit:
            ready.sort(key=attrgetter("follower.window.yields"))
            ready = ready[:limit]
            for d in ready:  # to the end: those who are left out are the first in the next step
                name = d.follower.window.request_id
                self.running[name] = self.running.pop(name)
        return ready

    def go_on(self, job: Job, accepted: int) -> None:
        """After its window: takes over the KV, and decodes on if it may."""
        follower, sequence = job.follower, job.sequence
        assert follower is not None and sequence is not None
        window, tokens = job.window, follower.tokens
        computed, taken = len(window.tokens) + accepted, window.candidates[:accepted]
        if not tokens:  # its first commit: credit counts from here
            tokens += window.tokens
            tokens += taken
            follower.extend(computed + 1 + window.credit)
        tokens.append(job.sampled[accepted].token)
        ended = not follower.stops.isdisjoint((*taken, tokens[-1])) or len(tokens) >= window.max_len
        if ended or len(tokens) >= follower.end:
            self.store.settle(sequence, computed)
            self._rest(follower, ended)
            return
        self.store.cut(sequence, computed)
        sequence.tokens = tokens
        follower.work = self.running[window.request_id] = Decode.of(follower, sequence, computed)

    def settle(self, decodes: list[Decode], results: list[list[Sampled]]) -> None:
        """Takes in the rows of a step that has completed. A row of one that has ended, was preempted or
        released meanwhile is dropped."""
        size, token, settled = self.store.pool.block_size, self.outbox.token, 0
        for d, (sampled,) in zip(decodes, results, strict=True):
            if d.abandoned:
                continue
            follower = d.follower
            if not sampled.finite:
                self._end(d, Failure(follower.window.request_id, "non_finite_logits", NOT_FINITE))
                continue
            tokens = follower.tokens
            computed = len(tokens)
            tokens.append(sampled.token)
            settled += 1
            if computed % size == 0:
                self.store.publish(d.sequence, computed)
            token(follower, computed, sampled)
            stopped = sampled.token in follower.stops
            if stopped or computed + 1 >= follower.end:
                self._let_go(d, keep=True)
                self._rest(follower, stopped or computed + 1 >= follower.window.max_len)
        self._stats.decoded += settled

    def fail(self, decodes: list[Decode], error: LLM42Error) -> None:
        """The step that held these rows has failed: its followers may come again with a new window."""
        for d in decodes:
            if not d.abandoned:
                self._end(d, error)

    def preempt_youngest(self, yielding: bool = False) -> Follower | None:
        """Takes the KV of the youngest that holds any; it is computed again later. Who gives way to others
        is told at once that it is not: an engine goes on with it. yielding: of these only. None: nobody holds
        any."""
        holders = [d.follower for d in self.running.values()]
        holders += [job.follower for job in self._active if job.follower is not None]
        holders = [f for f in holders if f.window.yields or not yielding]
        if not holders:
            return None
        follower = max(holders, key=attrgetter("age"))
        self._drop_work(follower, keep=False)
        self._stats.preemptions += 1
        if follower.window.yields:
            self._forget(follower)
            self.outbox.send(follower, Overloaded("the verifier needs its KV for others"))
        else:
            insort(self.resuming, self._job(follower), key=_AGE)
        return follower

    def makes_way(self, window: Window) -> bool:
        """Whether there is room for the window beside those that do not give way to it, as there was none
        beside all; the youngest of the others has given its KV then."""
        running = [d.sequence for d in self.running.values() if not d.follower.window.yields]
        others = [job.sequence for job in self._active if job.sequence and not job.yields]
        held = sum(len(sequence.blocks) for sequence in (*running, *others)) + (self.spare if running else 0)
        return self.store.fits_beside(window, held) and self.preempt_youngest(yielding=True) is not None

    # ---- within

    def _grow(self, d: Decode) -> bool:
        """One more block for its next row; False: somebody was preempted, perhaps itself."""
        quiet = True
        while not d.abandoned and not self.store.grow(d.sequence):
            self.preempt_youngest()
            quiet = False
        return quiet and not d.abandoned

    def _job(self, follower: Follower) -> Job:
        job = follower.job(time.monotonic())
        job.future.add_done_callback(partial(self._answered, follower))
        return job

    def _answered(self, follower: Follower, future: Future[Answer]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        answer = future.result() if error is None else error
        if isinstance(answer, Failure | BaseException):
            self._forget(follower)
        assert not isinstance(answer, BaseException) or isinstance(answer, LLM42Error)
        self.outbox.send(follower, answer)

    def _end(self, d: Decode, answer: Failure | LLM42Error) -> None:
        self._let_go(d, keep=False)
        self._forget(d.follower)
        self.outbox.send(d.follower, answer)

    def _forget(self, follower: Follower) -> None:
        self._rest(follower, ended=True)
        name = follower.window.request_id
        if self._known.get(name) is follower:
            del self._known[name]

    def _stop(self, follower: Follower, keep: bool) -> None:
        self._drop_work(follower, keep)
        self._rest(follower, ended=True)

    def _drop_work(self, follower: Follower, keep: bool) -> None:
        work = follower.work
        if isinstance(work, Decode):
            self._let_go(work, keep)
        elif work is not None and work.sequence is None:
            work.future.cancel()  # it is in a queue, which passes over it
        elif work is not None and work.sequence is not None:
            work.abandoned = True
            self._active.remove(work)
            self.store.discard(work.sequence)

    def _let_go(self, d: Decode, keep: bool) -> None:
        """It takes part in no further step, and its row in a step that runs is dropped. keep: what is known
        to be computed of its KV, as between windows."""
        d.abandoned = True
        del self.running[d.follower.window.request_id]
        if keep:
            computed = len(d.follower.tokens) - 1
            d.sequence.tokens = d.follower.tokens[:computed]
            self.store.settle(d.sequence, computed)
        else:
            self.store.discard(d.sequence)

    @staticmethod
    def _rest(follower: Follower, ended: bool) -> None:
        follower.work, follower.ended, follower.idle_since = None, ended, time.monotonic()
