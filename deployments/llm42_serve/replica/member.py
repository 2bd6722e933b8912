"""One verifier as a replica sees it, and its windows, joined into few actor calls when there are many.

An actor call costs either side more than half a millisecond of its interpreter, whatever is in it: at a
thousand windows a second that is all of it, and commits come late. So only AT_ONCE calls are under way; what
comes meanwhile goes together with the next. A window that meets no such crowd is sent at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from llm42.errors import LLM42Error, Overloaded, VerifierUnavailable
from llm42.protocol import Commit, Failure, Window
from llm42_serve.verifiers.actor import VerifierStatus

Answer = Commit | Failure
_Entry = tuple[Window, asyncio.Future[Answer], float]
"""A window, who waits for it, and since when."""
Send = Callable[[list[Window]], Awaitable[list[Answer]]]
AT_ONCE = 8
"""Calls under way: more than a window needs that waits for a step, or for the one after it."""
TOGETHER = 32
"""Windows in a call, at most: all of them wait for the slowest."""
AVOID_S = 5.0
"""How long a verifier whose call failed is only a last resort."""


class WindowBatches:
    """Belongs to an event loop. `send` makes one actor call; its errors reach whoever asked."""

    def __init__(self, send: Send, at_once: int = AT_ONCE) -> None:
        self._send, self._at_once = send, at_once
        self._waiting: deque[_Entry] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, window: Window) -> Answer:
        """The window's answer. Cancelling it leaves the call, and the others in it, alone."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((window, answer, time.monotonic()))
        self._next()
        return await answer

    def _next(self) -> None:
        """Begins calls while there may be more."""
        while self._waiting and len(self._calls) < self._at_once:
            batch: list[_Entry] = []
            while self._waiting and len(batch) < TOGETHER:
                entry = self._waiting.popleft()
                if not entry[1].done():  # nobody waits for it any more
                    batch.append(entry)
            if batch:
                call = asyncio.create_task(self._call(batch))
                self._calls.add(call)
                call.add_done_callback(self._over)

    def _over(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._next()

    async def _call(self, batch: Sequence[_Entry]) -> None:
        now = time.monotonic()
        try:
            found = await self._send([window for window, _, _ in batch])
            answers = [_with_wait(f, now - asked) for f, (_, _, asked) in zip(found, batch, strict=True)]
        except Exception as error:
            for entry in batch:
                if len(batch) == 1 or _of_all(error):
                    _settle(entry[1], error)
                else:  # one of them may be to blame: the others must not end with it
                    await self._call([entry])
            return
        except asyncio.CancelledError:  # the loop ends
            for _, future, _ in batch:
                future.cancel()
            raise
        for (_, future, _), answer in zip(batch, answers, strict=True):
            _settle(future, answer)


@dataclass(slots=True)
class Member:
    """One verifier of the pool."""

    name: str
    actor_id: str = ""
    handle: Any = None
    status: VerifierStatus | None = None
    in_flight: int = 0
    """Windows that it was sent, and requests that it decodes by itself."""
    avoid_until: float = 0.0
    """A verify call failed a moment ago: others are chosen first."""
    failed_at: float = -math.inf
    """When a call found its actor dead or out of reach; a status from before is out of date."""
    _batches: tuple[Any, WindowBatches] | None = None
    """With the handle that they are for: calls to a dead actor must not hold up its successor's."""

    @property
    def ready(self) -> bool:
        """Whether it can be asked: certified, with the pool's fingerprint, and its handle is known."""
        return self.status is not None and self.status.state == "ready" and self.handle is not None

    @property
    def batches(self) -> WindowBatches:
        """Joins windows into calls of the present actor."""
        handle = self.handle
        if self._batches is None or self._batches[0] is not handle:
            self._batches = handle, WindowBatches(lambda windows: handle.verify.remote(windows, False))
        return self._batches[1]


@contextmanager
def errors_of(member: Member) -> Iterator[None]:
    """Ray's errors of a call to the member's actor as ours; that it is dead is remembered of the member."""
    actor_id = member.actor_id
    try:
        yield
    except RayActorError as error:
        if member.actor_id == actor_id:  # else its successor is there already
            member.status, member.failed_at = None, time.monotonic()
        raise VerifierUnavailable(f"{member.name}: {type(error).__name__}") from error
    except RayTaskError as error:
        if isinstance(error.cause, LLM42Error):
            raise error.cause from error
        raise
    except RayError as error:  # the cluster's trouble, not the window's
        raise VerifierUnavailable(f"{member.name}: {type(error).__name__}") from error


def _of_all(error: Exception) -> bool:
    """Whether it went wrong for every window of a call alike: the verifier is gone, failing or full."""
    if isinstance(error, RayTaskError):
        error = error.cause
    return isinstance(error, RayError | VerifierUnavailable | Overloaded)


def _settle(answer: asyncio.Future[Answer], found: Answer | Exception) -> None:
    if answer.done():  # cancelled meanwhile
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _with_wait(answer: Answer, waited_s: float) -> Answer:
    """The commit, its queue time with what it waited here: admission and window lengths go by it."""
    if not isinstance(answer, Commit):
        return answer
    timings = replace(answer.timings, queue_s=answer.timings.queue_s + waited_s)
    return replace(answer, timings=timings)
