"""The verifier's front: what any thread may ask of it, and how that reaches the step thread."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from llm42.cache import BlockPool
from llm42.errors import LLM42Error, Overloaded, VerifierUnavailable
from llm42.protocol import Request, Window
from llm42.step_times import Fading, StepTimes, VerifierLoad
from llm42.verifier.followers import Followers
from llm42.verifier.jobs import Answer, Follower, Job, Sink, VerifierStats
from llm42.verifier.kv_store import KVStore
from llm42.verifier.outbox import Outbox
from llm42.verifier.refusal import refusal_of

Message = Job | Follower | str | float | Callable[[], None] | None
"""To the step thread: a window, a request's id at its end, a moment before which idle KV goes, something to
do, or only that it should look up."""


class Front(ABC):
    """What is shared with the step thread, and the calls that any thread may make. Windows and words go
    through one inbox, in the order they come; everything else belongs to the step thread (`_loop`)."""

    def __init__(self, pool: BlockPool, store: KVStore, outbox: Outbox, max_waiting: int) -> None:
        self._pool, self._store = pool, store
        self._max_waiting = max_waiting
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._entering, self._entry = 0, threading.Lock()
        """Windows in the inbox, where releases lie too; the lock is for the count."""
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._stats = VerifierStats(kv_blocks=pool.num_blocks)
        self._followers = Followers(store, self._active, outbox, self._stats)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._working_since: float | None = None
        self._in_use = 0
        """Blocks that not only idle requests held, when that was last counted."""
        self._counted_at = -math.inf
        self._settled = -math.inf
        """When a step was last completed."""
        self._decode_times = StepTimes()
        self._window_times = StepTimes()
        self._step_s = 0.0
        """Of all steps."""
        self._waited = Fading()
        """How long windows have waited."""

    max_len: int
    vocab_size: int

    @property
    @abstractmethod
    def places(self) -> int:
        """Rows of the largest step: as many requests can be decoded in each."""

    @abstractmethod
    def _loop(self) -> None:
        """The step thread."""

    def start(self) -> Self:
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
    def kv_tokens(self) -> int:
        """The KV cache, in tokens."""
        return self._pool.num_blocks * self._pool.block_size

    @property
    def kv_used_tokens(self) -> int:
        """What is held of it and cannot be evicted, in tokens; while anything can be, as it was when that
        was last counted."""
        held = self._pool.held
        return min(held, self._in_use if self._store.idle else held) * self._pool.block_size

    @property
    def stalled_s(self) -> float:
        """How long the present step has been running, in seconds; 0.0 while there is nothing to do."""
        since = self._working_since
        return 0.0 if since is None else time.monotonic() - since

    def progressed_s(self, request_id: str = "") -> float:
        """How many seconds ago a step was completed, whoever took part."""
        return time.monotonic() - self._settled

    @property
    def direct(self) -> int:
        """Requests that it decodes by itself, those too that wait for KV or for their prompt's rows."""
        followers = self._followers
        begun = sum(job.follower is not None for job in list(self._active))
        return len(followers.running) + len(followers.resuming) + len(followers.fresh) + begun

    @property
    def worked_s(self) -> float:
        """As llm42/session/interfaces.py has it."""
        since = self._working_since
        present_s = 0.0 if since is None else time.monotonic() - max(since, self._settled)
        return self._step_s + max(0.0, present_s)

    def beside(self, worked_s: Callable[[], float]) -> None:
        """As llm42/session/interfaces.py has it."""
        self._decode_times.neighbour = self._window_times.neighbour = worked_s

    def load(self, request: Request | None = None) -> VerifierLoad:
        """How busy it is, whoever asks."""
        return VerifierLoad(
            self._decode_times.costs,
            self._window_times.costs,
            self.direct,
            places=self.places,
            kv_tokens=self.kv_tokens,
            kv_free=self.kv_tokens - self.kv_used_tokens,
            waited_s=self._waited.value,
        )

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
        nothing any more. Raises as `submit`: Overloaded, VerifierUnavailable."""
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
        # others find half of the places, however many come that give way to them
        most = -(-self._max_waiting // 2) if entering.window.yields else self._max_waiting
        with self._entry:
            if self._queued >= most:
                raise Overloaded(f"{most} windows are already waiting for the verifier")
            self._entering += 1
        self._inbox.put(entering)
        if self._closed:  # asked after the put: either the thread's end sees it, or this does
            raise VerifierUnavailable("the verifier is closed")

    @property
    def _queued(self) -> int:
        """Windows that wait to be admitted, not counting those that have been before."""
        return self._entering + len(self._waiting) + len(self._followers.fresh)

    def stop(self, request_id: str) -> None:
        """The request is not decoded any further, until there is another window of it; what it has computed
        is found then."""
        self._inbox.put(partial(self._followers.retire, request_id))

    def verify(self, windows: Sequence[Window], cold: bool = False) -> Awaitable[list[Answer]]:
        """Submits the windows; awaited, it gives all answers in their order. cold, errors: as `submit`."""
        return _all(self._submit_all(windows, cold))

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
        if self._pool.held or len(self._followers):
            self._inbox.put(time.monotonic() - age_s)

    def stats(self) -> VerifierStats:
        """The counters, with the present queue and cache sizes."""
        s, pool = self._stats, self._pool
        s.waiting, s.active = self._queued, len(self._active)
        s.kv_held_blocks, s.kv_cached_blocks = pool.held, pool.cached
        s.idle_sequences, s.cache_hits, s.evictions = self._store.idle, pool.hits, pool.evictions
        s.following, s.direct = len(self._followers.running), self.direct
        s.yielding, blocks = self._followers.yielding
        s.yielding_kv = blocks * pool.block_size
        return s


async def _all(futures: Sequence[Future[Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
