"""Audits, whose windows are long and cold, beside requests that are decoded: neither waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.verifier import jobs, scheduler
from llm42.verifier.jobs import Answer, Job
from llm42.verifier.scheduler import Verifier
from tests.unit.shadow_runner import DelayedShadow, ShadowRunner, canonical
from tests.unit.test_continuation import verifier_of

SIZE = 16
"""Rows of a step."""


def window_of(name: str, *tokens: int, credit: int = 0) -> Window:
    return Window(name, tokens, 1, (), SamplingParams(), credit=credit, max_len=600 if credit else 0)


class Beside:
    """So many requests that are decoded, all beyond their prompts."""

    def __init__(self, runner: type[ShadowRunner], followers: int, blocks: int = 4000) -> None:
        self.verifier, self.shadow = verifier_of(runner, blocks=blocks, buckets=(SIZE,))
        self.lengths = [0] * followers
        for number in range(followers):
            prompt = [number // 3**place % 3 for place in range(3)]
            self.verifier.follow(
                window_of(f"r{number}", *prompt, credit=500), lambda a, n=number: self.read(n, a)
            )
        while min(self.lengths) < 3:
            self.verifier.step()

    def read(self, number: int, answer: Commit | Failure | Exception) -> None:
        assert isinstance(answer, Commit)
        self.lengths[number] += 1

    def audit(self, name: str, length: int) -> Future[Answer]:
        return self.verifier.submit(window_of(name, *[i % 3 for i in range(length)]), cold=True)

    def steps_until(self, done: Sequence[Future[Answer]], most: int = 400) -> tuple[int, int]:
        """How many, and how many tokens the slowest of the decoded has got meanwhile."""
        before = list(self.lengths)
        for number in range(most):
            if all(f.done() for f in done):
                return number, min(now - was for now, was in zip(self.lengths, before, strict=True))
            self.verifier.step()
        return most, min(now - was for now, was in zip(self.lengths, before, strict=True))


@pytest.mark.parametrize("runner", [ShadowRunner, DelayedShadow])
@pytest.mark.parametrize("followers", [4, 12])
def test_each_keeps_its_row_and_the_audit_gets_the_rest(runner: type[ShadowRunner], followers: int) -> None:
    beside = Beside(runner, followers)
    call = beside.audit("a", 300)
    steps, tokens = beside.steps_until([call])
    assert tokens >= steps - 2, "somebody had no row in a step"
    assert steps <= 300 / (SIZE - followers) + 3
    answer = call.result(0)
    assert isinstance(answer, Commit)
    assert answer.next_token == canonical([i % 3 for i in range(300)], 1).token
    assert beside.shadow.violations == []


@pytest.mark.parametrize("audit_first", [True, False])
def test_a_prompt_does_not_wait_for_an_audit_nor_it_for_prompts(audit_first: bool) -> None:
    beside = Beside(ShadowRunner, 4)
    calls = [beside.audit("a", 300)] if audit_first else []
    beside.verifier.step()
    prompt = beside.verifier.submit(window_of("p", 2, *[1] * 99))
    steps, _ = beside.steps_until([prompt])
    assert steps <= 100 / (SIZE - 4 - SIZE // 8) + 2
    calls = calls or [beside.audit("a", 300)]
    for number in range(200):  # a new prompt whenever one is done
        if prompt.done():
            digits = [number // 3**place % 3 for place in range(5)]
            prompt = beside.verifier.submit(window_of(f"p{number}", *digits, *[2] * 200))
        beside.verifier.step()
    assert calls[0].done(), "an eighth of 200 steps is enough"


def planned_in_order(self: Verifier, decodes: int = 0) -> list[tuple[Job, int]]:
    """Whoever came first takes all that is left."""
    plan, left = [], self._buckets[-1] - decodes
    for job in self._active:
        if count := min(job.left, left):
            plan.append((job, count))
            left -= count
    return plan


@pytest.mark.parametrize("starved", ["decoded", "audit", "prompt"])
def test_control_who_is_starved_is_noticed(monkeypatch: pytest.MonkeyPatch, starved: str) -> None:
    beside = Beside(ShadowRunner, 12 if starved == "prompt" else SIZE)
    if starved == "audit":
        monkeypatch.setattr(scheduler, "decode_limit", lambda active, size: size)
    if starved == "decoded":
        monkeypatch.setattr(scheduler, "decode_limit", lambda active, size: 0 if active else size)
    if starved == "prompt":
        monkeypatch.setattr(Verifier, "_plan", planned_in_order)
    call = beside.audit("a", 300)
    beside.verifier.step()
    prompt = beside.verifier.submit(window_of("p", 2, *[1] * 39))
    steps, tokens = beside.steps_until([prompt if starved == "prompt" else call])
    if starved == "decoded":
        assert tokens < steps - 2
    else:
        assert steps > 300 / SIZE * 3


def waited_for_room(patience_s: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, bool, bool]:
    """An audit for which there is no room: how many were preempted for it, whether it was computed within
    these steps, and whether a window behind it was."""
    monkeypatch.setattr(jobs, "AUDIT_PATIENCE_S", patience_s)
    beside = Beside(ShadowRunner, 8, blocks=800)
    for _ in range(40):
        beside.verifier.step()
    call = beside.audit("a", 1300)
    window = beside.verifier.submit(window_of("w", 1, 2, 2))
    for _ in range(steps):
        beside.verifier.step()
    return beside.verifier.stats().preemptions, call.done(), window.done()


def test_an_audit_waits_for_room_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits nobody is preempted for it, and others pass."""
    assert waited_for_room(3600.0, 90, monkeypatch) == (0, False, True)
    preemptions, *done = waited_for_room(0.0, 250, monkeypatch)
    assert preemptions > 0
    assert done == [True, True], "and control: a patience of none"
