"""What an ingress makes of a replica's stream: whose errors the client sees, and when the replica is told
that nobody reads any more. The stream is a stand-in for Serve's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from llm42.api.errors import ServiceUnavailable
from llm42.config import ServerSettings
from llm42.errors import LLM42Error, Overloaded, RequestRejected
from llm42.protocol import Delta, FinishReason
from llm42.telemetry.metrics import Metrics
from llm42_serve.ingress.failover import ADMISSION_TRIES
from llm42_serve.ingress.ingress import RayBackend
from tests.support import request_of

FIRST, LAST = Delta((1,), "a"), Delta((2,), "b", finish_reason=FinishReason.LENGTH)


class Stream:
    """Gives items, or raises those that are Ray's."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items, self.cancelled = iter(items), False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        for item in self.items:
            if isinstance(item, Exception) and type(item) is not RequestRejected:
                raise item
            return item
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Serve's."""

    def __init__(self, *items: Any) -> None:
        self.items, self.streams = items, list[Stream]()

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any) -> Stream:
        self.streams.append(Stream(self.items))
        return self.streams[-1]


def backend_of(handle: Any) -> RayBackend:
    return RayBackend(handle, {}, ServerSettings(failover_s=0.0), Metrics())


async def outcome(handle: Handle) -> tuple[list[Delta], LLM42Error | None]:
    found: list[Delta] = []
    try:
        async for delta in backend_of(handle).generate(request_of("q", 1)):
            found.append(delta)
    except LLM42Error as error:
        return found, error
    return found, None


async def test_a_stream_that_has_ended_is_not_cancelled() -> None:
    handle = Handle(FIRST, LAST, RuntimeError("after the end: nobody looks"))
    assert await outcome(handle) == ([FIRST, LAST], None)
    assert not handle.streams[0].cancelled


async def test_an_error_that_the_replica_sends_is_its_end() -> None:
    handle = Handle(FIRST, RequestRejected("no"))
    found, error = await outcome(handle)
    assert (found, str(error), handle.streams[0].cancelled) == ([FIRST], "no", False)


@pytest.mark.parametrize("read", [1, 2])
async def test_a_client_that_leaves_ends_it(read: int) -> None:
    """Not when it has everything: then the replica ends by itself, and counts it."""
    handle = Handle(FIRST, LAST)
    stream = backend_of(handle).generate(request_of("q", 1))
    for _ in range(read):
        await anext(stream)
    await stream.aclose()
    assert handle.streams[0].cancelled == (read == 1)


@pytest.mark.parametrize(
    ("raised", "expected", "tries"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded, ADMISSION_TRIES),
        (ActorDiedError(), ServiceUnavailable, 1),
        (RayTaskError("generate", "", RequestRejected("no")), RequestRejected, 1),
        (RayTaskError("generate", "", RequestRejected("no")).as_instanceof_cause(), RequestRejected, 1),
    ],
    ids=["full", "dead", "failed", "failed, of both kinds"],
)
async def test_rays_errors_become_ours(raised: Exception, expected: type[LLM42Error], tries: int) -> None:
    handle = Handle(raised)
    _, error = await outcome(handle)
    assert isinstance(error, expected)
    assert not isinstance(error, RayTaskError)
    assert [s.cancelled for s in handle.streams] == [True] * tries


async def test_a_stream_that_ends_too_early_is_a_loss() -> None:
    handle = Handle(FIRST)
    found, error = await outcome(handle)
    assert (found, handle.streams[0].cancelled) == ([FIRST], False)
    assert isinstance(error, ServiceUnavailable)
