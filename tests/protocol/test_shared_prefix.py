"""A prompt that is being computed for one request is not computed again for another that comes meanwhile; and
whatever becomes of the first, the others' tokens are the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import StepFailed
from llm42.protocol import Commit, Request, Window
from llm42.verifier.jobs import Answer
from llm42.verifier.kv_store import KVStore
from llm42.verifier.prefixes import HeldKV, Prefixes
from llm42.verifier.scheduler import Verifier
from tests.protocol.reader import Lates, Reader, check, run
from tests.support import Lab, check_pool, prompt_of, request_of, window_of
from tests.support.late_runner import LateRunner

LENGTH, BLOCK, CHOICES = 600, 16, 16
"""Tokens of a prompt: several steps of every size that may be certified; not a multiple of a block."""


class FailsAt:
    """A plain runner whose step of this number fails."""

    def __init__(self, runner: Any, number: int) -> None:
        self.runner, self.left = runner, number
        self.copy_block = runner.copy_block

    def step(self, *args: Any) -> Any:
        """The runner's own, but once."""
        self.left -= 1
        if self.left < 0:
            self.left = 1 << 30
            raise RuntimeError("planted failure")
        return self.runner.step(*args)


def failing(pipelined: bool, number: int) -> Callable[[Any], Any]:
    """Makes a lab's runner one that fails once."""
    return lambda r: LateRunner(r, fail_at=number) if pipelined else FailsAt(r, number)


def verifier_of(lab: Lab, pipelined: bool, kv_tokens: int = 16384, **more: Any) -> Verifier:
    """Without a thread."""
    if pipelined and "wrap" not in more:
        more["wrap"] = Lates()
    return lab.verifier(kv_tokens, **more)


def choices(seed: int = 40, count: int = CHOICES, length: int = LENGTH, **more: Any) -> list[Request]:
    """Of one prompt, each with a seed of its own."""
    one = request_of("c", seed, length, max_tokens=12)
    return [
        replace(one, request_id=f"c{seed}-{i}", sampling=replace(one.sampling, seed=i), **more)
        for i in range(count)
    ]


def followed(verifier: Verifier, requests: list[Request], credit: int = 11) -> list[Reader]:
    """All at once; nothing is computed yet."""
    readers = [Reader(r) for r in requests]
    for reader in readers:
        reader.follow(verifier, credit)
    return readers


def check_all(lab: Lab, verifier: Verifier, readers: list[Reader]) -> None:
    """Their tokens are right, and nothing is left of them."""
    for reader in readers:
        check(lab, reader)
        verifier.release(reader.request.request_id)
    run(verifier)
    assert verifier._pool.held == 0
    assert not verifier._store._prefixes._writers and not verifier._store._prefixes._ends
    check_pool(verifier._pool)


def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone computes what is not there yet."""
    monkeypatch.setattr(Prefixes, "awaited", lambda *_: None)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("length", [LENGTH, LENGTH - LENGTH % BLOCK, 7])
def test_choices_of_one_prompt_cost_one_prompt(lab: Lab, pipelined: bool, length: int) -> None:
    """And a row for each; whether or not its last block is full."""
    verifier = verifier_of(lab, pipelined)
    readers = followed(verifier, choices(length=length), credit=0)
    run(verifier)
    assert verifier.stats().rows == length + (CHOICES - 1)
    for reader in readers:
        check(lab, reader, 1)
        verifier.renew(reader.request.request_id, length + 12)
    run(verifier)
    check_all(lab, verifier, readers)


def test_control_without_waiting_each_costs_a_prompt(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)
    verifier = verifier_of(lab, pipelined=False)
    readers = followed(verifier, choices(), credit=0)
    run(verifier)
    assert verifier.stats().rows > 0.8 * CHOICES * LENGTH
    for reader in readers:
        check(lab, reader, 1)


@pytest.mark.parametrize("pipelined", [True, False])
def test_windows_of_verify_mode_wait_too(lab: Lab, pipelined: bool) -> None:
    verifier, requests = verifier_of(lab, pipelined), choices(41)
    calls = []
    for i, request in enumerate(requests):
        right = lab.oracle(request).tokens[: i % 4]
        calls.append(verifier.submit(window_of(request, (), (*right, 5))))
    run(verifier)
    for i, (request, call) in enumerate(zip(requests, calls, strict=True)):
        commit, want = call.result(0), lab.oracle(request)
        assert isinstance(commit, Commit)
        if want.tokens[i % 4] != 5:
            assert (commit.accepted, commit.next_token) == (i % 4, want.tokens[i % 4])
            assert commit.logprobs == want.logprobs[: i % 4 + 1]
    # each computes its last prompt row and those of its candidates
    assert verifier.stats().rows <= LENGTH - 1 + sum(1 + i % 4 + 1 for i in range(CHOICES))


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_system_prompt_is_computed_once(lab: Lab, pipelined: bool) -> None:
    """Each has a message of its own behind it, none as long as another."""
    verifier, system = verifier_of(lab, pipelined), prompt_of(42, LENGTH)
    requests = [
        replace(request_of(f"s{i}", i, max_tokens=8), prompt=(*system, *prompt_of(100 + i, 3 + 5 * i)))
        for i in range(8)
    ]
    readers = followed(verifier, requests, credit=0)
    run(verifier)
    own = sum(len(r.prompt) - LENGTH + LENGTH % BLOCK for r in requests)
    assert verifier.stats().rows <= LENGTH + own
    for reader in readers:
        verifier.renew(reader.request.request_id, 768)
    run(verifier)
    check_all(lab, verifier, readers)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_first_is_released_in_the_middle(lab: Lab, pipelined: bool, steps: int) -> None:
    """What it has computed is used, and another one goes on with the rest."""
    verifier = verifier_of(lab, pipelined)
    gone, *readers = followed(verifier, choices(43, count=6))
    run(verifier, steps)
    gone.errors.clear()
    assert not gone.tokens, "not in the middle"
    verifier.release(gone.request.request_id)
    run(verifier)
    check_all(lab, verifier, readers)
    assert not gone.tokens and not gone.errors
    own = len(readers) * 12
    most_at_once = verifier._buckets[-1]  # in the step that ran
    assert verifier.stats().rows <= LENGTH + own + most_at_once + BLOCK


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_first_fails_in_the_middle(lab: Lab, pipelined: bool, number: int) -> None:
    verifier = verifier_of(lab, pipelined, wrap=failing(pipelined, number))
    failed, *readers = followed(verifier, choices(44, count=6))
    run(verifier)
    assert [type(e) for e in failed.errors] == [StepFailed]
    failed.errors.clear()
    failed.follow(verifier, 11)
    run(verifier)
    check_all(lab, verifier, [failed, *readers])


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_first_is_preempted_in_the_middle(lab: Lab, pipelined: bool, steps: int) -> None:
    """A window of verify mode needs its room."""
    verifier = verifier_of(lab, pipelined, kv_tokens=LENGTH + 10 * BLOCK)
    readers = followed(verifier, choices(45, count=4, length=LENGTH))
    run(verifier, steps)
    assert not readers[0].tokens, "not in the middle"
    other = request_of("w", 46, 400)
    call = verifier.submit(window_of(other, ()))
    verifier.step()
    assert verifier.stats().preemptions > 0
    run(verifier)
    assert call.result(0).next_token == lab.oracle(other).tokens[0]  # type: ignore[union-attr]
    verifier.release("w")
    check_all(lab, verifier, readers)


def rows_of_two_groups(lab: Lab, salts: tuple[str, str]) -> int:
    verifier = verifier_of(lab, pipelined=True)
    first = choices(47, count=4, cache_salt=salts[0])
    second = [replace(r, request_id=f"{r.request_id}+", cache_salt=salts[1]) for r in first]
    readers = [Reader(r) for r in (*first, *second)]
    for reader in readers:
        window = replace(reader.window(0), cache_salt=reader.request.cache_salt)
        verifier.follow(window, reader)
    run(verifier)
    for reader in readers:
        reader.request = replace(reader.request, cache_salt="")  # the oracle's is empty
        check(lab, reader, 1)
    return verifier.stats().rows


def test_who_has_another_salt_neither_waits_nor_shares(lab: Lab) -> None:
    assert rows_of_two_groups(lab, ("a", "b")) == 2 * (LENGTH + 3)
    assert rows_of_two_groups(lab, ("a", "a")) == LENGTH + 7, "control: the same salt"


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("cold_first", [True, False])
def test_a_cold_window_neither_waits_nor_shares(lab: Lab, pipelined: bool, cold_first: bool) -> None:
    verifier, requests = verifier_of(lab, pipelined), choices(48, count=2)

    def submitted(request: Request, cold: bool) -> Future[Answer]:
        return verifier.submit(window_of(request, ()), cold=cold)

    calls = [submitted(r, cold) for r, cold in zip(requests, (cold_first, not cold_first), strict=True)]
    verifier.step()
    assert len(verifier._active) == 2
    run(verifier)
    assert verifier.stats().rows == 2 * LENGTH
    for request, call in zip(requests, calls, strict=True):
        assert call.result(0).next_token == lab.oracle(request).tokens[0]  # type: ignore[union-attr]


def test_who_waits_keeps_its_place_and_stops_nobody(lab: Lab) -> None:
    verifier = verifier_of(lab, pipelined=False)
    first, second = followed(verifier, choices(49, count=2))
    (other,) = followed(verifier, choices(50, count=1))
    verifier.step()
    active = [job.window.request_id for job in verifier._active]
    assert active == [first.request.request_id, other.request.request_id]
    assert [job.window.request_id for job in verifier._followers.fresh] == [second.request.request_id]
    assert verifier.stats().waiting == 1
    run(verifier)
    check_all(lab, verifier, [first, second, other])


@pytest.mark.parametrize("pipelined", [True, False])
def test_control_a_block_that_is_published_too_early_is_noticed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    """Two steps before it is computed: within a step the rows of all sequences are written before any is
    read."""
    verifier = verifier_of(lab, pipelined, dirt=3.0)
    right, ahead = KVStore.publish, 2 * verifier._buckets[-1]

    def early(self: KVStore, sequence: HeldKV, computed: int) -> None:
        right(self, sequence, min(len(sequence.tokens), computed + ahead))

    monkeypatch.setattr(KVStore, "publish", early)
    readers = followed(verifier, choices(51, count=4, length=720))
    run(verifier)
    monkeypatch.undo()
    assert any(tuple(r.tokens) != lab.oracle(r.request).tokens for r in readers)


def test_control_the_end_of_another_prompt_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a prompt is copied for one that has only the blocks before it in common."""
    right, system = Prefixes._end_key, prompt_of(53, 4 * BLOCK)

    def of_the_system_prompt(self: Prefixes, window: Window, keys: Sequence[bytes]) -> bytes:
        return right(self, replace(window, tokens=window.tokens[: len(system)]), keys)

    monkeypatch.setattr(Prefixes, "_end_key", of_the_system_prompt)
    verifier, one = verifier_of(lab, pipelined=True), request_of("e", 52, max_tokens=12)
    requests = [replace(one, request_id=f"e{i}", prompt=(*system, 9, 9 + i, 8)) for i in range(4)]
    readers = followed(verifier, requests)
    run(verifier)
    monkeypatch.undo()
    assert any(tuple(r.tokens) != lab.oracle(r.request).tokens for r in readers)
