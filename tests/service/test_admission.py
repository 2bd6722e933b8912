"""Admission by class, the scaling of verifiers, the ranking of replicas: the rules, without Ray processes."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import Overloaded
from llm42_serve.ingress.router import ranks
from llm42_serve.placement import SPILL, preferred
from llm42_serve.replica.admission import RAISE_AFTER_S, Admission
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.load import Limits, Load, StepTime
from llm42_serve.verifiers.scaling import LOOKS_UP, SETTLE_S, Scaler

LIMITS = Limits(share=0.9, step_s=1.0, queue_s=0.5)
CROWDED = {
    "places": Load(places=0.95, busy=True),
    "kv": Load(kv=0.95, busy=True),
    "step time": Load(step_s=1.5, busy=True),
}
LATE, IDLE = Load(queue_s=2.0, busy=True), Load()


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(places: int = 4, queued: int = 8, share: float = 0.5, clock: Any = None) -> Admission:
    return Admission(places, queued, share, LIMITS, clock or Clock())


async def hold(made: Admission, deterministic: bool, log: list[str], name: str, until: asyncio.Event) -> None:
    async with made.place(deterministic):
        log.append(name)
        await until.wait()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_neither_class_waits_behind_the_other() -> None:
    made, log, gates = admission(places=2), list[str](), [asyncio.Event() for _ in range(12)]
    tasks = [asyncio.create_task(hold(made, False, log, f"b{i}", gates[i])) for i in range(6)]
    await settled()
    tasks += [asyncio.create_task(hold(made, True, log, f"d{i}", gates[6 + i])) for i in range(6)]
    await settled()
    assert log == ["b0", "b1"]
    gates[0].set()
    await settled()
    assert log[2:] == ["d0"], "the first free place goes to the class that has none"
    gates[1].set()
    await settled()
    assert log[3:] == ["b2"]
    for gate in gates:
        gate.set()
    await asyncio.gather(*tasks)
    assert sorted(log) == sorted([f"b{i}" for i in range(6)] + [f"d{i}" for i in range(6)])
    assert [n for n in log if n[0] == "d"] == [f"d{i}" for i in range(6)], "in order within a class"
    assert all(c.running == 0 and not c.waiting for c in made.classes.values())


async def test_unused_places_are_lent() -> None:
    made = admission(places=4, share=0.25)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await asyncio.wait_for(stack.enter_async_context(made.place(True)), 1)
    assert made.classes[True].running == 0


async def test_each_class_has_a_bound_of_its_own() -> None:
    made, gate, log = admission(places=1, queued=3), asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(hold(made, True, log, str(i), gate)) for i in range(4)]
    await settled()
    with pytest.raises(Overloaded, match="deterministic"):
        await made._enter(True)
    tasks.append(asyncio.create_task(hold(made, False, log, "b", gate)))
    await settled()
    assert len(made.classes[False].waiting) == 1, "the other class still has room"
    gate.set()
    await asyncio.gather(*tasks)
    assert len(log) == 5


async def test_clients_that_leave_while_they_wait_leave_nothing_behind() -> None:
    """Random arrivals, departures and cancellations: all counters come back to zero, nobody is forgotten."""
    rng = random.Random(1)
    made, log, gate = admission(places=3, queued=50), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(hold(made, rng.random() < 0.5, log, str(i), gate)) for i in range(60)]
    for task in rng.sample(tasks, 30):
        await settled()
        task.cancel()
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(r is None for r in results) >= 30
    assert all(c.running == 0 and not c.waiting for c in made.classes.values())


async def test_no_more_deterministic_work_is_admitted_than_the_verifiers_sustain() -> None:
    """A verifier that serves four streams in time: the limit settles around four, and comes back later."""
    clock = Clock()
    made = admission(places=64, queued=500, clock=clock)
    gate, log = asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(hold(made, True, log, str(i), gate)) for i in range(200)]
    await settled()
    assert made.classes[True].running == 64
    made.classes[True].running = 64
    limits = []
    for _ in range(400):
        clock.now += 0.25
        running = min(64, int(made.deterministic_limit))
        made.classes[True].running = running
        made.observe(0.1 if running <= 4 else 1.0)
        limits.append(made.deterministic_limit)
    assert 2 <= sum(limits[200:]) / 200 <= 6
    for _ in range(6000):
        made.observe(0.1)
    assert made.deterministic_limit == 64
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_best_effort_does_not_wait_for_verifiers() -> None:
    made = admission(places=8)
    made.deterministic_limit = 1.0
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await asyncio.wait_for(stack.enter_async_context(made.place(False)), 1)


async def test_control_deterministic_requests_do() -> None:
    made = admission(places=8)
    made.deterministic_limit = 1.0
    async with made.place(True):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.place(True).__aenter__(), 0.05)


def scaler(**changes: Any) -> Scaler:
    return Scaler(**({"least": 1, "most": 3, "limits": LIMITS, "scale_down_s": 60.0} | changes))


@pytest.mark.parametrize("load", [LATE, *CROWDED.values()], ids=["queue", *CROWDED])
def test_too_much_work_adds_verifiers_one_after_the_other(load: Load) -> None:
    made, now, counts = scaler(), 0.0, []
    for _ in range(100):
        now += 1.0
        counts.append(made.look(now, load, made.wanted))
    assert counts[: LOOKS_UP - 1] == [1] * (LOOKS_UP - 1)
    assert counts[-1] == 3
    changes = [i for i in range(1, 100) if counts[i] != counts[i - 1]]
    assert len(changes) == 2
    assert changes[1] - changes[0] >= SETTLE_S


def test_one_burst_is_no_reason_and_a_starting_verifier_is_waited_for() -> None:
    made = scaler()
    for now in range(50):
        made.look(float(now), LATE if now % LOOKS_UP else IDLE, 1)
    assert made.wanted == 1
    made = scaler()
    for now in range(200):
        made.look(float(now), LATE, 1)  # the second one never becomes ready
    assert made.wanted == 2


def test_a_quiet_time_takes_them_away_again() -> None:
    made, now = scaler(), 0.0
    while made.wanted < 3:
        now += 1.0
        made.look(now, LATE, made.wanted)
    quiet = now
    while made.wanted > 1:
        now += 1.0
        made.look(now, IDLE, made.wanted)
        assert now < quiet + 500
    assert now - quiet >= 2 * 60.0
    for _ in range(200):
        now += 1.0
        assert made.look(now, IDLE, 1) == 1
    fixed = scaler(most=0)
    assert all(fixed.look(float(t), replace(LATE, queue_s=9.0), 1) == 1 for t in range(100))


def after_a_while(load: Load) -> int:
    """How many of two verifiers are kept that have had this load for long."""
    made, now = scaler(), 0.0
    while made.wanted < 2:
        now += 1.0
        made.look(now, LATE, made.wanted)
    for _ in range(150):
        now += 1.0
        made.look(now, load, made.wanted)
    return made.wanted


def test_who_decodes_long_answers_is_not_given_up() -> None:
    """No window comes or waits; but one verifier alone would have too much. The controls: with less work, or
    when it is not counted, one is enough."""
    told = [status(direct=64, kv_used=500), status(direct=64, kv_used=500)]
    assert after_a_while(Load.of(told)) == 2
    assert after_a_while(Load.of([status(kv_used=500), status(direct=1, kv_used=500)])) == 2
    assert after_a_while(Load.of([status(direct=1, step_s=0.6)] * 2)) == 2
    assert after_a_while(Load.of([status(direct=40, kv_used=400)] * 2)) == 1
    assert after_a_while(Load.of([replace(s, direct=0, kv_used=0) for s in told])) == 1


def status(**said: Any) -> VerifierStatus:
    """Of a verifier of 100 rows and 1,000 tokens of KV."""
    usual: dict[str, Any] = {"places": 100, "kv_tokens": 1000, "step_s": 0.01}
    return VerifierStatus("ready", "a", **(usual | said))


def test_the_work_of_verifiers_together() -> None:
    found = Load.of([status(waiting=10, active=20, direct=30, kv_used=100, step_s=0.5), status(step_s=9.0)])
    assert (found.places, found.kv, found.step_s) == (0.3, 0.05, 0.5), "who is idle was slow once"
    assert found.busy
    assert Load.of([status()]) == Load.of([]) == Load()
    assert Load.of([status(direct=1)]).busy, "a request that is decoded is work, without any window"
    older = VerifierStatus("ready", "a", waiting=500)
    assert not LIMITS.exceeded(Load.of([older])), "of a release that does not say how much it can do"


def test_the_time_of_steps_is_that_of_the_last_ones() -> None:
    clock = StepTime()
    assert clock.mean_s(0, 0.0) == 0.0
    assert clock.mean_s(10, 1.0) == pytest.approx(0.1)
    assert clock.mean_s(12, 2.0) == pytest.approx(0.5)
    assert clock.mean_s(12, 2.0) == pytest.approx(0.5), "nothing new"


@pytest.mark.parametrize("load", CROWDED.values(), ids=CROWDED)
async def test_while_verifiers_have_too_much_nobody_follows_who_ends(load: Load) -> None:
    """Although no window waits: all commits come in time. What runs goes on, and with room others follow."""
    made, log, gates = admission(places=8), list[str](), [asyncio.Event() for _ in range(20)]
    tasks = [asyncio.create_task(hold(made, True, log, str(i), gates[i])) for i in range(20)]
    await settled()
    assert len(log) == 8
    for gate in gates[:4]:
        made.look(load)
        made.observe(0.0)
        gate.set()
        await settled()
    assert (len(log), made.classes[True].running) == (8, 4)
    for gate in gates[4:7]:
        made.look(load)
        gate.set()
        await settled()
    made.look(load)
    assert (made.deterministic_limit, made.classes[True].running) == (1.0, 1)
    gates[7].set()
    await settled()
    assert made.classes[True].running == 1, "one at least"
    for expected in (2, 3, 4):
        made.look(IDLE)
        await settled()
        assert made.classes[True].running == expected
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("load", [Load(0.85, 0.85, 0.9, 9.0, True), IDLE], ids=["within", "idle"])
async def test_control_with_room_others_follow(load: Load) -> None:
    made, log, gates = admission(places=8), list[str](), [asyncio.Event() for _ in range(20)]
    tasks = [asyncio.create_task(hold(made, True, log, str(i), gates[i])) for i in range(20)]
    for gate in gates[:4]:
        await settled()
        made.look(load)
        gate.set()
    await settled()
    assert (len(log), made.classes[True].running) == (12, 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_windows_that_were_late_keep_the_limit_down() -> None:
    """A look at verifiers with room says nothing of why windows waited, a moment ago."""
    clock = Clock()
    clock.now = 100.0
    made = admission(places=64, clock=clock)
    made.classes[True].running = 40
    made.observe(2.0)
    assert made.deterministic_limit == pytest.approx(28.0)
    made.look(IDLE)
    assert made.deterministic_limit == pytest.approx(28.0)
    clock.now += RAISE_AFTER_S
    made.look(IDLE)
    assert made.deterministic_limit == pytest.approx(30.8)


def test_requests_with_a_common_prefix_share_a_replica_until_it_is_busy() -> None:
    names = [f"replica-{i}" for i in range(4)]
    prefix = tuple(range(64))
    first = preferred(prefix, names)
    assert preferred(prefix, [*names, "another"]) in (first, "another"), "few prefixes move when one is added"
    idle = dict.fromkeys(names, 0)
    assert ranks(prefix, idle)[0] == [first]
    assert ranks(prefix, idle | {first: SPILL})[0] == [first]
    assert ranks(prefix, idle | {first: SPILL + 1})[0] != [first]
    assert ranks(prefix, {"only": 99}) == [["only"]]
    spread = {preferred((i,), names) for i in range(100)}
    assert spread == set(names)


def test_the_preference_is_pinned() -> None:
    """Processes of two versions must agree, or each fills a cache of its own."""
    found = "".join(preferred((i,), ["a", "b", "c", "d"]) for i in range(12))
    assert found == "badcaccbaabd"
