"""A supervisor that is dead, silent or never came to be, without Ray processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RuntimeEnvSetupError

from llm42.config import LEASE_MARGIN_S, Settings
from llm42_serve.replica import supervisor_link, verifier_pool
from llm42_serve.replica.supervisor_link import SupervisorLink
from llm42_serve.verifiers.membership import Membership
from tests.service.pools import Published, pool_of, raises, window
from tests.service.stand_ins import answer


async def test_a_supervisor_that_died_is_created_anew_and_its_verifiers_stay_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(("ready", "a"))
    created: list[int] = []

    def create(*_: Any) -> Any:
        created.append(1)
        return Published(pool)

    monkeypatch.setattr(supervisor_link, "get_or_create_supervisor", create)
    pool._supervisor.handle = gone = Published(pool)
    monkeypatch.setattr(gone, "remote", raises(ActorDiedError()))
    await pool.refresh()
    assert pool.ready, "what was known stays in use"
    assert await pool.verify([window(1)]) == [answer(window(1))]
    await pool.refresh()
    assert created == [1]
    assert pool.ready


class Silent:
    """A supervisor's handle that does not answer while `hung`."""

    def __init__(self) -> None:
        self.membership, self.hung = self, True

    async def remote(self, node: str) -> Membership:
        if self.hung:
            await asyncio.Event().wait()
        return Membership(fingerprint="a")


@pytest.mark.parametrize("known", [True, False])
async def test_one_that_hangs_is_killed_and_created_anew(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """get_if_exists gives the one that hangs, until it has been killed; a starting one has longer."""
    monkeypatch.setattr(supervisor_link, "TIMEOUT_S", 0.01)
    actors, killed = [Silent()], list[Any]()
    monkeypatch.setattr(supervisor_link, "get_or_create_supervisor", lambda *_: actors[-1])

    def kill(handle: Any, no_restart: bool) -> None:
        killed.append((handle, no_restart))
        actors.append(Silent())

    monkeypatch.setattr("ray.kill", kill)
    none, patient = (
        ("supervisor_start_s", "supervisor_s") if known else ("supervisor_s", "supervisor_start_s")
    )
    hung, link = actors[0], SupervisorLink(Settings.load({"watch": {none: 1e-9}}), "model")
    hung.hung = not known
    assert (await link.membership() is not None) == known
    hung.hung = True
    for _ in range(5):
        assert await link.membership() is None
    assert killed == [], "silence is allowed for so long"
    link._settings = Settings.load({"watch": {patient: 1e-9}})
    assert await link.membership() is None
    assert killed == [(hung, True)]
    actors[-1].hung = False
    assert await link.membership() == Membership(fingerprint="a")


async def test_one_that_never_came_to_be_is_created_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SupervisorLink(Settings(), "model")
    fresh = Silent()
    fresh.hung = False
    monkeypatch.setattr(supervisor_link, "get_or_create_supervisor", lambda *_: fresh)
    link.handle = never = Silent()
    monkeypatch.setattr(never, "remote", raises(RuntimeEnvSetupError("no such image")))
    assert await link.membership() is None
    assert await link.membership() == Membership(fingerprint="a")


def test_a_hung_supervisor_is_replaced_before_its_verifiers_end_themselves() -> None:
    slack = supervisor_link.TIMEOUT_S + verifier_pool.WATCH_S
    assert slack < LEASE_MARGIN_S - 10, "the rest is for its successor's start"
    with pytest.raises(ValueError, match=r"watch\.lease_s"):
        Settings.load({"watch": {"supervisor_s": 12, "lease_s": 12 + LEASE_MARGIN_S - 1}})
    assert Settings.load({"watch": {"supervisor_s": 1, "lease_s": 1 + LEASE_MARGIN_S}}).watch.lease_s == 15
