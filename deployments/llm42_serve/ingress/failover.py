"""One request over several replicas: when its replica is lost, another one goes on after what the client has.

A deterministic output is a function of the request, so the continuation is the one the lost replica would
have given, bit for bit. A best-effort one is some continuation; it is resumed only where the configuration
says so.
Knows nothing of Ray: an attempt is a function from a request to its deltas. What the replica sends
is read here: a generator in between would be resumed for every delta.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from llm42.api.errors import ServiceUnavailable
from llm42.config import ServerSettings
from llm42.errors import FingerprintChanged, LLM42Error, Overloaded, VerifierUnavailable, VersionSkew
from llm42.protocol import Delta, Request
from llm42.session.outputs import EngineFailed

PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Between attempts; the last one repeats. Serve needs a moment to take a dead replica out of its lists."""

ADMISSION_TRIES = 4
"""A request that every attempt finds full is refused after so many: Serve routes by queue lengths that may be
out of date, so another replica may have room."""
ELSEWHERE = (Overloaded, VersionSkew, FingerprintChanged)
"""Refusals that another replica may not share: it has room, or is of the ingress's release."""


class ReplicaLost(ServiceUnavailable):
    """The replica of this request is gone, or cannot be reached."""


def as_loss(error: LLM42Error, engine_alive: bool) -> LLM42Error:
    """An engine that has died takes its requests with it and refuses new ones: to them that is the loss of
    their replica, which Serve replaces, and not an error of theirs."""
    if isinstance(error, EngineFailed | Overloaded) and not engine_alive:
        return ReplicaLost(f"The engine of this request's replica has died: {error}")
    return error


Attempt = Callable[[Request], AbstractAsyncContextManager[AsyncIterator[Delta | LLM42Error]]]
"""Asks a replica; an error may be the last item. Left with an error of ours or with none, the replica has
ended the request by itself; else it is to be cancelled there."""


@dataclass(slots=True)
class Failover:
    """The state of one request across its attempts."""

    request: Request
    settings: ServerSettings
    on_loss: Callable[[], None] = lambda: None
    """Called each time that another replica is to go on with the request."""
    sent: list[int] = field(default_factory=list)
    fingerprint: str | None = None
    attempts: int = 0
    losses: int = 0
    refusals: int = 0
    lost_at: float = 0.0

    async def run(self, attempt: Attempt) -> AsyncGenerator[Delta, None]:
        """The output as if nothing had happened. When nobody can go on with it, raises the last error:
        ReplicaLost, or what a replica has said (LLM42Error)."""
        while True:
            self.attempts += 1
            last: Delta | None = None
            try:
                async with attempt(self.current()) as items:
                    async for item in items:
                        if isinstance(item, LLM42Error):
                            raise item
                        if item.finish_reason is not None:
                            last = item
                            break
                        yield self._note(item)
                    else:
                        raise ReplicaLost("The replica ended this request's stream too early.")
            except LLM42Error as error:
                if last is None:  # else, whatever happens to the replica now, everything is here
                    self._failed(error)
            if last is not None:
                yield self._note(last)
                return
            await asyncio.sleep(PAUSES_S[min(self.losses + self.refusals, len(PAUSES_S)) - 1])

    def current(self) -> Request:
        """What the next attempt is asked: the rest of the output, under an id of its own."""
        if self.attempts <= 1:
            return self.request
        return replace(
            self.request,
            request_id=f"{self.request.request_id}~{self.attempts - 1}",  # never one that was used before
            output=tuple(self.sent),
            fingerprint=self.fingerprint,
        )

    def _note(self, delta: Delta) -> Delta:
        """For what is given to the client at once, and nothing else: the next attempt begins behind it."""
        self.sent += delta.token_ids
        self.fingerprint = delta.fingerprint or self.fingerprint
        self.lost_at, self.refusals = 0.0, 0
        if delta.stats is None or not self.losses:
            return delta
        # the last replica counted its own share only; the tokens are all of them
        stats = replace(delta.stats, failovers=self.losses, verified_tokens=len(self.sent))
        return replace(delta, stats=stats)

    def _failed(self, error: LLM42Error) -> None:
        """Raises the error unless there may be another attempt."""
        if isinstance(error, ReplicaLost):
            self._lost(error)
        elif isinstance(error, Overloaded | VerifierUnavailable):
            self._refused(error)
        else:
            raise error

    def _lost(self, error: Exception) -> None:
        """Raises the error unless the request may go on elsewhere."""
        now = time.monotonic()
        self.lost_at = self.lost_at or now
        resumable = self.request.deterministic or self.settings.resume_best_effort or not self.sent
        if not resumable or now - self.lost_at >= self.settings.failover_s:
            raise error
        self.losses += 1
        self.on_loss()

    def _refused(self, error: Exception) -> None:
        """A refusal before the first token is the client's answer; a stream that has begun waits for room."""
        self.refusals += 1
        now = time.monotonic()
        if self.sent and isinstance(error, FingerprintChanged):
            raise error  # waiting does not bring the old verifiers back
        if self.losses and self.sent:
            self.lost_at = self.lost_at or now
            if now - self.lost_at <= self.settings.failover_s:
                return
        elif isinstance(error, ELSEWHERE) and not self.sent and self.refusals < ADMISSION_TRIES:
            return
        raise error
