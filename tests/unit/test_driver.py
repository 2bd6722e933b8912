"""The driver's event loop: a client that leaves is heard at once."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings
from llm42.engine.base import EngineOutput
from llm42.errors import LLM42Error
from llm42.protocol import Request
from llm42.session.drive import Shared
from llm42.session.verify import VerifyDrive
from tests.support import PATIENCE_S

ANSWER = LLM42Error("an answer")


def drive_of() -> VerifyDrive:
    settings, request = Settings(), Request("r", (1, 2), 9, deterministic=True)
    owner: Any = SimpleNamespace(settings=settings)
    return VerifyDrive(owner, request, None, Shared.of(request, settings.session))  # type: ignore[arg-type]


class WaitsFor(VerifyDrive):
    """As it was with wait_for, which in Python 3.11 returns the event and forgets the cancellation."""

    async def _events(self, now: float) -> list[Any]:
        await asyncio.wait_for(self.inbox._ready.wait(), 60.0)
        outputs, answers = self.inbox.take()
        return [*outputs, *answers]


async def leaves(kind: type[VerifyDrive], seconds: float) -> bool:
    """Whether a loop over events ends when it is cancelled just as an event has come."""
    drive = drive_of()
    drive.__class__ = kind

    async def loop() -> None:
        while True:
            await drive._events(time.monotonic())

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    drive.inbox.put(ANSWER)
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=seconds)
    task.cancel()
    return bool(done)


def test_a_cancellation_that_meets_an_event_is_not_lost() -> None:
    assert asyncio.run(leaves(VerifyDrive, PATIENCE_S))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for is built on timeout() from Python 3.12 on")
def test_control_wait_for_may_lose_it() -> None:
    assert not asyncio.run(leaves(WaitsFor, 0.5))


def test_events_that_are_there_are_taken_together() -> None:
    async def scene() -> int:
        drive = drive_of()
        for start in range(3):
            drive.inbox.sink(EngineOutput("r", 0, start, (1,)))
        drive.inbox.put(ANSWER)
        return len(await drive._events(time.monotonic()))

    assert asyncio.run(scene()) == 4


async def test_candidates_that_wait_are_sent_at_the_deadline_though_nothing_more_comes() -> None:
    """The engine has told of two candidates and is silent from then on."""
    drive = drive_of()
    drive.session.candidates(0, 0, (5, 6))
    last = drive.session.last_commit + drive.settings.commit_deadline_s - 0.01
    assert drive.session.due(last) is None
    await asyncio.wait_for(drive._events(last), PATIENCE_S)
    assert drive.session.due(drive.session.last_commit + drive.settings.commit_deadline_s) is not None
