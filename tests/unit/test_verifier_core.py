"""The verifier's scheduler and its sequences over a shadow of the KV cache: random windows, retries, failed
steps, releases and cancellations in a cache that is always too small; broken versions are noticed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llm42.cache import BlockPool
from llm42.errors import Overloaded, StepFailed, VerifierUnavailable
from llm42.host.threads import set_threads
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.verifier.jobs import Answer, Job
from llm42.verifier.kv_store import KVStore
from llm42.verifier.prefixes import HeldKV
from llm42.verifier.scheduler import Verifier
from tests.support import PATIENCE_S, check_pool
from tests.unit.shadow_runner import VOCAB, DelayedShadow, ShadowRunner, canonical, right_answer

logging.getLogger("llm42.verifier.scheduler").setLevel(logging.CRITICAL)  # thousands of planted failures
BLOCKS, SIZE = 8, 2
ROOM = BLOCKS * SIZE


def verifier_of(
    runner: type[ShadowRunner] = ShadowRunner,
    store: type[KVStore] = KVStore,
    make: type[Verifier] = Verifier,
    blocks: int = BLOCKS,
    buckets: tuple[int, ...] = (2, 4),
    max_waiting: int = 64,
) -> tuple[Verifier, ShadowRunner]:
    """A verifier without a thread, over a shadow."""
    pool = BlockPool(blocks, SIZE, root=b"root")
    shadow = runner(pool)
    verifier = make(
        shadow,
        pool,
        buckets=buckets,
        max_len=blocks * SIZE,
        vocab_size=VOCAB,
        fingerprint="fp",
        max_waiting=max_waiting,
    )
    verifier._store = store(pool, shadow.copy_block)
    return verifier, shadow


def window_of(name: str, tokens: list[int], candidates: tuple[int, ...] = (), prompt_len: int = 0) -> Window:
    return Window(name, tuple(tokens), prompt_len or len(tokens), candidates, SamplingParams())


def same(answer: Answer, want: Answer) -> bool:
    """Equality up to timings and the text of an error."""
    if isinstance(answer, Commit) and isinstance(want, Commit):
        return replace(answer, timings=want.timings) == want
    return isinstance(answer, Failure) and isinstance(want, Failure) and answer.code == want.code


@dataclass
class Live:
    """A request as its session sees it: what is committed, and every call made for the present window."""

    prompt_len: int
    tokens: list[int]
    window: Window | None = None
    calls: list[Future[Answer]] = field(default_factory=list)


class VerifierMachine(RuleBasedStateMachine):
    """Requests come, send windows, lose answers, retry, end; steps fail now and then."""

    runner: type[ShadowRunner] = ShadowRunner
    store: type[KVStore] = KVStore
    verifier_type: type[Verifier] = Verifier

    def __init__(self) -> None:
        super().__init__()
        self.verifier, self.shadow = verifier_of(self.runner, self.store, self.verifier_type)
        self.live: dict[str, Live] = {}
        self.orphans: list[Future[Answer]] = []
        self.begun = 0
        self.may_fail = False

    @precondition(lambda self: len(self.live) < 5)
    @rule(prompt=st.lists(st.sampled_from([0, 1, 0, 1, 2, 3]), min_size=1, max_size=9))
    def begin(self, prompt: list[int]) -> None:
        self.live[f"r{self.begun}"] = Live(len(prompt), list(prompt))
        self.begun += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), prompt=st.lists(st.sampled_from([0, 1, 0, 1, 2, 3]), min_size=1, max_size=9))
    def begin_again(self, data: st.DataObject, prompt: list[int]) -> None:
        """The word that a request is over was lost, and another one comes under its name."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.orphans += self.live[name].calls
        self.live[name] = Live(len(prompt), list(prompt))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), right=st.lists(st.sampled_from([True, True, True, False]), max_size=6))
    def send(self, data: st.DataObject, right: list[bool]) -> None:
        """A new window, or the present one again: its answer was lost, or is late."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[name]
        if live.window is None:
            known = list(live.tokens)
            for good in right[: ROOM - len(known)]:
                token = canonical(known, live.prompt_len).token
                known.append(token if good else (token + 1) % (VOCAB - 1))
            live.window = window_of(name, live.tokens, tuple(known[len(live.tokens) :]), live.prompt_len)
        live.calls.append(self.verifier.submit(live.window))

    @rule()
    def step(self) -> None:
        self.verifier.step()

    @rule()
    def fail(self) -> None:
        """The next step writes half of its KV and raises."""
        self.shadow.fail_next = self.may_fail = True

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def go_on_elsewhere(self, data: st.DataObject, tokens: int) -> None:
        """Another verifier answers for a while; what this one keeps of the request grows old."""
        live = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.orphans += live.calls
        live.calls, live.window = [], None
        for _ in range(min(tokens, ROOM - len(live.tokens))):
            live.tokens.append(canonical(live.tokens, live.prompt_len).token)

    @precondition(lambda self: any(x.calls for x in self.live.values()))
    @rule(data=st.data())
    def give_up_call(self, data: st.DataObject) -> None:
        """A caller no longer waits for an answer (a timeout); it may be queued, running or answered."""
        name = data.draw(st.sampled_from(sorted(n for n, x in self.live.items() if x.calls)))
        call = self.live[name].calls.pop()
        call.cancel()
        self.orphans.append(call)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request is over, perhaps with a window on its way."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.orphans += self.live.pop(name).calls
        self.verifier.release(name)

    @invariant()
    def answers_are_right(self) -> None:
        for live in self.live.values():
            for call in [c for c in live.calls if c.done()]:
                live.calls.remove(call)
                if call.exception() is not None:
                    assert self.may_fail, f"failed without a planted failure: {call.exception()}"
                    assert isinstance(call.exception(), VerifierUnavailable)
                    continue
                assert live.window is not None, "an answer without a question"
                want = right_answer(live.window, "fp")
                assert same(call.result(), want), f"{call.result()} instead of {want}"
                if isinstance(want, Commit) and not live.calls:
                    fresh = (*live.window.candidates[: want.accepted], want.next_token)
                    live.tokens += fresh[: ROOM - len(live.tokens)]
                    live.window = None

    @invariant()
    def memory_is_sound(self) -> None:
        assert self.shadow.violations == []
        check_pool(self.verifier._pool)

    def teardown(self) -> None:
        self.shadow.fail_next = False
        for _ in range(3000):
            if not self.verifier.step():
                break
        else:
            raise AssertionError("windows wait for ever")
        self.answers_are_right()
        self.memory_is_sound()
        assert all(call.done() for call in self.orphans)
        assert not any(x.calls for x in self.live.values()), "a window was never answered"
        for name in self.live:
            self.verifier.release(name)
        self.verifier.step()
        stats = self.verifier.stats()
        assert stats.kv_held_blocks == stats.active == stats.waiting == stats.idle_sequences == 0


class PipelinedMachine(VerifierMachine):
    """The same with a step in flight behind the running one."""

    runner = DelayedShadow


LONG = settings(max_examples=250, stateful_step_count=50, deadline=None)
TestVerifier = VerifierMachine.TestCase
TestVerifier.settings = LONG
TestPipelinedVerifier = PipelinedMachine.TestCase
TestPipelinedVerifier.settings = LONG


# ---- broken versions: the same machine must notice each


class TrustsTheOldTokens(KVStore):
    """Takes a kept sequence for valid up to the window's start without comparing tokens."""

    def admit(self, window: Window, cold: bool = False, *more: Any, **known: Any) -> HeldKV | None:
        kept = self._idle.get(window.request_id)
        if kept is not None:
            tokens = [*window.tokens, *window.candidates]
            kept.computed = min(len(kept.blocks) * SIZE, len(tokens))
            kept.tokens = tokens[: kept.computed]
        return super().admit(window, cold, *more, **known)


class WritesPublishedBlocks(KVStore):
    """No copy before going on inside a published block."""

    def admit(self, window: Window, cold: bool = False, *more: Any, **known: Any) -> HeldKV | None:
        is_published, self.pool.is_published = self.pool.is_published, lambda _: False  # type: ignore[method-assign]
        try:
            return super().admit(window, cold, *more, **known)
        finally:
            self.pool.is_published = is_published  # type: ignore[method-assign]


class LeaksOnFailure(KVStore):
    """A failed step's blocks stay held."""

    def discard(self, sequence: HeldKV) -> None:
        sequence.blocks, sequence.keys, sequence.computed = [], [], 0


class KeepsHalfWrittenBlocks(KVStore):
    """A failed step's sequence is kept as if it had been computed."""

    def discard(self, sequence: HeldKV) -> None:
        self.settle(sequence, len(sequence.tokens))


class PublishesTooEarly(KVStore):
    """Blocks are findable before the step that writes them."""

    def admit(self, window: Window, cold: bool = False, *more: Any, **known: Any) -> HeldKV | None:
        sequence = super().admit(window, cold, *more, **known)
        if sequence is not None:
            self.publish(sequence, len(sequence.tokens))
        return sequence


class LeavesThemWaiting(KVStore):
    """Who waits for the prefix of one whose step has failed is not told."""

    def discard(self, sequence: HeldKV) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.keys, sequence.computed = [], [], 0


class NeverEvicts(KVStore):
    """Idle sequences are never given up for a window that waits."""

    def _make_room(self, blocks: int) -> bool:
        return blocks <= self.pool.available


class AdmitsInPieces(Verifier):
    """Forgets the windows behind one that has to wait."""

    def _admit(self) -> None:
        super()._admit()
        if self._waiting and self._active:
            self._waiting.pop()


class PublishesWhatIsPlanned(Verifier):
    """Blocks are findable one step too early."""

    def _plan(self, decodes: int = 0) -> list[tuple[Job, int]]:
        plan = super()._plan(decodes)
        for job, count in plan:
            assert job.sequence is not None
            self._store.publish(job.sequence, min(job.issued + count, len(job.window.tokens)))
        return plan


class AcceptsOneTooMany(Verifier):
    """Takes the first wrong candidate too."""

    def _answer(self, job: Job) -> None:
        for sampled, candidate in zip(job.sampled, job.window.candidates, strict=False):
            if sampled.token != candidate:
                sampled.token = candidate
                break
        super()._answer(job)


class LosesThePromptBorder(Verifier):
    """Counts committed tokens as prompt."""

    def submit(self, window: Window) -> Future[Answer]:
        return super().submit(replace(window, prompt_len=len(window.tokens)))


class CancelsAtTheEnd(Verifier):
    """A failed step leaves its windows without an answer."""

    def _abandon(self, plan: list[tuple[Job, int]], error: Exception) -> None:
        for job, _ in plan:
            if job in self._active:
                self._active.remove(job)
                assert job.sequence is not None
                self._store.discard(job.sequence)


BROKEN_STORES = [
    WritesPublishedBlocks,
    LeaksOnFailure,
    KeepsHalfWrittenBlocks,
    PublishesTooEarly,
    LeavesThemWaiting,
    NeverEvicts,
]
BROKEN_VERIFIERS = [
    AdmitsInPieces,
    PublishesWhatIsPlanned,
    AcceptsOneTooMany,
    LosesThePromptBorder,
    CancelsAtTheEnd,
]


@pytest.mark.parametrize("broken", [*BROKEN_STORES, *BROKEN_VERIFIERS], ids=lambda c: c.__name__)
def test_control_broken_versions_are_noticed(broken: type) -> None:
    class Broken(VerifierMachine):
        store = broken if issubclass(broken, KVStore) else KVStore
        verifier_type = broken if issubclass(broken, Verifier) else Verifier

    quick = settings(
        max_examples=1500,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(Broken, settings=quick)


# ---- single cases


def drain(verifier: Verifier) -> None:
    while verifier.step():
        pass


def test_a_retry_that_fills_the_whole_cache_is_answered() -> None:
    """The answer to a window was lost, and its blocks are published: the retry finds no room for a copy."""
    verifier, shadow = verifier_of()
    tokens = [i % 3 for i in range(5)]
    known = list(tokens)
    while len(known) < ROOM:
        known.append(canonical(known, 5).token)
    window = window_of("full", tokens, tuple(known[5:]))
    for _ in range(3):
        call = verifier.submit(window)
        drain(verifier)
        assert same(call.result(timeout=0), right_answer(window, "fp"))
    assert shadow.violations == []


def readings_of_two_prompts_under_one_name(store: type[KVStore]) -> list[str]:
    """What a second prompt's rows have read that is not its own."""
    verifier, shadow = verifier_of(store=store)
    for tokens in ([0, 1, 0, 1, 2], [3, 2, 1, 0, 2, 1]):
        call = verifier.submit(window_of("one", tokens))
        drain(verifier)
        call.result(timeout=0)
    return shadow.violations


def test_another_prompt_under_a_used_name_reads_nothing_of_the_first() -> None:
    assert readings_of_two_prompts_under_one_name(KVStore) == []


def test_control_a_store_that_trusts_the_old_tokens_is_noticed() -> None:
    assert readings_of_two_prompts_under_one_name(TrustsTheOldTokens) != []


def test_prompts_that_do_not_fit_together_take_turns() -> None:
    verifier, shadow = verifier_of()
    windows = [window_of(f"p{i}", [i, *[1] * 9]) for i in range(3)]  # five of eight blocks each
    calls = [verifier.submit(w) for w in windows]
    most = 0
    while verifier.step():
        most = max(most, verifier.stats().active)
    assert most == 1
    assert all(same(c.result(timeout=0), right_answer(w, "fp")) for c, w in zip(calls, windows, strict=True))
    assert shadow.violations == []


def steps_of_a_prompt_among_windows(make: type[Verifier]) -> int | None:
    """A long prompt while every step brings more short windows than it holds; None: still unanswered after
    200 steps."""
    verifier, _ = verifier_of(make=make, blocks=400, buckets=(4, 8))
    prompt = window_of("long", [1] * 60)
    call = None
    for number in range(200):
        for i in range(6):
            verifier.submit(window_of(f"{number}-{i}", [0, 2], (0,)))
        if number == 1:
            call = verifier.submit(prompt)
        verifier.step()
        while len(verifier._waiting) > 20:  # the short ones' clients give up; the prompt's does not
            verifier._waiting.remove(next(j for j in verifier._waiting if j.window is not prompt))
        if call is not None and call.done():
            return number
    return None


class WindowsFirst(Verifier):
    """A prompt gets only the rows that windows leave."""

    def _plan(self, decodes: int = 0) -> list[tuple[Job, int]]:
        budget, plan = self._buckets[-1], []
        for job in sorted(self._active, key=lambda j: j.end - j.issued):
            room = budget - sum(count for _, count in plan)
            if room > 0:
                plan.append((job, min(job.end - job.issued, room)))
        return plan


def test_a_long_prompt_is_not_starved_by_windows() -> None:
    steps = steps_of_a_prompt_among_windows(Verifier)
    assert steps is not None
    assert steps <= 60 / (8 / 4) + 10  # a quarter of every step is the prompt's


def test_control_a_starved_prompt_is_noticed() -> None:
    assert steps_of_a_prompt_among_windows(WindowsFirst) is None


def test_a_step_is_no_larger_than_needed() -> None:
    verifier, shadow = verifier_of(blocks=64, buckets=(2, 4, 8))
    verifier.submit(window_of("a", [1] * 19))
    drain(verifier)
    assert [(bucket, sum(n for _, n in rows)) for bucket, rows in shadow.steps] == [(8, 8), (8, 8), (4, 3)]
    assert verifier.stats().padding_rows == 1


@pytest.mark.parametrize(
    ("window", "code"),
    [
        (window_of("w", []), "invalid_window"),
        (Window("w", (1, 2), 0, (), SamplingParams()), "invalid_window"),
        (Window("w", (1, 2), 3, (), SamplingParams()), "invalid_window"),
        (window_of("w", [1, VOCAB]), "invalid_window"),
        (window_of("w", [1], (-1,)), "invalid_window"),
        (Window("w", (1, 2), 2, (), SamplingParams(logit_bias=((VOCAB, 1.0),))), "invalid_window"),
        (Window("w", (1, 2), 2, (), SamplingParams(min_tokens_banned=(-1,))), "invalid_window"),
        (window_of("w", [1] * ROOM, (1,)), "context_length_exceeded"),
    ],
)
def test_impossible_windows_are_refused_for_good(window: Window, code: str) -> None:
    verifier, _ = verifier_of()
    answer = verifier.submit(window).result(timeout=0)
    assert isinstance(answer, Failure)
    assert answer.code == code
    assert not verifier.step()


def test_a_window_beyond_the_cache_is_refused_for_good() -> None:
    verifier, _ = verifier_of()
    verifier.max_len = 999
    answer = verifier.submit(window_of("w", [1] * (ROOM + 1))).result(timeout=0)
    assert isinstance(answer, Failure)
    assert answer.code == "context_length_exceeded"
    assert "verifier.kv_tokens" in answer.message


def test_a_full_queue_says_so() -> None:
    verifier, _ = verifier_of(max_waiting=2)
    calls = [verifier.submit(window_of(f"{i}", [1])) for i in range(2)]
    with pytest.raises(Overloaded):
        verifier.submit(window_of("2", [1]))
    drain(verifier)
    assert all(c.done() for c in calls)
    verifier.submit(window_of("2", [1]))


def test_windows_are_taken_all_or_none() -> None:
    """Those before the one that is refused would be computed for nobody, in the middle of an overload."""
    verifier, shadow = verifier_of(max_waiting=3)
    with pytest.raises(Overloaded):
        asyncio.run(verifier.verify([window_of(f"{i}", [1]) for i in range(4)]))
    drain(verifier)
    assert not shadow.steps
    assert verifier.stats().kv_held_blocks == 0


@pytest.mark.parametrize("cold", [True, False])
def test_an_audit_outlives_the_request(cold: bool) -> None:
    """An audit of the last window arrives together with the end of its request (cold), and is computed all
    the same; a retry of the request's own (not cold) is dropped."""
    verifier, _ = verifier_of()
    window = window_of("r", [1, 2, 3])
    call = verifier.submit(window, cold=cold)
    verifier.release("r")
    drain(verifier)
    if cold:
        assert same(call.result(timeout=0), right_answer(window, "fp"))
    else:
        with pytest.raises(VerifierUnavailable):
            call.result(timeout=0)
    assert verifier.stats().kv_held_blocks == 0


@pytest.mark.parametrize("lost", [True, False])
def test_a_failed_step_ends_the_verifier_only_with_its_device(lost: bool) -> None:
    verifier, shadow = verifier_of()
    verifier._device_lost = lambda: lost
    good, step = window_of("good", [1, 2]), shadow.step

    def fail_once(*args: object) -> object:
        shadow.step = step  # type: ignore[method-assign]
        raise RuntimeError("planted")

    shadow.step = fail_once  # type: ignore[method-assign,assignment]
    call = verifier.submit(window_of("bad", [1, 2]))
    verifier.step()
    with pytest.raises(StepFailed):
        call.result(timeout=0)
    if lost:
        with pytest.raises(VerifierUnavailable):
            verifier.submit(good)
    else:
        answer = verifier.submit(good)
        drain(verifier)
        assert same(answer.result(timeout=0), right_answer(good, "fp"))


def test_a_step_that_hangs_is_seen() -> None:
    verifier, shadow = verifier_of()
    began, go_on, step = threading.Event(), threading.Event(), shadow.step

    def hang(*args: object) -> object:
        began.set()
        go_on.wait(PATIENCE_S)
        return step(*args)  # type: ignore[arg-type]

    shadow.step = hang  # type: ignore[method-assign,assignment]
    assert verifier.start().stalled_s == 0.0
    call = verifier.submit(window_of("w", [1, 2]))
    assert began.wait(PATIENCE_S)
    first = verifier.stalled_s
    assert 0.0 < first < verifier.stalled_s, "it grows while nothing happens"
    go_on.set()
    call.result(timeout=PATIENCE_S)
    while verifier.stalled_s:
        pass
    verifier.close()


def test_a_late_release_does_not_cancel_a_window_that_waits() -> None:
    """The same request id again, after a failover: its caller is told to try again."""
    verifier, _ = verifier_of()
    call = verifier.submit(window_of("again", [1, 2]))
    verifier.release("again")
    drain(verifier)
    with pytest.raises(VerifierUnavailable):
        call.result(timeout=0)
    assert verifier.stats().kv_held_blocks == 0
    window = window_of("again", [1, 2])
    call = verifier.submit(window)
    drain(verifier)
    assert same(call.result(timeout=0), right_answer(window, "fp"))


def test_a_window_released_while_it_runs_is_answered_and_leaves_nothing() -> None:
    verifier, _ = verifier_of()
    window = window_of("r", [1] * 9)
    call = verifier.submit(window)
    verifier.step()
    assert verifier.stats().kv_held_blocks > 0
    verifier.release("r")
    drain(verifier)
    assert same(call.result(timeout=0), right_answer(window, "fp"))
    stats = verifier.stats()
    assert stats.kv_held_blocks == stats.idle_sequences == 0
    assert stats.kv_cached_blocks > 0


def ended(verifier: Verifier, end: Callable[[], None]) -> tuple[Future[Answer], Future[Answer]]:
    """Two callers of a verifier whose thread ends: one waits, one has given up."""
    verifier._on_thread_start = end
    kept, dropped = (verifier.submit(window_of(n, [1, 2, 3])) for n in ("kept", "dropped"))
    dropped.cancel()
    verifier._loop()
    return kept, dropped


def test_a_closed_verifier_tells_those_who_wait() -> None:
    verifier, _ = verifier_of()

    def close() -> None:
        verifier._closed = True

    kept, dropped = ended(verifier, close)
    with pytest.raises(VerifierUnavailable, match="closed"):
        kept.result(timeout=0)
    with pytest.raises(CancelledError):
        dropped.result(timeout=0)
    with pytest.raises(VerifierUnavailable):
        verifier.submit(window_of("late", [1]))


def test_a_thread_that_fails_tells_those_who_wait() -> None:
    """A bug outside a step must not leave callers without an answer."""
    verifier, _ = verifier_of()

    def bug() -> None:
        verifier._plan = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]

    kept, _ = ended(verifier, bug)
    with pytest.raises(VerifierUnavailable):
        kept.result(timeout=0)
    with pytest.raises(VerifierUnavailable):
        verifier.submit(window_of("late", [1]))


def test_a_verifier_is_alive_until_its_thread_ends() -> None:
    verifier, _ = verifier_of()
    assert not verifier.alive
    verifier.start()
    assert verifier.alive
    thread = verifier._thread
    assert thread is not None
    verifier._plan = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(VerifierUnavailable):
        verifier.submit(window_of("last", [1])).result(timeout=PATIENCE_S)
    thread.join(timeout=PATIENCE_S)
    assert not verifier.alive


def threads_after_another_thread_sets_two(setter: Callable[[int], None]) -> int:
    """A thread asks for one thread, then another one asks for two; what the first one then has."""
    first, second, found = threading.Event(), threading.Event(), list[int]()

    def one() -> None:
        setter(1)
        first.set()
        second.wait()
        found.append(torch.get_num_threads())

    def two() -> None:
        first.wait()
        torch.set_num_threads(2)
        second.set()

    before = torch.get_num_threads()
    both = [threading.Thread(target=f) for f in (one, two)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    torch.set_num_threads(before)
    return found[0]


def test_a_thread_keeps_its_number_of_threads() -> None:
    """Part of the fingerprint: an engine that starts later must not change the verifier's."""
    assert threads_after_another_thread_sets_two(set_threads) == 1


def test_control_torch_alone_lets_another_thread_change_it() -> None:
    assert threads_after_another_thread_sets_two(torch.set_num_threads) == 2


def test_what_is_held_for_requests_that_never_come_back_is_freed() -> None:
    verifier, _ = verifier_of()
    for name, tokens in (("gone", [1, 2]), ("alive", [2, 1])):
        verifier.submit(window_of(name, tokens))
    drain(verifier)
    assert verifier.stats().idle_sequences == 2
    verifier.forget_idle(60.0)
    drain(verifier)
    assert verifier.stats().idle_sequences == 2, "not yet"
    verifier._store._idle["gone"].idle_since -= 61.0
    verifier.forget_idle(60.0)
    drain(verifier)
    assert list(verifier._store._idle) == ["alive"]
    check_pool(verifier._pool)
