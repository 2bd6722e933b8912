"""Verifiers on nodes that Ray drains, and which one is given up, over stand-ins for actors."""

from __future__ import annotations

import asyncio
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings, WatchSettings
from llm42_serve.verifiers import leaving, scaling
from llm42_serve.verifiers import supervisor as module
from llm42_serve.verifiers.actor import State, VerifierStatus
from llm42_serve.verifiers.leaving import DrainWatch
from llm42_serve.verifiers.roster import HANDOVER_S, Roster
from llm42_serve.verifiers.supervisor import Supervisor
from llm42_serve.verifiers.watch import Watched
from tests.service.stand_ins import QUICK, Actor, Cluster, started, states
from tests.support import until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(monkeypatch)
    found.nodes = map("n{}".format, itertools.count())
    return found


async def made(cluster: Cluster, check_s: float = 0.01, **server: int) -> Supervisor:
    """A supervisor that looks for drained nodes so often."""
    tree = {"server": server, "watch": {"drain_check_s": check_s}, **QUICK}
    found = Supervisor(Settings.load(tree).model_dump(mode="json"), "model", lease_s=30.0)
    await until(lambda: all(w.status for w in found._wanted) and bool(found._wanted[0].node))
    return found


def actors(found: Supervisor, cluster: Cluster) -> list[Actor]:
    return [cluster.actors[w.name] for w in found._wanted]


async def test_a_successor_is_ready_before_the_verifier_on_a_drained_node_ends(cluster: Cluster) -> None:
    found = await made(cluster, verifiers=1)
    (old,) = actors(found, cluster)
    cluster.first_state = "starting"
    cluster.draining = {"n0": 600.0}
    await until(lambda: cluster.created == 2)
    await asyncio.sleep(0.1)
    assert await states(found) == ["ready", "starting"], "replicas go on with the old one"
    assert not old.dead
    new = cluster.actors[found._wanted[1].name]
    new.state = "ready"
    await until(lambda: old.dead)
    assert [w.name for w in found._wanted] == [new.name]
    assert cluster.created == 2
    found._task.cancel()


@pytest.mark.parametrize("check_s", [0.01, 0.0], ids=["", "control: nobody looks"])
async def test_it_finishes_what_it_has_first(cluster: Cluster, check_s: float) -> None:
    found = await made(cluster, check_s, verifiers=2)
    old, other = actors(found, cluster)
    old.waiting = 3
    cluster.draining = {"n0": 600.0}
    if not check_s:
        asked = old.asked
        await until(lambda: old.asked > asked + 20)
        assert (cluster.created, found._wanted[0].name) == (2, old.name)
    else:
        await until(lambda: old.name not in [w.name for w in found._wanted])
        asked = old.asked
        await until(lambda: old.asked > asked + 5)
        assert not old.dead
        old.waiting = 0
        await until(lambda: old.dead)
        assert cluster.created == 3
    assert not other.dead
    found._task.cancel()


async def test_it_does_not_finish_what_takes_too_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest goes on elsewhere, as after a death (tests/chaos)."""
    monkeypatch.setattr(leaving, "LEAVE_S", 0.1)
    found = await made(cluster, verifiers=2)
    old = actors(found, cluster)[0]
    old.work = {"direct": 3}
    cluster.draining = {"n0": 600.0}
    await until(lambda: old.dead)
    found._task.cancel()


async def test_a_successor_on_a_drained_node_gets_one_too(cluster: Cluster) -> None:
    found = await made(cluster, verifiers=1)
    cluster.draining = {f"n{i}": 600.0 for i in range(3)}
    await until(lambda: [w.node for w in found._wanted] == ["n3"])
    await until(lambda: sum(not a.dead for a in cluster.actors.values()) == 1)
    assert len(found._watched) <= 4
    found._task.cancel()


async def test_a_new_supervisor_goes_on_with_what_its_predecessor_has_begun(cluster: Cluster) -> None:
    first = await made(cluster, verifiers=1)
    (old,) = actors(first, cluster)
    cluster.first_state, cluster.draining = "starting", {"n0": 600.0}
    await until(lambda: cluster.created == 2)
    first._task.cancel()
    second = await made(cluster, verifiers=1)
    assert await states(second) == ["ready", "starting"]
    cluster.actors[second._wanted[1].name].state = "ready"
    await until(lambda: old.dead)
    assert (cluster.created, await states(second)) == (2, ["ready"])
    second._task.cancel()


async def test_one_that_was_given_up_ends_with_its_work_on_a_drained_node(cluster: Cluster) -> None:
    found = await made(cluster, verifiers=1, max_verifiers=2)
    found._scaler.wanted = 2
    await until(lambda: len(found._wanted) == 2 and bool(found._wanted[1].node))
    given_up = actors(found, cluster)[1]
    found._scaler.wanted = 1
    await until(lambda: len(found._wanted) == 1)
    await asyncio.sleep(0.05)
    assert not given_up.dead, "the control: elsewhere it ends by its lease"
    cluster.draining = {given_up.node: 600.0}
    await until(lambda: given_up.dead)
    assert cluster.created == 2
    found._task.cancel()


async def test_the_supervisor_leaves_its_own_node_when_no_verifier_is_left_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Actor("me")
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(current_actor=me))
    monkeypatch.setattr(module, "node_id", lambda: "n0")
    found = await made(cluster, verifiers=1)
    (old,) = actors(found, cluster)
    cluster.first_state, cluster.draining = "starting", {"n0": 600.0}
    await until(lambda: cluster.created == 2)
    await asyncio.sleep(0.1)
    assert not me.dead
    cluster.actors[found._wanted[1].name].state = "ready"
    await until(lambda: me.dead)
    assert old.dead


async def test_another_ray_does_not_stop_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> dict[str, float]:
        raise AttributeError("get_draining_nodes")

    monkeypatch.setattr(leaving, "draining_nodes", absent)
    await asyncio.wait_for(DrainWatch(0.01).run(), 60)
    found = await made(cluster, verifiers=1)
    assert await states(found) == ["ready"]
    found._task.cancel()


async def test_a_control_store_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"n0": 9.0}, OSError("away"), {"n1": 9.0}])

    def asked() -> dict[str, float]:
        found = next(answers, {"n1": 9.0})
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(leaving, "draining_nodes", asked)
    monkeypatch.setattr(leaving, "RETRY_S", 0.01)
    watch = DrainWatch(0.01)
    task = asyncio.create_task(watch.run())
    await until(lambda: "n1" in watch.nodes)
    task.cancel()


def roster(*nodes: str, state: State = "ready", count: int | None = None) -> Roster:
    """Of verifiers that have said that they are on these nodes."""
    found = Roster(lambda n: Watched(f"v-{n}", WatchSettings()), count or len(nodes), len(nodes))
    for watched, node in zip(found.watched, nodes, strict=True):
        watched.handle, watched.tried = object(), watched.wanted
        watched.record_answer(VerifierStatus(state, "a", node=node), 0.0)
    return found


def numbers(found: Roster) -> list[int]:
    return [found.watched.index(w) for w in found.wanted]


def test_of_too_many_one_without_a_replica_on_its_node_goes() -> None:
    for hosts, kept in (
        ({"a", "b", "c"}, [0, 1]),
        ({"b", "c"}, [1, 2]),
        ({"a", "c"}, [0, 2]),
        (set(), [0, 1]),
    ):
        found = roster("a", "b", "c")
        found.arrange(0.0, 2, {}, hosts)
        assert numbers(found) == kept


def test_one_that_is_of_no_use_goes_first() -> None:
    found = roster("a", "b", "c")
    found.watched[0].record_answer(VerifierStatus("failed", node="a"), 0.0)
    found.arrange(0.0, 2, {}, {"a"})
    assert numbers(found) == [1, 2]


def test_none_goes_before_it_is_known_where_they_are() -> None:
    found = roster("a", "b", "c")
    found.watched[1].tried = False
    found.arrange(0.0, 1, {}, set())
    assert numbers(found) == [0, 1, 2]


@pytest.mark.parametrize(("left_s", "waits_s"), [(math.inf, HANDOVER_S), (600.0, HANDOVER_S), (30.0, 15.0)])
def test_others_must_do_after_a_while(left_s: float, waits_s: float) -> None:
    found = roster("a", "b")
    leaving_ = found.watched[0]
    assert found.arrange(100.0, 2, {"a": left_s}, set()) == [leaving_]
    assert found.arrange(101.0, 2, {"a": left_s}, set()) == []
    assert numbers(found) == [0, 1, 2]
    assert not found.may_leave(100.0 + waits_s - 1, leaving_, ready=1)
    assert found.may_leave(100.0 + waits_s, leaving_, ready=1)
    assert not found.may_leave(100.0 + waits_s, leaving_, ready=0), "nobody else can answer"
    assert found.may_leave(100.0, leaving_, ready=2)
    assert not found.may_leave(100.0 + waits_s, found.watched[1], ready=2), "its node stays"


def test_one_that_was_started_again_elsewhere_stays() -> None:
    found = roster("a", "b")
    found.arrange(0.0, 2, {"a": 60.0}, set())
    found.watched[0].record_answer(VerifierStatus("ready", "a", node="c"), 0.0)
    found.watched[2].tried = True
    found.arrange(1.0, 2, {"a": 60.0}, {"b", "c"})
    assert numbers(found) == [0, 1], "and its successor, which has not come to be, is given up"


async def drained_once(cluster: Cluster) -> Actor:
    """A predecessor has had its verifier move from a drained node: number 1 is left, and ready. Others take
    their time from now on."""
    first = await made(cluster, verifiers=1)
    (old,) = actors(first, cluster)
    cluster.draining = {"n0": 600.0}
    await until(lambda: old.dead)
    (left,) = actors(first, cluster)
    first._task.cancel()
    cluster.draining, cluster.first_state = {}, "starting"
    return left


async def test_a_new_supervisor_keeps_the_verifier_that_there_is(cluster: Cluster) -> None:
    """Whatever its number is: no other one is made for a number that was given up."""
    left = await drained_once(cluster)
    second = await made(cluster, verifiers=1)
    asked = left.asked
    await until(lambda: left.asked > asked + 20)
    assert (await states(second), cluster.created) == (["ready"], 2)
    second._task.cancel()


async def test_control_it_would_make_the_first_number_anew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adopt(self: Roster, numbers: set[int]) -> None:
        for number in numbers:
            self.watched[number].wanted = True

    monkeypatch.setattr(Roster, "adopt", adopt)
    monkeypatch.setattr(Roster, "__init__", roster_with_spares)
    await drained_once(cluster)
    second = await made(cluster, verifiers=1)
    await until(lambda: cluster.created == 3)
    second._task.cancel()


def roster_with_spares(self: Roster, make: Any, count: int, capacity: int) -> None:
    self._make, self.watched = make, [make(number) for number in range(capacity + 1)]
    for watched in self.watched[:count]:
        watched.wanted = True


def test_one_that_is_ready_never_goes_for_one_that_is_not() -> None:
    found = roster("a", "b")
    found.watched[0].record_answer(VerifierStatus("starting", node="a"), 0.0)
    found.arrange(0.0, 1, {}, {"a", "b"})
    assert numbers(found) == [1]


def test_a_node_that_dies_while_it_is_drained_does_not_cost_the_successor() -> None:
    """The last that was heard of its verifier is that it is ready; the successor is not yet."""
    found = roster("a")
    assert len(found.arrange(0.0, 1, {"a": 100.0}, set())) == 1
    successor = found.wanted[1]
    successor.adopt(object())
    successor.tried = True
    successor.record_answer(VerifierStatus("starting", node="b"), 0.0)
    found.arrange(20.0, 1, {}, set())
    assert successor in found.wanted


@pytest.mark.parametrize("pending", [True, False])
async def test_one_that_never_found_a_place_ends_when_it_is_given_up(cluster: Cluster, pending: bool) -> None:
    """The control: one that has a place ends by its lease, after what it has."""
    found = await made(cluster, verifiers=1)
    found._scaler.wanted = 2
    await until(lambda: cluster.created == 2)
    new = cluster.actors[found._wanted[1].name]
    new.answering.clear()
    found._wanted[1].status, new.pending = None, pending
    found._wanted[1].tried, found._scaler.wanted = True, 1
    await until(lambda: len(found._wanted) == 1)
    await until(lambda: found._watched[1].handle is None)
    assert new.dead == pending
    found._task.cancel()


async def test_as_many_are_adopted_as_the_predecessor_wanted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "SETTLE_S", math.inf)
    first = await started(cluster, verifiers=1, max_verifiers=3)
    first._scaler.wanted = 2
    await until(lambda: cluster.created == 2)
    first._task.cancel()
    second = await started(cluster, verifiers=1, max_verifiers=3)
    assert (second._scaler.wanted, await states(second)) == (2, ["ready", "ready"])
    second._task.cancel()


async def test_replicas_say_where_they_are(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is given up is on the node without one. The control: both have one."""
    for hosts, kept in ((("n1",), 1), (("n0", "n1"), 0)):
        cluster.actors.clear()
        cluster.nodes = map("n{}".format, itertools.count())
        found = await made(cluster, verifiers=2)
        for host in hosts:
            await found.membership(host)
        want: Any = [found._wanted[kept].name]
        found._scaler.wanted = 1
        await until(lambda found=found: len(found._wanted) == 1)  # type: ignore[misc]
        assert [w.name for w in found._wanted] == want
        found._task.cancel()
