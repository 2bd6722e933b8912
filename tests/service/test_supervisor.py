"""The supervisor's rules, over stand-ins for actors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from llm42.config import Settings
from llm42.telemetry import metrics as m
from llm42_serve.verifiers import membership as membership_module
from llm42_serve.verifiers import scaling
from llm42_serve.verifiers import supervisor as module
from llm42_serve.verifiers.actor import State
from llm42_serve.verifiers.names import verifier_names
from llm42_serve.verifiers.supervisor import Supervisor
from tests.service.stand_ins import QUICK, Actor, Cluster, started, states
from tests.support import Clock, until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


async def test_verifiers_are_created_adopted_and_replaced(cluster: Cluster) -> None:
    first = await started(cluster, verifiers=2)
    assert await states(first) == ["ready", "ready"]
    assert cluster.created == 2
    first._task.cancel()
    second = await started(cluster, verifiers=2)
    assert cluster.created == 2, "another supervisor adopts what is there"
    before = (await second.membership()).members[0].actor_id
    counted = second._watched[0].handle
    counted.windows = 100
    await until(lambda: second._watched[0].seen.get("windows") == 100)
    counted.dead = True
    await until(lambda: cluster.created == 3)
    await until(lambda: second._watched[0].status is not None)
    assert (await second.membership()).members[0].actor_id != before
    assert second._watched[0].seen.get("windows", 0) == 0, "the new one has not answered fewer than none"
    second._task.cancel()


async def test_a_process_that_ray_replaces_is_a_death_too(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor stays, so no call says that it has died. The control: a call that fails is none."""
    counted: list[Any] = []
    made = await started(cluster, verifiers=1)
    monkeypatch.setattr(made._metrics, "inc", lambda metric, *_, **__: counted.append(metric))
    (actor,) = cluster.actors.values()
    actor.broken = ActorUnavailableError("it is away", b"0" * 16)
    await until(lambda: made._watched[0].status is None)
    actor.broken = None
    await until(lambda: made._watched[0].status is not None)
    assert counted == []
    actor.pid = 2
    await until(lambda: made._watched[0].pid == 2)
    await looked(actor)
    assert counted == [m.VERIFIER_DEATHS], "once"
    made._task.cancel()


async def test_mixed_fingerprints_are_refused_with_the_fields_that_differ(cluster: Cluster) -> None:
    name = verifier_names(Settings.load(QUICK), "model", 3)[1]
    cluster.fingerprints[name] = "b"
    made = await started(cluster, verifiers=3)
    await until(lambda: bool(made._watched[1].mixed))
    membership = await made.membership()
    assert membership.fingerprint == "a"
    assert await states(made) == ["ready", "mixed", "ready"]
    detail = membership.members[1].status
    assert detail is not None
    assert "model differ" in detail.detail
    made._task.cancel()


async def test_the_pool_changes_its_fingerprint_only_after_the_old_one_is_gone_for_good(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(membership_module, "PIN_S", 10.0)
    made = await started(cluster, verifiers=1)
    name = made._watched[0].name
    cluster.fingerprints[name] = "b"
    made._watched[0].handle.dead = True
    await until(lambda: made._pool.unpinned_since is not None)
    clock.now += 9.0
    await asyncio.sleep(0.05)
    assert await states(made) == ["mixed"], "streams that hold the old fingerprint may still be running"
    clock.now += 2.0
    await until(lambda: made._pool.fingerprint == "b")
    assert await states(made) == ["ready"]
    made._task.cancel()


async def test_a_condemned_verifier_is_killed_and_created_anew_after_a_pause(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    made = await started(cluster, verifiers=2)
    info = (await made.membership()).members[0]
    await made.condemn(info.name, "another actor of that name", "late news")
    assert cluster.killed == 0
    await made.condemn(info.name, info.actor_id, "wrong")
    await made.condemn(info.name, info.actor_id, "wrong, says another replica too")
    assert (cluster.killed, (await made.membership()).condemned) == (1, 1)
    clock.now += 0.9 * module.CONDEMNED_PAUSE_S
    await asyncio.sleep(0.05)
    assert cluster.created == 2
    clock.now += 0.2 * module.CONDEMNED_PAUSE_S
    await until(lambda: cluster.created == 3)
    made._task.cancel()


async def test_a_verifier_that_was_given_up_is_condemned_all_the_same(cluster: Cluster) -> None:
    """It may work for minutes still, for those whose requests it has."""
    made = await started(cluster, verifiers=1, max_verifiers=2)
    kept, given_up = made._watched
    made._scaler.wanted = 2
    await until(lambda: given_up.name in cluster.actors)
    made._scaler.wanted = 1
    await until(lambda: given_up.handle is None)
    actor = cluster.actors[given_up.name]
    assert await made.condemn(given_up.name, "another actor of that name", "late news")
    assert await made.condemn(kept.name, actor._actor_id.hex(), "another name")
    assert (cluster.killed, actor.dead) == (0, False)
    assert await made.condemn(given_up.name, actor._actor_id.hex(), "wrong")
    assert await made.condemn(given_up.name, actor._actor_id.hex(), "wrong, says another replica too")
    assert (cluster.killed, actor.dead, (await made.membership()).condemned) == (1, True, 1)
    made._task.cancel()


async def test_it_scales_by_queue_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(scaling, "SETTLE_S", 0.05)
    made = await started(cluster, verifiers=1, max_verifiers=2)

    async def load() -> None:
        while True:
            for actor in cluster.actors.values():
                actor.windows, actor.queue_s = actor.windows + 1, actor.queue_s + 1.0
            await asyncio.sleep(0.005)

    busy = asyncio.create_task(load())
    await until(lambda: made._scaler.wanted == 2)
    await until(lambda: all(w.status for w in made._watched))
    assert cluster.created == len((await made.membership()).members) == 2
    busy.cancel()
    await until(lambda: all(w.seen.get("queue_s") == w.handle.queue_s for w in made._watched))
    await until(lambda: made._scaler._quiet_since is not None)
    clock.now += 1.0
    await until(lambda: made._scaler.wanted == 1)
    assert len((await made.membership()).members) == 1, "no longer asked, it ends by its lease"
    assert cluster.killed == 0
    made._task.cancel()


WORK: dict[str, Any] = {"places": 100, "kv_tokens": 1000, "direct": 50, "kv_used": 500}


async def looked(*actors: Actor, seconds: float = 0.0) -> None:
    """So long, and until each has been asked ten times more."""
    asked = [a.asked for a in actors]
    await asyncio.sleep(seconds)
    await until(lambda: all(a.asked >= n + 10 for a, n in zip(actors, asked, strict=True)))


@pytest.mark.parametrize("more", [{"direct": 95}, {"kv_used": 950}, {"step_s": 9.0}])
async def test_it_scales_by_the_work_of_long_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """No window is answered and none waits. The control: with less work there is one verifier."""
    monkeypatch.setattr(scaling, "SETTLE_S", 0.05)
    made = await started(cluster, verifiers=1, max_verifiers=3)
    (first,) = cluster.actors.values()
    first.work = WORK
    await looked(first, seconds=0.1)
    assert (made._scaler.wanted, cluster.created) == (1, 1)
    first.work = WORK | more
    await until(lambda: cluster.created == 2)
    second = cluster.actors[made._watched[1].name]
    await looked(first, second, seconds=0.5)  # longer than scale_down_s
    assert (made._scaler.wanted, cluster.created) == (2, 2), "one alone has too much, both have not"
    first.work = WORK | {"direct": 5, "kv_used": 50}
    await until(lambda: made._scaler.wanted == 1)
    made._task.cancel()


async def test_of_a_wanted_verifier_that_was_not_looked_at_nobody_says_that_it_is_gone(
    cluster: Cluster,
) -> None:
    made = await started(cluster, verifiers=1)
    made._task.cancel()
    (watched,), (actor,) = made._watched, cluster.actors.values()
    watched.handle = None  # as in a supervisor that was just created
    assert not await made.condemn(watched.name, actor._actor_id.hex(), "wrong")
    watched.handle = actor
    assert await made.condemn(watched.name, actor._actor_id.hex(), "wrong")
    assert actor.dead


@pytest.mark.parametrize("state", ["failed", "starting"])
async def test_one_that_has_failed_is_not_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    """It may never start. The control: one that is starting is."""
    monkeypatch.setattr(scaling, "SETTLE_S", 0.05)
    made = await started(cluster, verifiers=1, max_verifiers=2)
    made._scaler.wanted = 2
    await until(lambda: len(cluster.actors) == 2)
    first, second = (cluster.actors[w.name] for w in made._watched)
    second.state = state
    first.work = WORK | {"direct": 1, "kv_used": 50}
    if state == "failed":
        await until(lambda: made._scaler.wanted == 1)
    else:
        await looked(first, second, seconds=0.5)  # longer than scale_down_s
        assert made._scaler.wanted == 2
    made._task.cancel()


@pytest.mark.parametrize("fingerprint", ["b", "a"], ids=["refused", "control"])
async def test_a_refused_verifier_is_no_capacity(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fingerprint: str
) -> None:
    """It has nothing to do because nobody may ask it."""
    monkeypatch.setattr(scaling, "SETTLE_S", 0.05)
    names = verifier_names(Settings.load(QUICK), "model", 3)
    cluster.fingerprints[names[1]] = fingerprint
    made = await started(cluster, verifiers=2, max_verifiers=3)
    first, second = (cluster.actors[name] for name in names[:2])
    first.work, second.work = WORK | {"direct": 95}, {"places": 100, "kv_tokens": 1000}
    await looked(first, second, seconds=0.1)
    if fingerprint == "b":
        await until(lambda: made._scaler.wanted == 3)
        await until(lambda: cluster.created == 3)
    assert cluster.created == (3 if fingerprint == "b" else 2)
    made._task.cancel()


async def test_without_replicas_the_supervisor_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Actor("me")
    context = SimpleNamespace(current_actor=me)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    made = Supervisor(Settings().model_dump(mode="json"), "model", lease_s=20.0)
    for _ in range(20):
        await made.membership()
        clock.now += 15.0
        await asyncio.sleep(0.03)
    assert not me.dead, "asking renews the lease"
    clock.now += 10.0
    await until(lambda: me.dead)
