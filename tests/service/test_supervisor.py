"""The supervisor's rules and the audit's, over stand-ins for actors: no Ray process is started."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments import supervisor as module
from deployments.audit import Auditor, same_answer
from deployments.supervisor import Supervisor
from deployments.verifier_actor import VerifierStatus
from deployments.verifier_pool import Member
from llm42.config import Settings
from llm42.metrics import AUDIT_MISMATCHES, AUDITS, NullMetrics
from llm42.protocol import Commit, SamplingParams, TokenLogprob, Window


class Call:
    """`handle.method.remote(...)` as a coroutine."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    async def remote(self, *args: Any, **more: Any) -> Any:
        return self.run(*args, **more)


class Actor:
    """A verifier's handle."""

    numbers = itertools.count()

    def __init__(self, name: str, fingerprint: str = "a") -> None:
        self.name, self.fingerprint, self.dead, self.off = name, fingerprint, False, 0.0
        self.healthy, self.windows, self.queue_s, self.waiting = True, 0, 0.0, 0
        number = str(next(self.numbers))
        self._actor_id = SimpleNamespace(hex=lambda: number)
        self.status, self.manifest = Call(self._status), Call(lambda: {"model": self.fingerprint, "n": 1})
        self.verify, self.self_test = Call(self._verify), Call(lambda: self.healthy)

    def _status(self) -> VerifierStatus:
        if self.dead:
            raise ActorDiedError()
        counters = (self.windows, self.queue_s, self.waiting, 0)
        return VerifierStatus("ready", self.fingerprint, "", 1, *counters)

    def _verify(self, windows: list[Window], cold: bool = False) -> list[Commit]:
        assert cold, "an audit that may use the cache checks less"
        return [answer(w, self.off, self.fingerprint) for w in windows]


def answer(window: Window, off: float = 0.0, fingerprint: str = "a") -> Commit:
    logprobs = (TokenLogprob(5, -1.25 + off),)
    return Commit(window.request_id, len(window.tokens), 0, 5, logprobs, fingerprint)


class Cluster:
    """Named actors, as Ray keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Actor] = {}
        self.created = self.killed = 0
        self.fingerprints: dict[str, str] = {}
        monkeypatch.setattr(module, "get_or_create_verifier", self.get_or_create)
        monkeypatch.setattr(module.ray, "kill", self.kill)
        monkeypatch.setattr(module, "WATCH_S", 0.01)

    def get_or_create(self, name: str, *_: Any) -> Actor:
        if name not in self.actors or self.actors[name].dead:
            self.created += 1
            self.actors[name] = Actor(name, self.fingerprints.get(name, "a"))
        return self.actors[name]

    def kill(self, handle: Any, no_restart: bool) -> None:
        self.killed += 1
        handle.dead = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


async def started(cluster: Cluster, **server: int) -> Supervisor:
    settings = Settings.load({"server": server, "verifier": {"scale_down_s": 0.2, "target_queue_s": 0.1}})
    made = Supervisor(settings.model_dump(mode="json"), "model", lease_s=30.0)
    await until(lambda: len([m for m in made._wanted if m.status]) == made._scaler.wanted)
    return made


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not happen in time")


async def states(made: Supervisor) -> list[str]:
    return [m.status.state if m.status else "gone" for m in (await made.membership()).members]


async def test_verifiers_are_created_adopted_and_replaced(cluster: Cluster) -> None:
    first = await started(cluster, verifiers=2)
    assert await states(first) == ["ready", "ready"]
    assert cluster.created == 2
    first._task.cancel()
    second = await started(cluster, verifiers=2)
    assert cluster.created == 2, "another supervisor adopts what is there"
    before = (await second.membership()).members[0].actor_id
    second._watched[0].handle.dead = True
    await until(lambda: cluster.created == 3)
    await until(lambda: second._watched[0].status is not None)
    assert (await second.membership()).members[0].actor_id != before
    second._task.cancel()


async def test_mixed_fingerprints_are_refused_with_the_fields_that_differ(cluster: Cluster) -> None:
    name = module.verifier_names(
        Settings.load({"verifier": {"scale_down_s": 0.2, "target_queue_s": 0.1}}), "model", 3
    )[1]
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
    monkeypatch.setattr(module, "PIN_S", 0.3)
    made = await started(cluster, verifiers=1)
    name = made._watched[0].name
    cluster.fingerprints[name] = "b"
    made._watched[0].handle.dead = True
    await until(lambda: cluster.created == 2)
    await asyncio.sleep(0.05)
    assert await states(made) == ["mixed"], "streams that hold the old fingerprint may still be running"
    await until(lambda: made._fingerprint == "b")
    assert await states(made) == ["ready"]
    made._task.cancel()


async def test_a_condemned_verifier_is_killed_and_created_anew_after_a_pause(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONDEMNED_PAUSE_S", 0.2)
    made = await started(cluster, verifiers=2)
    info = (await made.membership()).members[0]
    await made.condemn(info.name, "another actor of that name", "late news")
    assert cluster.killed == 0
    await made.condemn(info.name, info.actor_id, "wrong")
    await made.condemn(info.name, info.actor_id, "wrong, says another replica too")
    assert (cluster.killed, (await made.membership()).condemned) == (1, 1)
    await asyncio.sleep(0.05)
    assert cluster.created == 2
    await until(lambda: cluster.created == 3)
    made._task.cancel()


async def test_it_scales_by_queue_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments import scaling

    monkeypatch.setattr(scaling, "SETTLE_S", 0.05)
    made = await started(cluster, verifiers=1, max_verifiers=2)

    async def load() -> None:
        while True:
            for actor in cluster.actors.values():
                actor.windows, actor.queue_s = actor.windows + 1, actor.queue_s + 1.0
            await asyncio.sleep(0.005)

    busy = asyncio.create_task(load())
    await until(lambda: made._scaler.wanted == 2)
    await until(lambda: cluster.created == 2)
    assert len((await made.membership()).members) == 2
    busy.cancel()
    await until(lambda: made._scaler.wanted == 1)
    assert len((await made.membership()).members) == 1, "no longer asked, it ends by its lease"
    assert cluster.killed == 0
    made._task.cancel()


async def test_without_replicas_the_supervisor_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = SimpleNamespace(dead=False)
    context = SimpleNamespace(current_actor=me)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    made = Supervisor(Settings().model_dump(mode="json"), "model", lease_s=0.3)
    for _ in range(20):
        await made.membership()
        await asyncio.sleep(0.03)
    assert not me.dead, "asking renews the lease"
    await until(lambda: me.dead)


# ---- audits


class Counts(NullMetrics):
    """Counters by name."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def inc(self, metric: Any, value: float = 1.0, **_: str) -> None:
        self.of[metric.name] = self.of.get(metric.name, 0) + value


class Pool:
    """The part of a VerifierPool that audits use."""

    def __init__(self, *actors: Actor) -> None:
        self.ready = [Member(a.name, a.name, a, a._status()) for a in actors]
        self.condemned: list[str] = []

    async def condemn(self, member: Member, reason: str) -> None:
        self.condemned.append(member.name)


ONE_ULP = 2.0**-52
WINDOW = Window("r", (1, 2), 2, (7,), SamplingParams())


async def audit(pool: Pool, by: int, answers: list[Any]) -> Counts:
    counts = Counts()
    auditor = Auditor(pool, 1.0, counts)  # type: ignore[arg-type]
    await auditor.audit(pool.ready[by], [WINDOW], answers)
    return counts


@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_the_odd_one_of_three_is_condemned(wrong: int) -> None:
    actors = [Actor(str(i)) for i in range(3)]
    actors[wrong].off = ONE_ULP
    for by in range(3):
        pool = Pool(*actors)
        for _ in range(20):  # whichever second and third are drawn
            counts = await audit(pool, by, [answer(WINDOW, actors[by].off)])
            assert counts.of[AUDITS.name] == 1
        assert set(pool.condemned) <= {str(wrong)}
        if by == wrong:
            assert len(pool.condemned) == 20


async def test_of_two_the_one_that_fails_its_known_answers_is_condemned() -> None:
    good, bad = Actor("good"), Actor("bad")
    bad.off, bad.healthy = ONE_ULP, False
    for by in (0, 1):
        pool = Pool(good, bad)
        counts = await audit(pool, by, [answer(WINDOW, (good, bad)[by].off)])
        assert pool.condemned == ["bad"]
        assert counts.of[AUDIT_MISMATCHES.name] == 1
    bad.healthy = True
    pool = Pool(good, bad)
    await audit(pool, 0, [answer(WINDOW)])
    assert sorted(pool.condemned) == ["bad", "good"], "nobody can tell: neither may go on"


async def test_a_lone_verifier_is_checked_against_itself() -> None:
    pool = Pool(Actor("only"))
    assert AUDIT_MISMATCHES.name not in (await audit(pool, 0, [answer(WINDOW)])).of
    await audit(pool, 0, [answer(WINDOW, ONE_ULP)])
    assert pool.condemned == ["only"]


async def test_equal_answers_condemn_nobody_and_nobody_waits_for_audits() -> None:
    pool, counts = Pool(*[Actor(str(i)) for i in range(3)]), Counts()
    auditor = Auditor(pool, 1.0, counts)  # type: ignore[arg-type]
    for _ in range(50):
        auditor.consider(pool.ready[0], [WINDOW], [answer(WINDOW)])
    assert len(auditor._running) == 2, "no backlog"
    await asyncio.gather(*auditor._running)
    assert (pool.condemned, counts.of) == ([], {AUDITS.name: 2.0})
    none = Auditor(pool, 0.0, counts)  # type: ignore[arg-type]
    none.consider(pool.ready[0], [WINDOW], [answer(WINDOW)])
    assert not none._running


async def test_answers_of_two_fingerprints_are_not_held_against_each_other() -> None:
    """Around a change of the pool's fingerprint, both verifiers are right."""
    old, new = Actor("old"), Actor("new", "b")
    new.off = ONE_ULP
    for by in (0, 1):
        pool = Pool(old, new)
        counts = await audit(pool, by, [answer(WINDOW, (old, new)[by].off, "ab"[by])])
        assert (pool.condemned, counts.of) == ([], {})


async def test_a_third_opinion_of_another_fingerprint_is_none() -> None:
    good, bad, other = Actor("good"), Actor("bad"), Actor("other", "b")
    bad.off = other.off = ONE_ULP
    bad.healthy = False
    pool = Pool(good, bad, other)
    members = dict(zip(("good", "bad", "other"), pool.ready, strict=True))
    auditor = Auditor(pool, 1.0, Counts())  # type: ignore[arg-type]
    answers = (answer(WINDOW), answer(WINDOW, ONE_ULP))
    odd = await auditor._odd_ones(members["good"], members["bad"], WINDOW, *answers)
    assert [m.name for m in odd] == ["bad"], "it would have sided with the bad one"


async def test_the_successor_of_a_wrong_verifier_is_not_condemned_for_it() -> None:
    bad = Actor("bad")
    pool = Pool(bad)
    member = pool.ready[0]

    def replaced_meanwhile(windows: list[Window], cold: bool) -> list[Commit]:
        member.actor_id = "the next actor of that name"
        return [answer(w) for w in windows]

    bad.verify = Call(replaced_meanwhile)
    await audit(pool, 0, [answer(WINDOW, ONE_ULP)])
    assert pool.condemned == []


def test_what_counts_as_the_same_answer() -> None:
    a = answer(WINDOW)
    assert same_answer(a, answer(WINDOW))
    assert not same_answer(a, answer(WINDOW, ONE_ULP)), "bits, not nearly"
