"""One verifier as a replica talks to it: windows, renewals and releases go up, commits come down, in few
calls.

An actor call costs either side more than half a millisecond of its interpreter, whatever is in it. So while
any answer is awaited one call lies open at the verifier, which answers it when something is due. What is to
go up goes with a call of its own, beside the open one, which is answered then: a window at once, what nobody
waits for (credit, a release) a little later and with all others. So at most two are under way, and what comes
meanwhile goes with the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from llm42.errors import LLM42Error, VerifierUnavailable
from llm42.protocol import Commit, Window
from llm42.session.interfaces import Sink
from llm42.step_times import Neighbour
from llm42_serve.wire import Answer, Down, Up, outbox_of, unpack

log = logging.getLogger(__name__)
UNDER_WAY = 2
RENEWAL_S, RELEASE_S = 0.003, 0.02
"""How long a renewal, or a release, waits for others. The renewals that follow from one answer come within a
few turns of the loop; and while they wait, credit runs out."""
AGAIN_S = (0.05, 0.2, 0.8)
"""Pauses after calls that were lost one after the other; after the last one the verifier counts as dead."""
FRESH_S = 2.0
"""After a longer silence numbers begin anew: the verifier may have dropped an outbox that nobody asks
(verifier.idle_s)."""


class CallLost(Exception):
    """A call or its answer was lost on the way; the verifier may be well."""


class Exchange:
    """Belongs to an event loop. `call` makes one actor call: CallLost is repeated, any other exception of it
    means that this verifier is gone, and that every request must begin anew elsewhere."""

    def __init__(
        self,
        replica: str,
        call: Callable[[Up], Awaitable[Down]],
        interval_s: Callable[[], float],
        answer_s: float = math.inf,
        worked_s: Callable[[], float] = lambda: -1.0,
    ) -> None:
        """replica: a name that no other one has. interval_s: how long directly decoded tokens may wait.
        answer_s: the longest that the verifier may say nothing at all. worked_s: as Up's."""
        self._worked_s = worked_s
        self._name, self._call, self._interval_s, self._answer_s = replica, call, interval_s, answer_s
        self._sinks: dict[str, Sink] = {}
        self._awaited: dict[str, bool] = {}
        """Who waits for an answer, and whether for many: a window without credit has one."""
        self._marks: dict[str, int] = {}
        self._count = 0
        self._progressed = -math.inf
        self._windows: dict[str, Window] = {}
        self._renewals: dict[str, int] = {}
        self._releases: set[str] = set()
        self._stops: dict[str, int] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        """Under way, by number."""
        self._early: dict[int, Down] = {}
        """Answers that follow one which has not come yet, by what they follow."""
        self._series = self._number = self._arrived = self._lost = 0
        self._box, self._ended = "", time.monotonic()
        self._pause: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None
        self.dead: LLM42Error | None = None
        self.told: Down | None = None
        """The last answer that said something of the verifier's load."""
        self.told_at = -math.inf
        self.neighbour = Neighbour()
        """For how long the verifier has computed."""

    @property
    def followed(self) -> int:
        """How many requests have been begun here and not released."""
        return len(self._sinks)

    @property
    def progressed_s(self) -> float:
        """How many seconds ago the verifier is known to have completed a step."""
        return time.monotonic() - self._progressed

    def follow(self, window: Window, sink: Sink) -> None:
        """As VerifierClient.follow; a window without credit has one answer. Raises VerifierUnavailable when
        the verifier is gone."""
        if self.dead is not None:
            raise VerifierUnavailable(str(self.dead))
        name = window.request_id
        self._count += 1
        self._marks[name] = self._count
        self._sinks[name], self._windows[name] = sink, window
        self._awaited[name] = window.credit > 0
        self._renewals.pop(name, None)  # of a window before
        self._next()

    def renew(self, request_id: str, until: int) -> None:
        """As VerifierClient.renew; a request that the verifier does not know is said to the sink."""
        if request_id in self._sinks:
            self._renewals[request_id] = max(until, self._renewals.get(request_id, 0))
            self._soon(RENEWAL_S)

    def stop(self, request_id: str) -> None:
        """As VerifierClient.stop; one that is not followed here is nothing."""
        if request_id in self._sinks:
            for of in (self._awaited, self._renewals, self._windows):
                of.pop(request_id, None)
            self._stops[request_id] = self._marks[request_id]
            self._next()

    def release(self, request_id: str) -> None:
        """As VerifierClient.release; one that is not followed here is nothing."""
        if self._sinks.pop(request_id, None) is None:
            return
        for of in (self._awaited, self._marks, self._renewals, self._windows, self._stops):
            of.pop(request_id, None)
        self._releases.add(request_id)  # also where the window was still here: one before it may be there
        self._soon(RELEASE_S)

    def close(self) -> None:
        """Ends the calls; nothing is said to anybody."""
        self.dead = self.dead or VerifierUnavailable("the replica is closed")
        self._sinks.clear()
        for timer in (self._pause, self._later):
            if timer is not None:
                timer.cancel()
        for task in self._calls.values():
            task.cancel()

    # ---- calls

    def _soon(self, after_s: float) -> None:
        """Something is to be said that may wait so long for others."""
        loop = asyncio.get_running_loop()
        if self._later is not None:
            if self._later.when() <= loop.time() + after_s:
                return
            self._later.cancel()
        self._later = loop.call_later(after_s, self._now)

    def _now(self) -> None:
        self._later = None
        self._next()

    def _next(self) -> None:
        """Makes a call if there is something to say, or if an answer is awaited and none is open."""
        if self.dead is not None or self._pause is not None or len(self._calls) >= UNDER_WAY:
            return
        says = self._windows or self._renewals or self._releases or self._stops
        if not says and (self._calls or not self._awaited):
            return
        if not self._calls and time.monotonic() - self._ended > FRESH_S:
            self._begin_anew()
        self._number += 1
        up = Up(
            outbox_of(self._name, self._series),
            self._number,
            next(iter(self._calls), 0),
            self._arrived,
            self._interval_s(),
            tuple(self._windows.values()),
            tuple(self._renewals.items()),
            tuple(self._releases),
            tuple(self._marks[name] for name in self._windows),
            self._answer_s,
            tuple(self._stops.items()),
            self._worked_s(),
        )
        for said in (self._windows, self._renewals, self._releases, self._stops):
            said.clear()
        self._calls[up.number] = asyncio.get_running_loop().create_task(self._make(up))

    def _begin_anew(self) -> None:
        """Unless something is awaited that was asked for before."""
        if self._awaited.keys() <= self._windows.keys():
            self._early.clear()
            self._box, self._number, self._arrived = "", 0, 0
            self._series += 1

    async def _make(self, up: Up) -> None:
        try:
            down = await self._call(up)
        except CallLost as error:
            self._over(up)
            self._repeat(up, error)
        except Exception as error:
            self._over(up)
            self.die(error)
        else:
            self._over(up)
            self._lost = 0
            self._progressed = max(self._progressed, time.monotonic() - down.progressed_s)
            if down.direct >= 0:
                self.told, self.told_at = down, time.monotonic()
                self.neighbour.tell(down.worked_s)
            self._take(down)
        self._drop_early()
        self._next()

    def _over(self, up: Up) -> None:
        del self._calls[up.number]
        self._ended = time.monotonic()

    def _repeat(self, up: Up, error: Exception) -> None:
        """Says again what nobody may have heard, unless it is out of date, after a pause."""
        for mark, window in zip(up.marks, up.windows, strict=True):
            if self._marks.get(window.request_id) == mark and window.request_id in self._awaited:
                self._windows[window.request_id] = window
        for name, until in up.renewals:
            if self._awaited.get(name):  # a window without credit has taken the place of what they renew
                self._renewals[name] = max(until, self._renewals.get(name, 0))
        self._releases.update(name for name in up.releases if name not in self._sinks)
        self._stops.update((name, mark) for name, mark in up.stops if self._marks.get(name) == mark)
        self._lost += 1
        if self._lost > len(AGAIN_S):
            self.die(error)
        elif self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(AGAIN_S[self._lost - 1], self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._next()

    def die(self, error: Exception) -> None:
        """Tells everybody who waits that the verifier is gone."""
        if self.dead is not None:
            return
        text = str(error) if isinstance(error, LLM42Error) else f"{type(error).__name__}: {error}"
        self.dead = VerifierUnavailable(text)
        sinks = [self._sinks[name] for name in self._awaited]
        self._sinks.clear()
        self._awaited.clear()
        for task in self._calls.values():
            task.cancel()
        for sink in sinks:
            _tell(sink, self.dead)

    # ---- answers

    def _take(self, down: Down) -> None:
        """Hands on what has come, in order: an answer that came early waits for the one it follows."""
        if self._box not in ("", down.box):
            self.die(VerifierUnavailable("the verifier has started anew"))
            return
        self._box = down.box
        held = self._early.get(down.after)
        if down.number > max(down.after, self._arrived) and (held is None or held.number < down.number):
            self._early[down.after] = down
        while (
            early := next((d for d in self._early.values() if d.after <= self._arrived), None)
        ) is not None:
            del self._early[early.after]
            if early.number > self._arrived:
                self._arrived = early.number
                self._hand_on(early)

    def _drop_early(self) -> None:
        """Without another call under way what an early answer follows is lost, and both come again."""
        if not self._calls:
            self._early.clear()

    def _hand_on(self, down: Down) -> None:
        commits, at = list(unpack(down.commits)) if down.commits is not None else [], 0
        marks, failed = down.marks[: len(commits)], down.marks[len(commits) :]
        for mark, (before, name, failure) in zip(failed, down.failures, strict=True):
            self._say_all(marks[at:before], commits[at:before])
            at = before
            self._say(name, mark, failure)
        self._say_all(marks[at:], commits[at:])

    def _say_all(self, marks: Sequence[int], commits: Sequence[Commit]) -> None:
        for mark, commit in zip(marks, commits, strict=True):
            self._say(commit.request_id, mark, commit)

    def _say(self, name: str, mark: int, answer: Answer) -> None:
        """Unless the request was released meanwhile, waits for another window's answer or has had it."""
        if name not in self._awaited or mark not in (0, self._marks[name]):
            return
        if not self._awaited[name]:
            del self._awaited[name]
        _tell(self._sinks[name], answer)


def _tell(sink: Sink, answer: Answer) -> None:
    try:
        sink(answer)
    except Exception:  # one request's reader must not end everybody's exchange
        log.exception("an answer could not be handed on")
