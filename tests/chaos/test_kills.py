"""Processes of every role are killed with SIGKILL in the middle of streams: no client can tell. In both ways
to a commit: a fast path's candidates verified, and the verifiers decoding by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from ray.exceptions import RayError

from llm42.protocol import Request
from llm42_serve.launch import Service
from llm42_serve.verifiers.names import get_actor, supervisor_name
from tests.chaos.conftest import application, in_mode
from tests.chaos.support import App, Outcome, best_effort, deterministic, kill
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]
STREAMS, NOISE, AT_ONCE = 24, 6, 12
FASTPATH, INGRESS = "ray::ServeReplica:{name}:FastPath", "ray::ServeReplica:{name}:Ingress"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(service: Service, tree: dict[str, Any], request: pytest.FixtureRequest) -> AsyncIterator[App]:
    mode = request.param
    async with application(service, f"chaos-{mode}", in_mode(tree, mode)) as made:
        yield made


async def kill_one_verifier(app: App) -> None:
    kill((await app.verifier_pids())[:1])


async def kill_all_verifiers(app: App) -> None:
    kill(await app.verifier_pids())


async def kill_a_replica(app: App) -> None:
    kill(app.pids(FASTPATH)[:1])


async def kill_the_supervisor(app: App) -> None:
    membership = await get_actor(supervisor_name(app.settings, app.identity)).membership.remote()
    kill([membership.pid])


async def kill_an_ingress(app: App) -> None:
    kill(app.pids(INGRESS)[:1])


async def burst(
    app: App, action: Any, seeded: bool = True
) -> tuple[list[tuple[Request, Outcome]], list[Outcome]]:
    """Streams of both kinds, and `action` once the first of them are under way. seeded: of best effort."""
    gate = asyncio.Semaphore(AT_ONCE)

    begun = [asyncio.Event() for _ in range(STREAMS)]

    async def one(request: Request, began: asyncio.Event) -> Outcome:
        async with gate:
            return await app.stream(request, began)

    requests = [deterministic(i) for i in range(STREAMS)]
    noise = [asyncio.create_task(app.stream(best_effort(i, 400, seeded))) for i in range(NOISE)]
    streams = [asyncio.create_task(one(r, b)) for r, b in zip(requests, begun, strict=True)]
    async with asyncio.timeout(600):  # how soon is the machine's affair, but not whether
        while sum(b.is_set() for b in begun) < AT_ONCE // 2:
            await asyncio.sleep(0.02)
    assert not all(n.done() for n in noise), "the streams are over before anything is killed"
    await action(app)
    outcomes = await asyncio.gather(*streams)
    return list(zip(requests, outcomes, strict=True)), list(await asyncio.gather(*noise))


def wrong(lab: Lab, found: list[tuple[Request, Outcome]], cut_allowed: bool) -> list[str]:
    """Deterministic streams that are not the oracle's, bit for bit, to the end."""
    problems = []
    for request, got in found:
        tokens, logprobs = lab.oracle(request).sent
        # before the head an error status, later an error event: Serve's proxy says what its replica cannot
        if cut_allowed and (got.cut or got.error or got.status >= 500):
            if got.tokens != tokens[: len(got.tokens)]:
                problems.append(f"{request.request_id}: wrong before the cut")
        elif (got.tokens, got.logprobs, got.finish) != (tokens, logprobs, "length"):
            problems.append(f"{request.request_id}: {len(got.tokens)} tokens, {got}"[:300])
    return problems


IN_BOTH_WAYS = (kill_one_verifier, kill_all_verifiers, kill_a_replica)
"""Who holds something of a request that depends on the way."""


@pytest.mark.parametrize(
    ("app", "action"),
    [
        *(("verify", k) for k in (*IN_BOTH_WAYS, kill_the_supervisor, kill_an_ingress)),
        *(("direct", k) for k in IN_BOTH_WAYS),
    ],
    indirect=["app"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_stream_ends_with_the_oracles_tokens(app: App, lab: Lab, action: Any) -> None:
    found, noise = await burst(app, action)
    check(lab, action, found, noise)
    await nothing_is_left(app)


def check(lab: Lab, action: Any, found: list[tuple[Request, Outcome]], noise: list[Outcome]) -> None:
    """What holds of a burst in which that was done, in whatever way its requests were decoded."""
    assert wrong(lab, found, cut_allowed=action is kill_an_ingress) == []
    if action in (kill_one_verifier, kill_all_verifiers, kill_the_supervisor):
        assert all(n.finish == "length" and len(n.tokens) == 400 for n in noise), "best-effort lost something"
    elif action is kill_a_replica:
        assert sum(g.failovers for _, g in found) > 0, "no stream was on the replica that was killed"
        ended = [n for n in noise if n.finish == "length"]
        cut = [n for n in noise if n.error]
        assert len(ended) + len(cut) == len(noise), "a best-effort stream ends whole or with an error event"


async def holds(name: str) -> dict[str, Any] | str:
    """What a verifier has not let go of; nothing is said while it starts anew."""
    try:
        stats = await get_actor(name).stats.remote()
    except (RayError, ValueError) as error:  # ValueError: there is no such actor at this moment
        return str(error)
    of = ("kv_held_blocks", "active", "waiting")
    return {key: stats[key] for key in of if stats[key]} if stats else "it has not started"


async def nothing_is_left(app: App) -> None:
    """No slot, KV block or queue entry is held once the streams are over; every role is there again."""
    await app.until(lambda h: h["deterministic"] and h["running"] == h["waiting"] == h["kv_used"] == 0, 240.0)
    for _ in range(600):
        held = [await holds(name) for name in app.verifier_names()]
        if not any(held):
            break
        await asyncio.sleep(0.2)
    else:
        pytest.fail(f"a verifier holds something: {held}")
    for title in (FASTPATH, INGRESS):
        for _ in range(600):  # Serve starts a replica that died anew within a minute, also on a busy machine
            if len(app.pids(title)) == 2:
                break
            await asyncio.sleep(0.2)
        assert len(app.pids(title)) == 2, title


@pytest.mark.parametrize("app", ["direct"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_comparison_sees_one_wrong_bit(app: App, lab: Lab) -> None:
    """Negative control: what the tests above would say of a last bit, a repeat and a gap."""
    request = deterministic(0)
    good = await app.stream(request)
    assert wrong(lab, [(request, good)], False) == []
    bit = (*good.logprobs[:-1], good.logprobs[-1] * (1 + 2**-52))
    for bad in (
        Outcome(good.tokens, bit, "length"),
        Outcome((*good.tokens[:8], *good.tokens[7:]), good.logprobs, "length"),
        Outcome(good.tokens[1:], good.logprobs[1:], "length"),
        Outcome(good.tokens[:-1], good.logprobs[:-1], None, cut=True),
    ):
        assert wrong(lab, [(request, bad)], False)
