"""Admission while the verifiers have too much to do: turns, and answers that end before the next news."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import pytest

from llm42_serve.replica import admission as admissions
from llm42_serve.replica.admission import Admission
from tests.service.test_admission import ended_all, settled


class Even(Admission):
    """Where both classes are even, the same one is always served first: the control."""

    @property
    def _last(self) -> None:
        return None

    @_last.setter
    def _last(self, _: bool | None) -> None: ...


@pytest.mark.parametrize("kind", [Admission, Even])
async def test_with_a_single_place_both_classes_have_their_turn(kind: type[Admission]) -> None:
    """Both wait for more than there is, while the verifiers have too much to do."""
    made, log = kind(8, 500, 0.5, 0.5, all_verified=True), list[str]()
    made.look(True)

    async def client(deterministic: bool) -> None:
        while True:
            async with made.place(deterministic):
                log.append("db"[not deterministic])
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(client(i % 2 == 0)) for i in range(6)]
    while len(log) < 100:
        await asyncio.sleep(0)
    await ended_all(tasks)
    found = Counter(log[:100])
    assert (found["b"] >= 40 and found["d"] >= 40) == (kind is Admission)


@pytest.mark.parametrize("ease", [admissions.EASE, 0.0], ids=["", "control: nobody starts"])
@pytest.mark.parametrize("life", [5, 10])
async def test_short_answers_do_not_all_end_before_the_next_news(
    monkeypatch: pytest.MonkeyPatch, ease: float, life: int
) -> None:
    """Of 128 places 116 should be used at most. All in tenths of a second: so long a request runs, each ten
    there are news of three ago."""
    monkeypatch.setattr(admissions, "EASE", ease)
    made, ends, counted = Admission(128, 5000, 0.5, 0.5), deque[tuple[int, asyncio.Event]](), list[int]()
    now = 0

    async def one() -> None:
        async with made.place(True):
            gate = asyncio.Event()
            ends.append((now + life, gate))
            await gate.wait()

    tasks = [asyncio.create_task(one()) for _ in range(4500)]
    for now in range(250):
        await settled()
        counted.append(made.classes[True].running)
        if now % 10 == 0:
            made.look(counted[-4:][0] > 116)
        while ends and ends[0][0] <= now:
            ends.popleft()[1].set()
    await ended_all(tasks)
    mean = sum(counted[50:]) / 200
    assert (mean >= 0.8 * 116) == (ease > 0)
