"""Which verifier of the pool decodes which request by itself, and the exchange with each."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError

from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import Commit, Window
from llm42.session.driver import DELTA_S
from llm42.session.interfaces import Sink
from llm42_serve.replica.exchange import CallLost, Exchange
from llm42_serve.replica.member import AVOID_S, Member, errors_of
from llm42_serve.wire import Answer, Down, Up

if TYPE_CHECKING:
    from llm42_serve.replica.verifier_pool import VerifierPool


@dataclass(slots=True)
class _Place:
    """Where a request is decoded, until that has failed."""

    member: Member
    exchange: Exchange
    silent: bool = True
    """No commit has come from there."""


class Following:
    """One per pool; belongs to its event loop."""

    def __init__(self, pool: VerifierPool, interval_s: float, observe: Callable[[float], None]) -> None:
        """interval_s: session.commit_interval_s. observe: as the pool's."""
        self._pool, self._interval, self._observe = pool, interval_s, observe
        self._places: dict[str, _Place] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._exchanges: dict[str, tuple[Any, Exchange]] = {}
        """By the member's name, with the handle that it is for."""

    def __len__(self) -> int:
        return len(self._places)

    def follow(self, window: Window, sink: Sink) -> None:
        """As VerifierClient.follow. A request that comes again though nothing has failed has waited in vain:
        another verifier is better."""
        name = window.request_id
        if (before := self._places.get(name)) is not None:
            before.member.avoid_until = time.monotonic() + AVOID_S
        self._cancel(name)
        task = asyncio.get_running_loop().create_task(self._begin(window, sink))
        self._starting[name] = task

    def renew(self, request_id: str, until: int) -> None:
        """As VerifierClient.renew; that the request is not known is said to the sink."""
        if (place := self._places.get(request_id)) is not None:
            place.exchange.renew(request_id, until)

    def release(self, request_id: str) -> None:
        """As VerifierClient.release."""
        self._cancel(request_id)
        self._leave(request_id)

    def close(self) -> None:
        """Ends everything; nothing is said to anybody."""
        for name in list(self._starting):
            self._cancel(name)
        for _, exchange in self._exchanges.values():
            exchange.close()

    async def _begin(self, window: Window, sink: Sink) -> None:
        name = window.request_id
        try:
            member = await self._pool.ready_member(window)
            exchange = self._exchange(member)
            before = self._places.get(name)
            if before is not None and before.exchange is exchange:  # what it holds of the request stays
                self._over(name, before)
            else:
                self._leave(name)
            place = _Place(member, exchange)

            def heard(answer: Answer) -> None:
                self._hear(name, place, answer)
                sink(answer)

            exchange.follow(window, heard)
            self._places[name] = place
            member.in_flight += 1
            self._pool.note(name, member)
        except LLM42Error as error:
            sink(error)
        finally:
            if self._starting.get(name) is asyncio.current_task():
                del self._starting[name]

    def _hear(self, name: str, place: _Place, answer: Answer) -> None:
        """What an answer says of the verifier."""
        if not isinstance(answer, Commit):
            self._over(name, place)
            if isinstance(answer, Overloaded):
                self._observe(math.inf)
        elif place.silent:
            place.silent = False
            self._observe(answer.timings.queue_s)

    def _leave(self, name: str) -> None:
        if (place := self._places.get(name)) is not None:
            self._over(name, place)
            place.exchange.release(name)

    def _over(self, name: str, place: _Place) -> None:
        if self._places.get(name) is place:
            del self._places[name]
            place.member.in_flight -= 1

    def _cancel(self, name: str) -> None:
        if (task := self._starting.pop(name, None)) is not None:
            task.cancel()

    def _exchange(self, member: Member) -> Exchange:
        """The one with the member's present actor. Each has a name of its own: it numbers from 1 on."""
        handle, found = self._exchanges.get(member.name, (None, None))
        if found is None or handle is not member.handle or found.dead is not None:
            handle = member.handle

            async def call(up: Up) -> Down:
                return await _call(member, handle, up)

            found = Exchange(uuid.uuid4().hex, call, self._interval_s)
            self._exchanges[member.name] = handle, found
        return found

    def _interval_s(self) -> float:
        """With many streams tokens wait longer, as a best-effort request's do."""
        return max(self._interval, len(self) * DELTA_S)


async def _call(member: Member, handle: Any, up: Up) -> Down:
    """One actor call. Raises CallLost, or what means that the verifier is gone."""
    try:
        with errors_of(member):
            found: Down = await handle.exchange.remote(up)
            return found
    except Exception as error:
        if isinstance(error.__cause__, ActorUnavailableError):
            raise CallLost(str(error)) from error
        member.avoid_until = time.monotonic() + AVOID_S
        raise
