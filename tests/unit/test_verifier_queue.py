"""What counts as a waiting window, what is looked at of each, and what a step's plan costs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from llm42.cache import BlockPool
from llm42.errors import Overloaded
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.verifier import scheduler
from llm42.verifier.jobs import Answer, Job
from llm42.verifier.scheduler import Verifier
from tests.unit.shadow_runner import VOCAB, ShadowRunner

LONG = (1, 2, 0, 0, 2, 1, 1, 2, 2, 0, 1) * 2


def verifier_of(max_waiting: int = 4, blocks: int = 64, make: type[Verifier] = Verifier) -> Verifier:
    """Without a thread, over a shadow of the KV cache."""
    pool = BlockPool(blocks, 2)
    return make(
        ShadowRunner(pool),
        pool,
        buckets=(2, 4),
        max_len=2 * blocks,
        vocab_size=VOCAB,
        fingerprint="fp",
        max_waiting=max_waiting,
    )


def window_of(name: str, *tokens: int, candidates: tuple[int, ...] = ()) -> Window:
    return Window(name, tokens, 1, candidates, SamplingParams())


def stepped(verifier: Verifier, window: Window) -> Answer:
    """The window's answer."""
    future = verifier.submit(window)
    while not future.done():
        verifier.step()
    return future.result()


def test_releases_are_no_windows() -> None:
    """However many requests end during a step, windows still have all their places; and windows that are
    there still count, before and after the step thread has taken them in."""
    verifier = verifier_of()
    for number in range(1000):
        verifier.release(f"over{number}")
    verifier.forget_idle(0.0)
    assert verifier.stats().waiting == 0
    futures = [verifier.submit(window_of(f"r{i}", 1, 2)) for i in range(4)]
    with pytest.raises(Overloaded, match="4 windows"):
        verifier.submit(window_of("one too many", 1, 2))
    verifier._drain()
    assert verifier.stats().waiting == 4
    with pytest.raises(Overloaded):
        verifier.submit(window_of("still too many", 1, 2))
    while not all(f.done() for f in futures):
        verifier.step()
    assert all(isinstance(f.result(), Commit) for f in futures)
    assert verifier.stats().waiting == 0


def test_requests_that_run_are_no_windows() -> None:
    """However many are decoded, or wait for KV after they have begun: `max_waiting` is for who comes."""
    verifier, heard = verifier_of(max_waiting=1), list[Any]()
    for name in "abc":
        verifier.follow(Window(name, (1, 2), 1, (), SamplingParams(), credit=20, max_len=30), heard.append)
        verifier.step()
        verifier.step()
    assert len(verifier._followers.running) == 3
    assert verifier._followers.preempt_youngest() is not None
    assert len(verifier._followers.resuming) == 1
    verifier.submit(window_of("d", 1, 2))
    with pytest.raises(Overloaded):  # the control: who comes is counted
        verifier.submit(window_of("e", 1, 2))


def follow(verifier: Verifier, name: str, *tokens: int) -> None:
    window = Window(name, tokens, 1, (), SamplingParams(), credit=40, max_len=60)
    verifier.follow(window, lambda _: None)


def test_who_is_decoded_takes_a_place_from_beginning_to_end() -> None:
    """Also while it waits for rows, or for KV again. A window takes none."""
    verifier = verifier_of(max_waiting=9)
    assert verifier.places == 4, "the larger of its steps"
    for name in "ab":
        follow(verifier, name, 1, 2)
    verifier._drain()
    assert (verifier.stats().direct, verifier.stats().following) == (2, 0), "they wait to be admitted"
    follow(verifier, "c", *LONG)
    verifier.step()
    verifier.step()
    assert (verifier.stats().direct, verifier.stats().active) == (3, 1), "one has its prompt computed"
    while verifier.stats().following < 3:
        verifier.step()
    assert verifier._followers.preempt_youngest() is not None
    assert (verifier.stats().direct, verifier.stats().following) == (3, 2)
    verifier.submit(window_of("w", 1, 2))
    verifier._drain()
    assert (verifier.stats().direct, verifier.stats().waiting) == (3, 1)
    for name in "abc":
        verifier.release(name)
    verifier.step()
    assert verifier.stats().direct == 0


def test_only_steps_in_which_somebody_is_decoded_count_as_such() -> None:
    verifier = verifier_of()
    stepped(verifier, window_of("w", *LONG[:11]))
    stats = verifier.stats()
    assert (stats.steps > 0, stats.decode_steps, stats.decode_s) == (True, 0, 0.0)
    follow(verifier, "a", 1, 2)
    while verifier.stats().decode_steps < 3:
        verifier.step()
    stats = verifier.stats()
    assert 0.0 < stats.decode_s < stats.step_s


def test_kv_that_can_be_evicted_is_not_in_use() -> None:
    verifier = verifier_of()
    stepped(verifier, window_of("w", *LONG[:11]))
    stepped(verifier, window_of("x", *LONG[:9]))
    verifier.forget_idle(1000.0)
    verifier.step()
    assert (verifier._store.idle, verifier.kv_used_tokens) == (2, 0), "for both, although they share blocks"
    assert verifier._pool.held > 0, "the control: they are kept"
    before = verifier._pool.held
    stepped(verifier, window_of("y", 0, *LONG[:20]))
    assert verifier._pool.held > before, "the control: a third one is kept"
    assert verifier.kv_used_tokens == 0, "nor is that in use, although it has not been counted yet"
    follow(verifier, "a", *LONG[:7], 0)
    while not verifier.stats().following:
        verifier.step()
    verifier.forget_idle(1000.0)
    verifier._drain()
    (running,) = verifier._followers.running.values()
    assert verifier.kv_used_tokens == 2 * len(running.sequence.blocks), "the shared ones too"
    assert verifier._pool.held > len(running.sequence.blocks)
    verifier.forget_idle(0.0)
    verifier.step()
    assert verifier._store.idle == 0
    assert verifier.kv_used_tokens == 2 * verifier._pool.held


def test_a_refused_window_takes_no_place() -> None:
    verifier = verifier_of(max_waiting=1)
    for _ in range(3):
        assert isinstance(verifier.submit(window_of("wrong", 1, VOCAB)).result(), Failure)
    verifier.submit(window_of("right", 1, 2))


WRONG: tuple[Any, ...] = (VOCAB, -1, 2**31, 2**32, 2**63, 2**70, -(2**40), 1.5, "1", None)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("held", [False, True])
def test_every_token_of_every_window_is_looked_at(wrong: Any, held: bool) -> None:
    """Also where the verifier holds the request already: what it holds says nothing of the next window."""
    verifier = verifier_of()
    good = window_of("r", *(i % 3 for i in range(8)), candidates=(1, 2))
    if held:
        assert isinstance(stepped(verifier, good), Commit)
    for place in range(8):
        tokens = (*good.tokens[:place], wrong, *good.tokens[place + 1 :])
        for window in (replace(good, tokens=tokens), replace(good, candidates=(1, wrong))):
            answer = verifier.submit(window).result(0)
            assert isinstance(answer, Failure)
            assert answer.code == "invalid_window"


def test_the_largest_id_is_one() -> None:
    verifier = verifier_of()
    answer = stepped(verifier, window_of("r", 0, VOCAB - 1, candidates=(VOCAB - 1,)))
    assert isinstance(answer, Failure)
    assert answer.code == "non_finite_logits", "what the shadow says of its last id, when it has computed it"


def plan_seconds(jobs: int) -> float:
    """CPU time of one plan with so many windows of 3 rows, one token apart."""
    verifier = verifier_of(max_waiting=jobs, blocks=1 << 14)
    verifier._buckets = (1 << 14,)
    common = tuple(i % VOCAB for i in range(2000))
    for i in range(jobs):
        window = Window(f"r{i}", (*common, i % VOCAB), 1, (1, 2), SamplingParams())
        verifier._active.append(Job(window, None, 0.0, next=1999, issued=1999))  # type: ignore[arg-type]
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        plan = verifier._plan()
        best = min(best, time.thread_time() - began)
        assert [count for _, count in plan] == [4] * jobs
    return best


def test_a_plan_takes_time_in_proportion_to_its_windows() -> None:
    """Eight times as many: about eight times the time (it was 64 times)."""
    assert plan_seconds(1024) < 24 * plan_seconds(128)


def steps_of_a_big_one_that_waits_for_a_prefix(make: type[Verifier]) -> int | None:
    """It needs almost all blocks, and each step brings two others; None: unanswered after 300 steps."""
    verifier = verifier_of(make=make, max_waiting=1000, blocks=40)
    verifier.submit(window_of("first", *[1] * 30))
    call = verifier.submit(window_of("big", *[1] * 30, *[0] * 44))
    for number in range(300):
        for i in range(2):
            digits = [(2 * number + i) // 3**place % 3 for place in range(7)]  # no two have a block in common
            verifier.submit(window_of(f"{number}-{i}", *digits, *[2] * 5))
        verifier.step()
        if call.done():
            return number
    return None


class LetsAllPass(Verifier):
    """Who has no room lets others pass."""

    def _admitted(self, jobs: deque[Job], yielding: bool = False) -> bool:
        passed = list[Job]()
        while not super()._admitted(jobs, yielding):
            passed.append(jobs.popleft())
        jobs.extendleft(reversed(passed))
        return not passed


def test_who_has_waited_for_a_prefix_is_not_passed_for_ever() -> None:
    """While it waits others pass; then it is the first."""
    steps = steps_of_a_big_one_that_waits_for_a_prefix(Verifier)
    assert steps is not None
    assert steps < 100


def test_control_one_that_is_passed_for_ever_is_noticed() -> None:
    assert steps_of_a_big_one_that_waits_for_a_prefix(LetsAllPass) is None


def test_windows_first_but_a_quarter_for_the_oldest_prompt() -> None:
    verifier = verifier_of()
    verifier._buckets = (16,)

    def job(left: int) -> Job:
        window = window_of("r", *range(4))
        return Job(window, None, 0.0, issued=4 - left)  # type: ignore[arg-type]

    def planned(*left: int) -> list[tuple[int, int]]:
        jobs = [job(n) for n in left]
        verifier._active = jobs
        return [(jobs.index(j), count) for j, count in verifier._plan()]

    assert planned(3, 0, 5) == [(0, 3), (2, 5)]
    assert planned(8, 8, 8) == [(0, 8), (1, 8)]
    assert planned(100, 8, 8) == [(1, 8), (2, 4), (0, 4)]
    assert planned(9, 30) == [(0, 9), (1, 7)]
    assert planned(5, 100, 20) == [(0, 5), (1, 11)]


KINDS = ("window", "cold", "score", "follower", "resumed")


@pytest.mark.parametrize("kind", KINDS)
def test_how_long_windows_wait_is_of_windows_alone(kind: str) -> None:
    """An audit has time, a scored prompt and what is decoded are no windows of a session."""
    verifier, window = verifier_of(), window_of("w", 1, 2, candidates=(1,))
    if kind in ("follower", "resumed"):
        follow(verifier, "w", 1, 2)
    else:
        verifier.submit(replace(window, score=kind == "score"), cold=kind == "cold")
    time.sleep(0.02)
    for _ in range(4):
        verifier.step()
    if kind == "resumed":
        assert verifier._followers.preempt_youngest() is not None
        time.sleep(0.02)
        for _ in range(4):
            verifier.step()
    waited_s = verifier.load().waited_s
    assert (waited_s > 0.0005) == (kind == "window")


def test_steps_are_timed_by_what_they_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "COUNT_S", 0.0)
    verifier = verifier_of()
    stepped(verifier, window_of("w", *LONG[:11]))
    load = verifier.load()
    assert load.window_steps.times and not load.decode_steps.times
    assert load.kv_free == verifier.kv_tokens, "what is idle can be evicted"
    follow(verifier, "a", 1, 2)
    while verifier.stats().decode_steps < 3:
        verifier.step()
    load = verifier.load()
    assert [rows for rows, _ in load.decode_steps.times] == [1.0]
    assert (load.direct, load.others, load.places) == (1, 0, 4)
    assert load.kv_free < verifier.kv_tokens
    assert 0.0 < verifier.worked_s <= verifier.stats().step_s + 1.0


def test_what_is_stopped_is_used_by_the_next_window() -> None:
    verifier = verifier_of()
    heard = list[Any]()
    verifier.follow(Window("a", (1, 2), 1, (), SamplingParams(), credit=40, max_len=60), heard.append)
    while len(heard) < 6:
        verifier.step()
    verifier.stop("a")
    verifier.step()
    count = len(heard)
    assert verifier.stats().direct == 0 and not verifier.step()
    known = (1, 2, *(c.next_token for c in heard))
    answer = stepped(verifier, Window("a", known, 1, (), SamplingParams()))
    assert isinstance(answer, Commit) and answer.timings.cached_rows == len(known) - 1
    assert len(heard) == count
