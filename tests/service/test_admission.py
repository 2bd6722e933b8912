"""Admission by class, the ranking of replicas: the rules, without Ray processes."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from llm42.errors import Overloaded
from llm42_serve.ingress.router import ranks
from llm42_serve.placement import SPILL, preferred
from llm42_serve.replica.admission import Admission
from tests.support import PATIENCE_S


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(places: int = 4, queued: int = 8, share: float = 0.5, clock: Any = None) -> Admission:
    return Admission(places, queued, share, 0.5, clock or Clock())


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
            await asyncio.wait_for(stack.enter_async_context(made.place(True)), PATIENCE_S)
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
            await asyncio.wait_for(stack.enter_async_context(made.place(False)), PATIENCE_S)


async def test_control_deterministic_requests_do() -> None:
    made = admission(places=8)
    made.deterministic_limit = 1.0
    async with made.place(True):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.place(True).__aenter__(), 0.05)


@pytest.mark.parametrize("crowded", [True, False], ids=["crowded", "control: with room"])
async def test_while_verifiers_have_too_much_nobody_follows_who_ends(crowded: bool) -> None:
    """Although no window waits: all commits come in time. What runs goes on."""
    made, log, gates = admission(queued=20, places=8), list[str](), [asyncio.Event() for _ in range(20)]
    tasks = [asyncio.create_task(hold(made, True, log, str(i), gates[i])) for i in range(20)]
    await settled()
    assert len(log) == 8
    for ended, gate in enumerate(gates[:8], 1):
        made.look(crowded)
        made.observe(0.0)
        gate.set()
        await settled()
        if ended < 8:
            assert len(log) == (8 if crowded else 8 + ended)
    assert made.classes[True].running == (1 if crowded else 8), "one at least"
    made.look(crowded)
    await settled()
    assert made.classes[True].running == (1 if crowded else 8)
    await ended_all(tasks)


async def test_an_idle_replica_keeps_its_place_among_busy_ones() -> None:
    """It may start one while verifiers are busy with others' work, and as many as before soon after: what
    others have asked for has not lowered its limit."""
    made, log, gate = admission(places=64, queued=64), list[str](), asyncio.Event()
    for _ in range(100):
        made.look(True)
    tasks = [asyncio.create_task(hold(made, True, log, str(i), gate)) for i in range(64)]
    await settled()
    assert len(log) == 1
    running = []
    for _ in range(32):
        made.look(False)
        await settled()
        running.append(len(log))
    assert running[:3] == [3, 5, 7], "not all at once"
    assert running[-1] == 64
    await ended_all(tasks)


async def test_a_crowded_look_leaves_the_limit_of_queue_time_as_it_was() -> None:
    clock = Clock()
    clock.now = 100.0
    made = admission(places=64, clock=clock)
    made.classes[True].running = 40
    made.observe(2.0)
    assert made.deterministic_limit == pytest.approx(28.0)
    for crowded in (True, False) * 50:
        made.look(crowded)
    assert made.deterministic_limit == pytest.approx(28.0), "room says nothing of why windows waited"
    for _ in range(100):
        made.look(True)
    made.observe(0.0)
    assert made.deterministic_limit == pytest.approx(28.0 + 1 / 28)
    assert made.limit == 1


@pytest.mark.parametrize("all_verified", [True, False])
async def test_best_effort_is_held_back_only_where_verifiers_decode_it(all_verified: bool) -> None:
    made, log, gate = Admission(8, 8, 0.5, 0.5, all_verified=all_verified), list[str](), asyncio.Event()
    made.look(True)
    tasks = [asyncio.create_task(hold(made, i % 2 == 0, log, "db"[i % 2], gate)) for i in range(8)]
    await settled()
    assert "".join(log) == ("d" if all_verified else "dbbbb")
    await ended_all(tasks)


async def ended_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
