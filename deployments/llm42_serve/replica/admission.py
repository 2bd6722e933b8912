"""Who may run on a replica, who waits, who is refused: two classes with queues of their own.

A free place goes to the class that uses less of its share, so neither class waits behind the other. How many
deterministic requests run follows the verifiers: the limit falls by a part when windows wait too long for a
verifier and rises by one per round of commits that did not (additive increase, multiplicative decrease; Chiu
and Jain 1989). While each of them has too much to do (places, KV, the time of a step), whoever it is for,
fewer and fewer may run. So no more deterministic work is admitted than the verifiers sustain; the rest waits
here.
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

DECREASE = 0.7
DECREASE_EVERY_S = 1.0
EASE = 7 / 8
"""Of what runs, so much may run after a look at verifiers that all have too much to do. Where requests are
long, nobody starts then; where they are short, some do: else all would have ended before the next look."""
REOPEN = 1 / 32
"""Of the places, and one at least: so many more may run with each look at verifiers that have room again."""


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
        target_queue_s: float,
        clock: Callable[[], float] = time.monotonic,
        all_verified: bool = False,
    ) -> None:
        """places: requests that may run; max_queued: requests of one class that may wait. all_verified: the
        verifiers are asked for best effort too."""
        self.places, self.max_queued, self._target_queue_s = places, max_queued, target_queue_s
        rest = max(1e-6, 1.0 - deterministic_share)
        self.classes = {True: Class(deterministic_share), False: Class(rest)}
        self._limited = (True, False) if all_verified else (True,)
        """The classes that verifiers are asked for."""
        self.deterministic_limit = float(places)
        self._clock, self._decreased = clock, float("-inf")
        self._ceiling = float(places)
        """How many may run for whom verifiers are asked, by what these have to do."""
        self._last: bool | None = None
        """The class that got the last place."""

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
        if queue_s <= self._target_queue_s:
            self.deterministic_limit += 1.0 / max(1.0, self.deterministic_limit)
            self.deterministic_limit = min(float(self.places), self.deterministic_limit)
            self._hand_out()
        elif (now := self._clock()) - self._decreased >= DECREASE_EVERY_S:
            self._decreased = now
            self.deterministic_limit = max(1.0, DECREASE * min(self.deterministic_limit, self._verified))

    def look(self, crowded: bool) -> None:
        """Whether each verifier had too much to do, a moment ago. Then fewer may run; what runs goes on. All
        that wait at once would be too much again, so they are let in by and by."""
        if crowded:
            self._ceiling = EASE * min(self._ceiling, self._verified)
        elif self._ceiling < self.places:
            self._ceiling = max(self._ceiling, self._verified) + max(1.0, REOPEN * self.places)
            self._hand_out()

    @property
    def limit(self) -> int:
        """With fewer running requests that verifiers are asked for, one more may start."""
        return max(1, int(min(self.deterministic_limit, self._ceiling)))

    async def _enter(self, deterministic: bool) -> None:
        mine = self.classes[deterministic]
        if not mine.waiting and self._may_start(deterministic):
            self._last = deterministic
            mine.running += 1
            return
        if len(mine.waiting) >= self.max_queued:
            kind = "deterministic" if deterministic else "best-effort"
            text = f"{self.max_queued} {kind} requests are waiting for this replica already"
            raise Overloaded(f"{text} (server.max_queued): send the request again later.")
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
        return deterministic not in self._limited or self._verified < self.limit

    @property
    def _verified(self) -> int:
        """Running requests that verifiers are asked for."""
        return sum(self.classes[d].running for d in self._limited)

    def _hand_out(self) -> None:
        """Gives free places to those that wait, the class that uses less of its share first; where they are
        even, as with a single place, the one that was not served last."""
        while True:
            able = [d for d, c in self.classes.items() if c.waiting and self._may_start(d)]
            if not able:
                return
            of = min(able, key=lambda d: (self.classes[d].running / self.classes[d].share, d is self._last))
            chosen = self.classes[of]
            turn = chosen.waiting.popleft()
            if not turn.done():
                self._last = of
                chosen.running += 1
                turn.set_result(None)
