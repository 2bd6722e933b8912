"""Processes are stopped with SIGSTOP in the middle of streams: they keep their names and connections, but do
not answer any more. They are replaced, and no client can tell."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ray.exceptions import RayError

from llm42_serve.launch import Service
from llm42_serve.verifiers.membership import Membership
from llm42_serve.verifiers.names import get_actor, supervisor_name
from tests.chaos.conftest import application, in_mode, with_server
from tests.chaos.support import App, deterministic
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]
STREAMS = 12
START_S = 120.0
"""For a new process on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(service: Service, tree: dict[str, Any], request: pytest.FixtureRequest) -> AsyncIterator[App]:
    mode, watch = request.param, {"verifier_s": 6.0, "supervisor_s": 4.0}
    quick = tree | {"session": tree["session"] | {"verify_timeout_s": 5.0}, "watch": watch}
    quick = with_server(in_mode(quick, mode), fastpath_replicas=1, ingress_replicas=1)
    async with application(service, f"hung-{mode}", quick) as made:
        yield made


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing any more; whatever becomes of the test, it is not left like that."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


async def published(app: App) -> Membership | None:
    """What the present supervisor says; None when there is none or it does not answer."""
    try:
        call = get_actor(supervisor_name(app.settings, app.identity)).membership.remote()
        return await asyncio.wait_for(call, 3.0)
    except (RayError, TimeoutError, ValueError):
        return None


def ready_pids(membership: Membership | None) -> set[int]:
    """Processes of verifiers that are published as ready."""
    members = membership.members if membership else ()
    return {m.status.pid for m in members if m.status and m.status.state == "ready"}


async def check_streams(app: App, lab: Lab) -> None:
    """Every stream ends with the oracle's tokens, bit for bit."""
    requests = [deterministic(i) for i in range(STREAMS)]
    got = await asyncio.gather(*(app.stream(r) for r in requests))
    assert [(o.tokens, o.logprobs, o.error) for o in got] == [(*lab.oracle(r).sent, "") for r in requests]


@pytest.mark.parametrize("app", ["direct", "verify"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_verifier_that_hangs_is_replaced(app: App, lab: Lab) -> None:
    hung, healthy = await app.verifier_pids()
    for _ in range(int(START_S)):  # one that has not been published as ready yet may take longer to start
        if ready_pids(await published(app)) == {hung, healthy}:
            break
        await asyncio.sleep(0.5)
    streams = asyncio.create_task(check_streams(app, lab))
    await asyncio.sleep(0.5)
    with stopped(hung):
        await streams
        for _ in range(int(app.settings.watch.verifier_s + START_S)):
            if len(found := ready_pids(await published(app))) == 2 and hung not in found:
                break
            await asyncio.sleep(1.0)
        assert len(found) == 2, "its successor is ready"
        assert healthy in found, "nobody else was touched"
        assert hung not in found
    await check_streams(app, lab)


@pytest.mark.parametrize("app", ["verify"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_supervisor_that_hangs_is_replaced_before_its_verifiers_end(app: App, lab: Lab) -> None:
    before = await published(app)
    assert before is not None
    verifiers = ready_pids(before)
    streams = asyncio.create_task(check_streams(app, lab))
    with stopped(before.pid):
        await streams
        for _ in range(int(app.settings.watch.supervisor_s + START_S)):
            after = await published(app)
            if after is not None and after.pid != before.pid and len(ready_pids(after)) == len(verifiers):
                break  # what it has adopted has answered it
            await asyncio.sleep(1.0)
        assert after is not None
        assert after.pid != before.pid
        assert ready_pids(after) == verifiers, "adopted, not started anew"
    await check_streams(app, lab)
