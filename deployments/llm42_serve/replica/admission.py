"""Who may run on a replica, who waits, who is refused: two classes with queues of their own.

A free place goes to the class that uses less of its share, so neither class waits behind the other. How many
deterministic requests run follows the verifiers: the limit falls by a part when windows wait too long for a
verifier and rises by one per round of commits that did not (additive increase, multiplicative decrease; Chiu
and Jain 1989). While they have more to do than they should (places, KV, the time of a step), whoever it is
for, nobody follows who ends. So no more deterministic work is admitted than the verifiers sustain; the rest
waits here.
Where verifiers decode everything, the limit is one for both classes together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from llm42.errors import Overloaded
from llm42_serve.verifiers.load import Limits, Load

DECREASE = 0.7
DECREASE_EVERY_S = 1.0
RAISE = 0.1
"""Of the limit, and one at least: by so much it rises with each look at verifiers that have room."""
RAISE_AFTER_S = 5.0
"""Not so soon after windows have waited too long, whatever the verifiers were short of."""


@dataclass(slots=True)
class Class:
    """One class of requests."""

    share: float
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Admission:
    """One per replica; belongs to its event loop."""

    def __init__(
        self,
        places: int,
        max_queued: int,
        deterministic_share: float,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        all_verified: bool = False,
    ) -> None:
        """places: requests that may run; max_queued: requests of one class that may wait. all_verified: the
        verifiers are asked for best effort too."""
        self.places, self.max_queued, self._limits = places, max_queued, limits
        rest = max(1e-6, 1.0 - deterministic_share)
        self.classes = {True: Class(deterministic_share), False: Class(rest)}
        self._limited = (True, False) if all_verified else (True,)
        """The classes that verifiers are asked for."""
        self.deterministic_limit = float(places)
        self._clock, self._decreased = clock, float("-inf")
        self._crowded = False
        """Whether the verifiers had more to do than they should, at the last look."""

    @asynccontextmanager
    async def place(self, deterministic: bool) -> AsyncIterator[None]:
        """A place for as long as the block lasts. Raises Overloaded when too many wait already."""
        await self._enter(deterministic)
        try:
            yield
        finally:
            self.classes[deterministic].running -= 1
            self._hand_out()

    def observe(self, queue_s: float) -> None:
        """A commit whose window waited `queue_s` seconds for its verifier."""
        if queue_s <= self._limits.queue_s:
            if not self._crowded:
                self._raise(1.0 / max(1.0, self.deterministic_limit))
        elif (now := self._clock()) - self._decreased >= DECREASE_EVERY_S:
            self._decreased = now
            self.deterministic_limit = max(1.0, DECREASE * min(self.deterministic_limit, self._verified))

    def look(self, load: Load) -> None:
        """The verifiers' load of a moment ago. What runs goes on, and counts until it ends, however long that
        is and however few windows it sends."""
        self._crowded = self._limits.crowded(load)
        if self._crowded:
            self.deterministic_limit = max(1.0, min(self.deterministic_limit, self._verified - 1.0))
        elif self._clock() - self._decreased >= RAISE_AFTER_S:
            self._raise(max(1.0, RAISE * self.deterministic_limit))

    def _raise(self, by: float) -> None:
        self.deterministic_limit = min(float(self.places), self.deterministic_limit + by)
        self._hand_out()

    async def _enter(self, deterministic: bool) -> None:
        mine = self.classes[deterministic]
        if not mine.waiting and self._may_start(deterministic):
            mine.running += 1
            return
        if len(mine.waiting) >= self.max_queued:
            kind = "deterministic" if deterministic else "best-effort"
            raise Overloaded(f"{self.max_queued} {kind} requests are waiting for this replica already.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place came just when the client left
                mine.running -= 1
                self._hand_out()
            elif turn in mine.waiting:
                mine.waiting.remove(turn)
            raise

    def _may_start(self, deterministic: bool) -> bool:
        if sum(c.running for c in self.classes.values()) >= self.places:
            return False
        return deterministic not in self._limited or self._verified < max(1, int(self.deterministic_limit))

    @property
    def _verified(self) -> int:
        """Running requests that verifiers are asked for."""
        return sum(self.classes[d].running for d in self._limited)

    def _hand_out(self) -> None:
        """Gives free places to those that wait, the class that uses less of its share first."""
        while True:
            able = [d for d, c in self.classes.items() if c.waiting and self._may_start(d)]
            if not able:
                return
            chosen = self.classes[min(able, key=lambda d: self.classes[d].running / self.classes[d].share)]
            turn = chosen.waiting.popleft()
            if not turn.done():
                chosen.running += 1
                turn.set_result(None)
