"""How many generators each piece of an answer passes through, from the exchange with the verifier to the
bytes of the response: each resumes a frame for every piece of every stream.

The real ingress, replica, pool, exchange and verifier; only Ray between them is a stand-in.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import httpx
import pytest

from llm42.config import Settings
from llm42.protocol import Delta, Request
from llm42_serve.ingress.ingress import RayBackend
from tests.service.test_canonical_replica import BODY, Layout, layout_of
from tests.support import Lab, canonical

MOST = 7
ASKED = {"stream": True, "ignore_eos": True, "seed": 7}


@pytest.fixture(autouse=True)
def each_piece_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a token without text waits for the next one's, and whether it has one depends on the token."""
    monkeypatch.setattr("llm42.api.render.MAX_WAITING", 1)


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """How often each asynchronous generator or iterator has passed something on, meanwhile."""
    passed: Counter[CodeType] = Counter()

    def look(frame: FrameType, event: str, value: Any) -> None:
        by_iterator = frame.f_code.co_name == "__anext__" and isinstance(value, Delta | tuple)
        if event == "return" and (by_iterator or type(value).__name__ == "async_generator_wrapped_value"):
            passed[frame.f_code] += 1

    sys.setprofile(look)
    try:
        yield passed
    finally:
        sys.setprofile(None)


async def through(world: Layout, **fields: Any) -> list[str]:
    """The generators that pass each of an answer's pieces on: those that pass more on when it has many of
    them than when it has one. How many there are depends on the machine; that there are many does not."""
    async with world.client() as http:
        one, many = [await passes(http, fields | {"max_tokens": tokens}) for tokens in (1, 60)]
    return [code.co_qualname for code, times in many.items() if times > one[code]]


async def passes(http: httpx.AsyncClient, fields: dict[str, Any]) -> Counter[CodeType]:
    """Of one request."""
    with counted() as passed:
        reply = await http.post("/v1/completions", json=BODY | ASKED | fields)
    assert reply.status_code == 200, reply.text
    return passed


def with_session(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"session": settings.session.model_copy(update=changes)})


def layouts(lab: Lab) -> dict[str, Settings]:
    """In each of them an answer comes in many pieces, however slow the machine is: none is longer than the
    credit and one token, or than the window and one. What `coalesce` joins are two at least."""
    quick = {"credit": 4, "commit_interval_s": 1e-4}
    alone = canonical(lab.settings, **quick)
    server = alone.server.model_copy(update={"stream_interval_s": 1e-3})
    return {
        "direct": with_session(lab.settings, mode="direct", **quick),
        "verify": with_session(lab.settings, max_window=7, start_window=7),
        "canonical": alone.model_copy(update={"server": server}),
    }


REPLICA = {"Generator._verified", "FastPath.generate"}
INGRESS = {"Failover.run", "Observed.run", "interleave", "events_of"}
"""docs/structure.md names them, in their order."""
SCORED = {"n": 2, "echo": True, "logprobs": 1}
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("direct", {"deterministic": True}, set()),
    ("direct", {"deterministic": True, **SCORED}, {"_Scored.other"}),
    ("verify", {"deterministic": True}, set()),
    ("canonical", {"deterministic": True}, set()),
    ("canonical", {"deterministic": False}, {"coalesce"}),
]


@pytest.mark.parametrize(("kind", "fields", "more"), CASES)
async def test_few_generators(lab: Lab, kind: str, fields: dict[str, Any], more: set[str]) -> None:
    found = await through(layout_of(lab, layouts(lab)[kind]), **fields)
    assert set(found) == REPLICA | INGRESS | more
    assert len(found) <= MOST


async def test_control_those_that_are_put_in_are_counted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator and an iterator more in the ingress, which do nothing but pass on."""
    plain = await through(layout_of(lab, layouts(lab)["direct"]), deterministic=True)
    generate = RayBackend.generate

    async def longer(self: RayBackend, request: Request) -> AsyncIterator[Delta]:
        async for delta in Passing(generate(self, request)):
            yield delta

    monkeypatch.setattr(RayBackend, "generate", longer)
    found = await through(layout_of(lab, layouts(lab)["direct"]), deterministic=True)
    more = set(found) - set(plain)
    assert {name.rpartition(".")[2] for name in more} == {"longer", "__anext__"}


class Passing:
    """An iterator that passes on."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __aiter__(self) -> Passing:
        return self

    async def __anext__(self) -> Delta:
        found: Delta = await anext(self._source)
        return found
