"""Which verifier of the pool has which request, and the exchange with each: one way for windows that are
verified and for requests that are decoded there.

A request stays with the verifier that holds its KV until that dies, is not wanted any more, has failed it, or
has let it wait in vain.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError

from llm42.config import SessionSettings
from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import Commit, Failure, Window
from llm42.session.driver import DELTA_S
from llm42.session.interfaces import Sink
from llm42_serve.replica.exchange import CallLost, Exchange
from llm42_serve.replica.kept_answers import KeptAnswers
from llm42_serve.replica.member import AVOID_S, Member, errors_of
from llm42_serve.wire import Answer, Down, Up

if TYPE_CHECKING:
    from llm42_serve.replica.verifier_pool import VerifierPool

SILENCE_S = 5.0
"""The longest that a verifier says nothing while something is awaited of it, unless a quarter of
session.verify_timeout_s is less."""
_Reader = Callable[["Member | None", Answer], None]
"""Who hears the answers, and whose they are; None: no verifier was found."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where a request is, until that has failed."""

    member: Member
    actor_id: str
    handle: Any
    exchange: Exchange
    window: Window | None = None
    """The present one."""
    credit: int = 0
    """Of that."""
    heard_at: float = 0.0
    """When that was sent or, if later, when the last answer came."""
    awaited: bool = False
    """Whether it counts as work of the member: one answer, or more, is still to come."""
    decoded: bool = False
    """Whether it counts as one that the member decodes by itself."""
    silent: bool = True
    """No commit has come for the present window."""

    def silent_s(self) -> float:
        """For how long neither the request nor any other has come on there."""
        return min(time.monotonic() - self.heard_at, self.exchange.progressed_s)

    @property
    def yields(self) -> bool:
        """Whether it gives way to others: how it fares tells nothing of how these do."""
        return self.window is not None and self.window.yields

    def await_answers(self, awaited: bool, credit: int = 0) -> None:
        """Counts it as work of the member, or no more. credit: of its window."""
        member = self.member
        member.in_flight += awaited - self.awaited
        decoded = awaited and credit > 0
        member.direct += decoded - self.decoded
        member.decoded.set(member.direct)
        self.awaited, self.decoded = awaited, decoded

    def avoid(self) -> None:
        """Others are chosen first for a while."""
        if self.member.actor_id == self.actor_id:  # else its successor is there already
            self.member.avoid_until = time.monotonic() + AVOID_S


class Following:
    """One per pool; belongs to its event loop."""

    def __init__(
        self,
        pool: VerifierPool,
        session: SessionSettings,
        observe: Callable[[float], None],
        kept: KeptAnswers,
    ) -> None:
        """observe: as the pool's. kept: hears of what is decoded directly."""
        self._pool, self._session, self._observe, self._kept = pool, session, observe, kept
        self._places: dict[str, _Place] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self.beside: Callable[[], float] = lambda: -1.0
        """As Up.worked_s."""
        self._exchanges: dict[str, tuple[Any, Exchange]] = {}
        """By the member's name, with the handle that it is for."""

    def __len__(self) -> int:
        return len(self._places)

    def follow(self, window: Window, sink: Sink) -> None:
        """As VerifierClient.follow."""
        self._kept.begin(window)
        self._ask(window, lambda _, answer: sink(answer))

    def verified(self, window: Window) -> asyncio.Future[tuple[Member, Commit | Failure]]:
        """The answer to a window without credit, and whose it is. VerifierUnavailable or Overloaded may come
        of it. Cancelling it too early, as when the client leaves, is not the verifier's fault.

        The window is sent now. Sent when the answer is awaited, it could come behind its request's release,
        and would be followed for ever, or behind the next window, and take its place."""
        entered, name = time.monotonic(), window.request_id
        found: asyncio.Future[tuple[Member, Commit | Failure]] = asyncio.get_running_loop().create_future()

        def take(member: Member | None, answer: Answer) -> None:
            if found.done():
                return
            if isinstance(answer, LLM42Error):
                found.set_exception(answer)
            else:
                assert member is not None
                found.set_result((member, answer))

        self._ask(window, take)
        starting = self._starting.get(name)

        def over(found: asyncio.Future[tuple[Member, Commit | Failure]]) -> None:
            if found.cancelled():
                late = time.monotonic() - entered >= self._session.verify_timeout_s - 1.0
                self._unwanted(window, starting, late)
            else:
                found.exception()  # nobody may be there to look at it

        found.add_done_callback(over)
        return found

    def renew(self, request_id: str, until: int) -> None:
        """As VerifierClient.renew; that the request is not known is said to the sink."""
        if (place := self._places.get(request_id)) is not None:
            place.exchange.renew(request_id, until)

    def stop(self, request_id: str) -> None:
        """As VerifierClient.stop."""
        self._cancel(request_id)
        if (place := self._places.get(request_id)) is not None:
            place.await_answers(False)
            place.exchange.stop(request_id)

    def place_of(self, request_id: str) -> Member | None:
        """Which verifier has the request."""
        place = self._places.get(request_id)
        return place.member if place is not None and self._stands(place) else None

    def told(self, member: Member) -> tuple[Down | None, float]:
        """What an answer of the member said last of its load, and when."""
        handle, exchange = self._exchanges.get(member.name, (None, None))
        if exchange is None or handle is not member.handle or exchange.told is None:
            return None, -math.inf
        return exchange.told, exchange.told_at

    @property
    def worked_s(self) -> float:
        """As VerifierClient.worked_s, of those that were asked for something and are still there."""
        there, asked = {m.name: m.handle for m in tuple(self._pool.members)}, tuple(self._exchanges.items())
        said = [
            exchange.neighbour.seconds
            for name, (handle, exchange) in asked
            if exchange.dead is None and there.get(name) is handle
        ]
        return sum(said) / len(said) if said else 0.0

    def progressed_s(self, request_id: str) -> float:
        """As VerifierClient.progressed_s."""
        place = self._places.get(request_id)
        return math.inf if place is None else place.exchange.progressed_s

    def release(self, request_id: str) -> None:
        """As VerifierClient.release."""
        self._cancel(request_id)
        self._leave(request_id)

    def cut(self, actor_id: str, error: LLM42Error) -> None:
        """Nothing more is heard from this actor: who waits for it is told the error, and may go elsewhere."""
        for exchange in {p.exchange for p in self._places.values() if p.actor_id == actor_id}:
            exchange.die(error)

    def close(self) -> None:
        """Ends everything; nothing is said to anybody."""
        for name in list(self._starting):
            self._cancel(name)
        for _, exchange in self._exchanges.values():
            exchange.close()

    def _ask(self, window: Window, reader: _Reader) -> None:
        name = window.request_id
        self._cancel(name)
        place = self._places.get(name)
        if place is not None and self._stands(place) and not self._in_vain(place):
            self._send(place, window, reader)
            return
        self._blame_if_in_vain(place)
        self._leave(name)
        self._starting[name] = asyncio.get_running_loop().create_task(self._begin(window, reader))

    async def _begin(self, window: Window, reader: _Reader) -> None:
        name = window.request_id
        try:
            member = await self._pool.ready_member(window)
            place = _Place(member, member.actor_id, member.handle, self._exchange(member))
            self._send(place, window, reader)
            self._places[name] = place
            self._pool.note(name, member)
        except LLM42Error as error:
            reader(None, error)
        finally:
            if self._starting.get(name) is asyncio.current_task():
                del self._starting[name]

    def _send(self, place: _Place, window: Window, reader: _Reader) -> None:
        name = window.request_id

        def heard(answer: Answer) -> None:
            self._hear(name, place, answer)
            reader(place.member, answer)

        place.exchange.follow(window, heard)
        place.window, place.credit = window, window.credit
        place.heard_at, place.silent = time.monotonic(), True
        place.await_answers(True, window.credit)

    def _hear(self, name: str, place: _Place, answer: Answer) -> None:
        """What an answer says of the verifier."""
        place.heard_at = time.monotonic()
        if not isinstance(answer, Commit):
            refused = isinstance(answer, Overloaded)
            if isinstance(answer, LLM42Error) and not (refused and place.yields):
                place.avoid()
            if refused and not place.yields:
                self._observe(math.inf)
            self._over(name, place)
            return
        if place.silent:
            place.silent = False
            if not place.yields:
                self._observe(answer.timings.queue_s)
        if place.credit:
            self._kept.committed(place.member, answer)
        else:
            place.await_answers(False)

    def _stands(self, place: _Place) -> bool:
        """Whether a further window may go there: its verifier is wanted, and is the same actor."""
        member, known = place.member, self._pool.members
        same = member.handle is place.handle and any(m is member for m in known)
        return same and member.ready and place.exchange.dead is None

    def _in_vain(self, place: _Place) -> bool:
        """Whether it has waited there for nothing. The caller's time began earlier, perhaps with a wait for
        a verifier to be ready, of which this one is innocent."""
        return place.awaited and place.silent_s() >= self._session.verify_timeout_s / 2

    def _blame_if_in_vain(self, place: _Place | None) -> None:
        if place is not None and self._in_vain(place):
            place.avoid()

    def _unwanted(self, window: Window, starting: asyncio.Task[None] | None, late: bool) -> None:
        """Nobody waits for the window any more: nothing, where another one has taken its place meanwhile.
        starting: what looks for its verifier. late: because its time is over."""
        name = window.request_id
        if self._starting.get(name) is starting:
            self._cancel(name)
        place = self._places.get(name)
        if place is None or place.window is not window:
            return
        if late and self._in_vain(place):
            place.avoid()
            self._leave(name)
        else:
            place.await_answers(False)

    def _leave(self, name: str) -> None:
        if (place := self._places.get(name)) is not None:
            self._over(name, place)

    def _over(self, name: str, place: _Place) -> None:
        """The request is there no more; what the verifier holds of it may go."""
        place.await_answers(False)
        place.exchange.release(name)
        if self._places.get(name) is place:
            del self._places[name]

    def _cancel(self, name: str) -> None:
        if (task := self._starting.pop(name, None)) is not None:
            task.cancel()

    def _exchange(self, member: Member) -> Exchange:
        """The one with the member's present actor. Each has a name of its own: it numbers from 1 on."""
        handle, found = self._exchanges.get(member.name, (None, None))
        if found is None or handle is not member.handle or found.dead is not None:
            handle = member.handle

            async def call(up: Up) -> Down:
                return await _call(member, handle, up, lambda: self._others(member))

            silence_s = min(SILENCE_S, self._session.verify_timeout_s / 4)
            found = Exchange(uuid.uuid4().hex, call, self._interval_s, silence_s, lambda: self.beside())
            self._exchanges[member.name] = handle, found
        return found

    def _others(self, member: Member) -> bool:
        """Whether another one can be asked."""
        return any(m is not member for m in self._pool.ready)

    def _interval_s(self) -> float:
        """With many streams tokens wait longer, as a best-effort request's do."""
        return max(self._session.commit_interval_s, len(self) * DELTA_S)


async def _call(member: Member, handle: Any, up: Up, others: Callable[[], bool]) -> Down:
    """One actor call. Raises CallLost, or what means that the verifier is gone.

    One that cannot be reached has mostly died and is being started anew, and calls wait until it is there:
    who can go on elsewhere must not. others: whether one can.
    """
    try:
        with errors_of(member):
            found: Down = await handle.exchange.remote(up)
            return found
    except Exception as error:
        if isinstance(error.__cause__, ActorUnavailableError) and not others():
            raise CallLost(str(error)) from error
        raise
