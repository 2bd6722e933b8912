"""What waits in a verifier for one replica, until a call of that replica is there to take it along.

The step thread puts commits in, one a request and step; the event loop gives them out, joined. A commit that
answers a window is due at once, a directly decoded token when it has waited for the interval. An answer is
kept until the replica has acknowledged it, and given again when it was lost. Repeats are harmless: a session
compares what it knows (llm42/session/machine.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from llm42.errors import LLM42Error, VerificationFailed
from llm42.protocol import Commit, Failure, Window
from llm42.session.commits import joined
from llm42.session.interfaces import Sink
from llm42.session.verify_call import SEND_IN_FULL
from llm42_serve.wire import Answer, Down, Up, pack

log = logging.getLogger(__name__)
_Waiting = dict[str, list[Answer]]


@dataclass(slots=True)
class _Given:
    """An answer that is not acknowledged yet."""

    number: int
    call: int
    waiting: _Waiting


class Follows(Protocol):
    """What is asked of the verifier: see llm42/session/interfaces.py."""

    def follow(self, window: Window, sink: Sink) -> None: ...

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None: ...

    def release(self, request_id: str) -> None: ...


class Outbox:
    """One per replica. Made and read in an event loop; `sink` is for the step thread, or any other."""

    def __init__(self) -> None:
        self._loop, self._name = asyncio.get_running_loop(), uuid.uuid4().hex
        self._lock = threading.Lock()
        self._waiting: _Waiting = {}
        self._since = 0.0
        """When the oldest of them came (time.monotonic)."""
        self._urgent = self._told = False
        """_told: the loop knows that something waits, and whether it is urgent."""
        self._given: list[_Given] = []
        self._number = self._acknowledged = 0
        self._open: tuple[Up, asyncio.Future[Down]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.called = time.monotonic()
        """When the replica was last heard of."""

    def sink(self, request_id: str) -> Callable[[Answer], None]:
        """Takes in what comes of one window; its first answer, and errors, are due at once."""
        first = True

        def put(answer: Answer) -> None:
            nonlocal first
            self.put(request_id, answer, urgent=first or not isinstance(answer, Commit))
            first = False

        return put

    def put(self, request_id: str, answer: Answer, urgent: bool) -> None:
        """One more; any thread. The loop is woken when that may change when something is given."""
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.setdefault(request_id, []).append(answer)
            wake = not self._told or (urgent and not self._urgent)
            self._told, self._urgent = True, self._urgent or urgent
        if wake:
            with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._look)

    def forget(self, request_id: str) -> None:
        """The request is over: what waits of it is for nobody."""
        with self._lock:
            self._waiting.pop(request_id, None)

    async def take(self, up: Up) -> Down:
        """Answers a call when something is due, or when the next one comes. Cancelling it loses nothing."""
        self.called = time.monotonic()
        self._acknowledge(up)
        self._answer()  # the call before
        future: asyncio.Future[Down] = self._loop.create_future()
        self._open = up, future
        self._look()
        try:
            return await future
        finally:
            self.called = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether a call waits for its answer."""
        return self._open is not None and not self._open[1].done()

    def _look(self) -> None:
        """Gives what is due, or sees to it that this is asked again in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._open is None or not self._waiting:
            return
        delay_s = 0.0 if self._urgent else self._since + self._open[0].interval_s - time.monotonic()
        if delay_s <= 0.0:
            self._answer()
        else:
            self._timer = self._loop.call_later(delay_s, self._look)

    def _answer(self) -> None:
        """Answers the open call with all that waits, if there is one that is still awaited."""
        if self._open is None:
            return
        (up, future), self._open = self._open, None
        if future.done():  # it was cancelled: nobody takes what it would be given
            return
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._urgent = self._told = False
        after = self._given[-1].number if self._given else self._acknowledged
        if not waiting:
            future.set_result(Down(after, after, box=self._name))
            return
        self._number += 1
        self._given.append(_Given(self._number, up.number, waiting))
        try:
            down = _down(self._number, after, waiting)
        except Exception as error:  # a bug; nobody must wait for ever
            log.exception("what waits for a replica cannot be packed")
            broken = VerificationFailed(f"{type(error).__name__}: {error}")
            down = Down(self._number, after, None, tuple((0, name, broken) for name in waiting))
        future.set_result(replace(down, box=self._name))

    def _acknowledge(self, up: Up) -> None:
        """Lets go of what has arrived; from the first lost answer on, all wait again: they are in order."""
        self._acknowledged = max(self._acknowledged, min(up.acknowledged, self._number))
        self._given = [g for g in self._given if g.number > self._acknowledged]
        lost = next((at for at, g in enumerate(self._given) if g.call != up.beside), None)
        if lost is None:
            return
        again, self._given = self._given[lost:], self._given[:lost]
        with self._lock:
            for given in reversed(again):
                for name, answers in given.waiting.items():
                    self._waiting[name] = answers + self._waiting.get(name, [])
            self._urgent = self._told = True


def _down(number: int, after: int, waiting: _Waiting) -> Down:
    """All that waits as one answer: one commit per request, unless something lies between its commits."""
    commits: list[Commit] = []
    failures: list[tuple[int, str, Failure | LLM42Error]] = []
    for name, answers in waiting.items():
        run: list[Commit] = []
        for answer in answers:
            if isinstance(answer, Commit):
                run.append(answer)
            else:
                commits += joined(run)
                failures.append((len(commits), name, answer))
                run = []
        commits += joined(run)
    return Down(number, after, pack(commits) if commits else None, tuple(failures))


class Outboxes:
    """Those of all replicas, and what their calls ask of the verifier. Belongs to an event loop."""

    def __init__(self, verifier: Follows) -> None:
        self._verifier = verifier
        self._boxes: dict[str, Outbox] = {}

    async def exchange(self, up: Up) -> Down:
        """One call of a replica. Raises VerifierUnavailable when the verifier is closed."""
        box = self._boxes.get(up.replica)
        if box is None:
            box = self._boxes[up.replica] = Outbox()
        for name in up.releases:
            self._verifier.release(name)
            box.forget(name)
        for window in up.windows:
            sink = box.sink(window.request_id)
            try:
                self._verifier.follow(window, sink)
            except LLM42Error as refusal:  # of this one, perhaps: too many wait
                sink(refusal)
        for name, until in up.renewals:
            self._verifier.renew(name, until, partial(_told, box, name))
        return await box.take(up)

    def forget_silent(self, age_s: float) -> None:
        """Drops the boxes of replicas that have not called for `age_s` seconds and have no call open."""
        limit = time.monotonic() - age_s
        self._boxes = {name: b for name, b in self._boxes.items() if b.is_open or b.called >= limit}


def _told(box: Outbox, request_id: str, known: bool) -> None:
    if not known:
        text = "the verifier does not hold the request any more"
        box.put(request_id, Failure(request_id, SEND_IN_FULL, text), urgent=True)
