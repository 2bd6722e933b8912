"""What waits in a verifier for one replica, until a call of that replica is there to take it along.

The step thread puts commits in, one a request and step; the event loop gives them out, joined. What begins or
ends an answer is due at once, a directly decoded token between when it has waited for the interval. An answer
is kept until the replica has acknowledged it, and given again when it was lost. A call that comes twice is
heard once, and so is a window; of a request whose window was replaced or released nothing more is put in.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from llm42.errors import LLM42Error, VerificationFailed
from llm42.protocol import Commit, Failure, Window
from llm42.session.commits import joined
from llm42_serve.wire import Answer, Down, Up, pack

log = logging.getLogger(__name__)
_Waiting = dict[str, list[tuple[int, Answer]]]
"""By request, each with the mark of its window."""
HEARD = 16
"""Numbers of calls that are remembered: more than one that comes twice is behind the newest."""


@dataclass(slots=True)
class _Given:
    """An answer that is not acknowledged yet."""

    number: int
    call: int
    waiting: _Waiting


class Outbox:
    """One per replica. Made and read in an event loop; `sink` is for the step thread, or any other."""

    def __init__(self) -> None:
        self._loop, self._name = asyncio.get_running_loop(), uuid.uuid4().hex
        self._lock = threading.Lock()
        self._waiting: _Waiting = {}
        self._since = 0.0
        """When the oldest of them came (time.monotonic)."""
        self._urgent: dict[str, None] = {}
        """Requests of which something is due at once, in the order in which they came."""
        self._told = False
        """The loop knows that something waits, and whether anything is urgent."""
        self._marks: dict[str, int] = {}
        """Of the requests' present windows."""
        self._begun: dict[str, int] = {}
        """The numbers of the calls that these came with: calls may overtake each other."""
        self._over: dict[str, int] = {}
        """Requests that were released of late, and the number of the call that said so."""
        self._computed: dict[str, Future[Commit | Failure]] = {}
        """The present windows of those that are not followed."""
        self._heard: list[int] = []
        self._given: list[_Given] = []
        self._number = self._acknowledged = 0
        self._open: tuple[Up, asyncio.Future[Down]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.called = time.monotonic()
        """When the replica was last heard of."""

    # ---- what is asked for

    def hears(self, number: int) -> bool:
        """Whether the call of this number comes for the first time."""
        if number in self._heard:
            return False
        self._heard = [*self._heard[1 - HEARD :], number]
        if self._over:
            self._over = {name: call for name, call in self._over.items() if call > number - HEARD}
        return True

    def begin(self, request_id: str, mark: int, call: int = 0) -> bool:
        """A window has come with this call; False if it has been here before, or a later one has, or if a
        later call has said that the request is over. From now on nothing is taken in of those before it."""
        if self._over.get(request_id, 0) > call > 0:
            return False
        with self._lock:
            if 0 < mark <= self._marks.get(request_id, 0):
                return False
            self._marks[request_id] = mark
        self._begun[request_id] = call
        self._drop(request_id)
        return True

    def mark_of(self, request_id: str) -> int:
        """Of its present window; 0: there is none."""
        with self._lock:
            return self._marks.get(request_id, 0)

    def sink(self, window: Window, mark: int = 0) -> Callable[[Answer], None]:
        """Takes in what comes of one window; its first answer, its last and errors are due at once."""
        first = True

        def put(answer: Answer) -> None:
            nonlocal first
            urgent = first or not isinstance(answer, Commit) or _ends(window, answer)
            self.put(window.request_id, answer, urgent, mark)
            first = False

        return put

    def await_answer(self, request_id: str, mark: int, answer: Future[Commit | Failure]) -> None:
        """Takes in what comes of a window without credit; one that is cancelled says nothing."""
        self._computed[request_id] = answer
        answer.add_done_callback(partial(self._answered, request_id, mark))

    def _answered(self, request_id: str, mark: int, answer: Future[Commit | Failure]) -> None:
        if not answer.cancelled():
            error = answer.exception()
            self.put(request_id, answer.result() if error is None else typed(error), True, mark)

    def forget(self, request_id: str, call: float = math.inf) -> bool:
        """The request is over: what waits of it is for nobody. False where that was said in an earlier call
        than its present window, and only comes later: it has begun anew."""
        if self._begun.get(request_id, 0) > call:
            return False
        self._begun.pop(request_id, None)
        if call < math.inf:
            self._over[request_id] = int(call)
        with self._lock:
            self._waiting.pop(request_id, None)
            self._urgent.pop(request_id, None)
            self._marks.pop(request_id, None)
        self._drop(request_id)
        return True

    def _drop(self, request_id: str) -> None:
        """A window that waits to be computed is not any more."""
        if (answer := self._computed.pop(request_id, None)) is not None:
            answer.cancel()

    # ---- what comes, and when it is given

    def put(self, request_id: str, answer: Answer, urgent: bool, mark: int = 0) -> None:
        """One more; any thread. The loop is woken when that may change when something is given. mark: of
        the window that it belongs to, unless that is not known."""
        with self._lock:
            if mark and mark != self._marks.get(request_id):
                return
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.setdefault(request_id, []).append((mark, answer))
            wake = not self._told or (urgent and not self._urgent)
            self._told = True
            if urgent:
                self._urgent[request_id] = None
        if wake:
            with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._look)

    async def take(self, up: Up) -> Down:
        """Answers a call when something is due, or when the next one comes: then with what is due, which may
        be nothing. Cancelling it loses nothing."""
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
        if self._open is None:
            return
        up, due = self._open[0], self.called + self._open[0].answer_s
        with self._lock:
            if self._waiting:
                due = min(due, -math.inf if self._urgent else self._since + up.interval_s)
            self._told = bool(self._waiting)  # what it was told of may have been released meanwhile
        delay_s = due - time.monotonic()
        if delay_s <= 0.0:
            self._answer()
        elif delay_s < math.inf:
            self._timer = self._loop.call_later(delay_s, self._look)

    def _answer(self) -> None:
        """Answers the open call with what is due, if there is one that is still awaited."""
        if self._open is None:
            return
        (up, future), self._open = self._open, None
        if future.done():  # it was cancelled: nobody takes what it would be given
            return
        with self._lock:
            waiting = self._due(up)
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
            marks = tuple(answers[-1][0] for answers in waiting.values())
            down = Down(
                self._number, after, None, tuple((0, name, typed(error)) for name in waiting), marks=marks
            )
        future.set_result(replace(down, box=self._name))

    def _due(self, up: Up) -> _Waiting:
        """Takes out all that waits once the oldest has waited for the interval; until then only what is
        urgent, so that requests which begin and end do not split the tokens of all others."""
        if time.monotonic() >= self._since + up.interval_s:
            due, self._waiting = self._waiting, {}
        else:
            due = {name: self._waiting.pop(name) for name in self._urgent}
        self._urgent, self._told = {}, bool(self._waiting)
        return due

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
            self._urgent, self._told = dict.fromkeys(self._waiting), True


def _down(number: int, after: int, waiting: _Waiting) -> Down:
    """All that waits as one answer: one commit per request and window, unless something lies between its
    commits."""
    commits, marks = list[Commit](), list[int]()
    failures = list[tuple[int, str, Failure | LLM42Error]]()
    failed = list[int]()
    for name, answers in waiting.items():
        for (mark, _), run in groupby(answers, lambda each: (each[0], isinstance(each[1], Commit))):
            of_run = [answer for _, answer in run]
            found = joined(c for c in of_run if isinstance(c, Commit))
            commits += found
            marks += [mark] * len(found)
            failures += [(len(commits), name, f) for f in of_run if not isinstance(f, Commit)]
            failed += [mark] * (len(of_run) if not found else 0)
    packed = pack(commits) if commits else None
    return Down(number, after, packed, tuple(failures), marks=(*marks, *failed))


def _ends(window: Window, commit: Commit) -> bool:
    """Whether nothing comes after it, as the verifier sees it: who reads it may begin something else."""
    if commit.end >= window.max_len > 0:
        return True
    return any(token in window.stop_token_ids for token in (commit.next_token, *commit.decoded))


def typed(error: BaseException) -> LLM42Error:
    """What is not ours is a bug, of one request."""
    return error if isinstance(error, LLM42Error) else VerificationFailed(f"{type(error).__name__}: {error}")
