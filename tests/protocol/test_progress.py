"""Time-outs by progress: who waits while its verifier works on others has not been failed; a verifier that
hangs, or that has lost a request, has."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from llm42.errors import VerifierUnavailable
from llm42.protocol import Request
from llm42.sampling import Sampled
from llm42.session import verify_call
from llm42.session.direct import DirectDrive
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier
from tests.support import PATIENCE_S, Answer, Lab, collect, differences, request_of, together

pytestmark = pytest.mark.usefixtures("awake")
LIMIT_S = 1.2
"""More than a busy machine leaves a thread without a core for."""


class Paced:
    """A runner whose steps take some time; while `held` they do not end."""

    def __init__(self, inner: CPURunner, step_s: float) -> None:
        self.inner, self.step_s, self.held = inner, step_s, threading.Event()

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        time.sleep(self.step_s)
        while self.held.is_set():
            time.sleep(0.01)
        return self.inner.step(bucket, sequences)

    def copy_block(self, source: int, target: int) -> None:
        self.inner.copy_block(source, target)


class Mute:
    """A verifier that says nothing of its progress."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    def load(self, request: Any) -> None:
        """Nothing is known of how busy it is."""

    def progressed_s(self, _request_id: str) -> float:
        return math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self.verifier, name)


def paced(lab: Lab, step_s: float, **changes: Any) -> tuple[Verifier, Paced]:
    """A verifier, and its runner."""
    made = list[Paced]()

    def wrap(runner: CPURunner) -> Paced:
        made.append(Paced(runner, step_s))
        return made[0]

    verifier = lab.verifier(wrap=wrap, **changes).start()
    return verifier, made[0]


def direct(lab: Lab, client: Any, **session: Any) -> Any:
    limits = {"verify_timeout_s": LIMIT_S, "verify_attempts": 1, **session}
    return lab.generator(lab.engine(start=False), client, mode="direct", **limits)


def long_ones(count: int, max_tokens: int = 60) -> list[Request]:
    return [request_of(f"p{i}", i, length=30, max_tokens=max_tokens) for i in range(count)]


def with_room_for_one(lab: Lab, wrapped: Callable[[Verifier], Any]) -> tuple[list[Answer], list[Request]]:
    verifier, _ = paced(lab, 0.03, kv_tokens=96)
    requests = long_ones(3)
    return together(direct(lab, wrapped(verifier)), requests), requests


def test_who_waits_for_kv_is_healthy(lab: Lab) -> None:
    """Each takes longer than the time-out, and they decode one after the other."""
    answers, requests = with_room_for_one(lab, lambda verifier: verifier)
    assert lab.wrong(answers, requests) == []
    assert [a.stats.verify_retries for a in answers] == [0, 0, 0]
    assert [a.stats.windows for a in answers] == [1, 1, 1]


def test_control_without_a_word_of_progress_it_has_failed(lab: Lab) -> None:
    with pytest.raises(VerifierUnavailable, match="no answer"):
        with_room_for_one(lab, Mute)


def windows_that_wait(lab: Lab, wrapped: Callable[[Verifier], Any]) -> tuple[list[Answer], list[Request]]:
    """Prompts for many small, slow steps."""
    size = min(lab.certificate.buckets)
    verifier, _ = paced(lab, 0.05, buckets=(size,))
    requests = [request_of(f"w{i}", i, length=80, max_tokens=8) for i in range(6)]
    limits = {"verify_timeout_s": LIMIT_S, "verify_attempts": 1}
    return together(lab.generator(lab.engine(), wrapped(verifier), **limits), requests), requests


def test_so_is_a_window_that_waits_its_turn(lab: Lab) -> None:
    answers, requests = windows_that_wait(lab, lambda verifier: verifier)
    assert lab.wrong(answers, requests) == []
    assert sum(a.stats.verify_retries for a in answers) == 0


def test_control_a_window_whose_verifier_says_nothing_has_failed(lab: Lab) -> None:
    with pytest.raises(VerifierUnavailable, match="no answer"):
        windows_that_wait(lab, Mute)


@pytest.mark.parametrize("mode", ["direct", "verify"])
def test_a_verifier_whose_step_hangs_is_left(lab: Lab, mode: str) -> None:
    verifier, runner = paced(lab, 0.001)
    generator = direct(lab, verifier) if mode == "direct" else None
    if generator is None:
        limits = {"verify_timeout_s": LIMIT_S, "verify_attempts": 1}
        generator = lab.generator(lab.engine(), verifier, **limits)

    async def scene() -> float:
        task = asyncio.create_task(collect(generator, request_of("h", 1, max_tokens=400)))
        while verifier.stats().steps < 5:
            assert not task.done(), "it has ended before anything hung"
            await asyncio.sleep(0.005)
        runner.held.set()
        began = time.monotonic()
        with pytest.raises(VerifierUnavailable, match="no answer"):
            await task
        return time.monotonic() - began

    try:
        assert asyncio.run(scene()) > 0.5 * LIMIT_S
    finally:
        runner.held.clear()


def forgotten(lab: Lab) -> tuple[Answer | BaseException, Request, bool]:
    """One is lost in the middle, while another keeps the verifier busy; whether it ended before that one."""
    verifier, _ = paced(lab, 0.01)
    generator = direct(lab, verifier, verify_attempts=2, credit=500)
    request, busy = request_of("lost", 1, max_tokens=40), request_of("busy", 2, max_tokens=400)

    async def scene() -> tuple[Answer | BaseException, Request, bool]:
        other = asyncio.create_task(collect(generator, busy))
        mine = asyncio.create_task(collect(generator, request))
        while verifier.stats().decoded < 20:
            assert not mine.done()
            await asyncio.sleep(0.005)
        verifier.release("lost")
        await asyncio.wait((mine, other), return_when=asyncio.FIRST_COMPLETED)
        first = mine.done()
        other.cancel()
        found = (await asyncio.gather(mine, other, return_exceptions=True))[0]
        return found, request, first

    return asyncio.run(scene())


def test_a_request_that_its_verifier_has_lost_is_sent_in_full(lab: Lab) -> None:
    answer, request, first = forgotten(lab)
    assert isinstance(answer, Answer), answer
    assert differences(answer, lab.oracle(request)) == []
    assert answer.stats.verify_retries == 1
    assert first, "long before the other one ended"


def test_control_it_would_wait_for_as_long_as_others_decode(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectDrive, "_renew", lambda *_: None)
    _, _, first = forgotten(lab)
    assert not first


class Loses(Mute):
    """Of each request the first window is never answered, though the verifier works on others."""

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self.seen = set[str]()

    def progressed_s(self, _request_id: str) -> float:
        return 0.0

    async def verify(self, windows: Any) -> Any:
        if windows[0].request_id not in self.seen:
            self.seen.add(windows[0].request_id)
            await asyncio.Event().wait()
        return await self.verifier.verify(windows)


def test_a_window_that_is_lost_is_asked_for_again_in_the_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of("lost", 1, max_tokens=20)
    generator = lab.generator(lab.engine(), Loses(lab.verifier().start()), verify_timeout_s=0.1)
    answer = asyncio.run(asyncio.wait_for(collect(generator, request), PATIENCE_S))
    assert differences(answer, lab.oracle(request)) == []
    assert answer.stats.verify_retries == 1
    monkeypatch.setattr(verify_call, "LOST_AFTER", math.inf)  # control: nobody else finds it
    generator = lab.generator(lab.engine(), Loses(lab.verifier().start()), verify_timeout_s=0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(collect(generator, request), 2))
