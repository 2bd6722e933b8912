"""What the verifier decodes by itself is what it says one token at a time, bit for bit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import StepFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, Request, SamplingParams
from llm42.sampling import Draw, Sampled
from llm42.verifier.followers import Followers
from llm42.verifier.jobs import Decode
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier
from tests.protocol.reader import Lates, Reader, check, run
from tests.support import GREEDY, PENALISED, SAMPLED, Lab, check_pool, request_of, wait_until, window_of
from tests.support.late_runner import LateRunner


def followed(lab: Lab, request: Request, credit: int, late: Lates | None = None) -> tuple[Reader, Verifier]:
    """One request alone, until it rests."""
    verifier, reader = lab.verifier(wrap=late or Lates()), Reader(request)
    reader.follow(verifier, credit)
    run(verifier)
    return reader, verifier


@pytest.mark.parametrize("credit", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_credit(lab: Lab, credit: int, sampling: SamplingParams) -> None:
    reader, verifier = followed(lab, request_of("r", 1, max_tokens=100, sampling=sampling), credit)
    check(lab, reader, 1 + credit)
    assert reader.answers == 1 + credit
    check_pool(verifier._pool)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_each_step_decodes_a_token(lab: Lab, sampling: SamplingParams) -> None:
    """Also where the draw depends on a token that is still on the device."""
    late = Lates()
    followed(lab, request_of("r", 1, max_tokens=60, sampling=sampling), 50, late)
    assert 50 <= late.runner.begun <= 54
    assert late.runner.fed >= 48


KINDS = [
    GREEDY,
    SAMPLED,
    PENALISED,
    SamplingParams(temperature=0.9, top_k=12, min_p=0.01, seed=2**40),
    SamplingParams(frequency_penalty=0.5, logit_bias=((11, 4.0),)),
    SamplingParams(temperature=1.2, seed=4, min_tokens=20, min_tokens_banned=tuple(range(200))),
]


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("kv_tokens", [8192, 160])
def test_many_come_and_go_beside_windows(lab: Lab, pipelined: bool, kv_tokens: int) -> None:
    """They come one after the other, some with candidates, windows of verify mode in between; renewals come
    in any order, early, late and twice. With the smaller cache they are preempted."""
    late = Lates()
    verifier = lab.verifier(kv_tokens, wrap=late) if pipelined else lab.verifier(kv_tokens)
    requests = [request_of(f"r{i}", i, 9 + 5 * i, 24, KINDS[i % len(KINDS)]) for i in range(8)]
    readers, windows = [Reader(r) for r in requests], []
    for i, reader in enumerate(readers):
        want = lab.oracle(reader.request).tokens
        reader.follow(verifier, (0, 3, 9)[i % 3], (*want[: i % 4], *((5, 6) if i % 2 else ())))
        other = request_of(f"w{i}", i, 30, sampling=SAMPLED)
        windows.append(verifier.submit(window_of(other, lab.oracle(other).tokens[:2], (7, 8))))
        for _ in range(i % 3):
            verifier.step()
    for more in (30, 10, 10, 60):
        for reader in reversed(readers):
            verifier.renew(reader.request.request_id, len(reader.request.prompt) + more)
        run(verifier, 7)
    run(verifier)
    for reader in readers:
        check(lab, reader)
    assert all(isinstance(w.result(0), Commit) for w in windows)
    assert (verifier.stats().preemptions > 0) == (kv_tokens == 160)
    assert not pipelined or (late.runner.fed > 30 and late.runner.most_in_flight == 2)
    for reader in readers:
        verifier.release(reader.request.request_id)
        verifier.release("w" + reader.request.request_id[1:])
    run(verifier)
    check_pool(verifier._pool)
    assert verifier._pool.held == 0


@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_stop_id_ends_it(lab: Lab, at: int) -> None:
    """The verifier learns of it one step late; the row that was asked for behind it is never seen."""
    plain = request_of("r", 2)
    want = lab.oracle(plain).tokens
    stop = want[at]
    reader, verifier = followed(lab, replace(plain, stop_token_ids=(stop,)), 40)
    assert tuple(reader.tokens) == want[: want.index(stop) + 1]
    check(lab, reader)
    verifier.renew("r", 300)
    run(verifier)
    check(lab, reader)


def test_it_ends_at_its_length_and_no_row_is_planned_behind(lab: Lab) -> None:
    late = Lates()
    reader, verifier = followed(lab, request_of("r", 3, length=20, max_tokens=10), 64, late)
    check(lab, reader)
    assert verifier.stats().rows == 20 + 9


def test_after_a_mismatch_it_goes_on_from_its_correction(lab: Lab) -> None:
    request = request_of("r", 4)
    want, verifier, reader = lab.oracle(request).tokens, lab.verifier(wrap=Lates()), Reader(request)
    wrong = (want[2] + 1) % 300
    reader.follow(verifier, 20, (*want[:2], wrong, *want[3:6]))
    run(verifier)
    check(lab, reader, 2 + 1 + 20)


def test_release_in_the_middle_frees_everything(lab: Lab) -> None:
    verifier = lab.verifier(wrap=Lates())
    readers = [Reader(request_of(f"r{i}", i)) for i in range(3)]
    for reader in readers:
        reader.follow(verifier, 40)
    run(verifier, 9)
    known = [len(r.tokens) for r in readers]
    assert all(known)
    for reader in readers:
        verifier.release(reader.request.request_id)
    run(verifier)
    assert [len(r.tokens) for r in readers] == known
    assert verifier._pool.held == 0
    check_pool(verifier._pool)
    told: list[bool] = []
    verifier.renew("r0", 99, told.append)
    verifier.step()
    assert told == [False]


def test_a_new_window_takes_the_place_of_the_older_follower(lab: Lab) -> None:
    verifier = lab.verifier(wrap=Lates())
    old, new = Reader(request_of("r", 5)), Reader(request_of("r", 5))
    old.follow(verifier, 40)
    run(verifier, 9)
    seen = old.answers
    new.tokens, new.logprobs = list(old.tokens), list(old.logprobs)
    new.follow(verifier, 47 - len(new.tokens))
    run(verifier)
    check(lab, new)
    assert old.answers == seen
    assert verifier.stats().cached_rows > 0


@pytest.mark.parametrize("control", [False, True])
def test_so_does_a_window_without_credit(lab: Lab, monkeypatch: pytest.MonkeyPatch, control: bool) -> None:
    """What was computed is used, and nothing is decoded beside it. A cold window is an audit's, and takes
    nobody's place."""
    if control:
        monkeypatch.setattr(Followers, "retire", lambda *_: None)
    verifier, request = lab.verifier(wrap=Lates()), request_of("r", 5)
    reader = Reader(request)
    reader.follow(verifier, 40)
    run(verifier, 9)
    cold = verifier.submit(window_of(request, []), cold=True)
    run(verifier, 3)
    seen = reader.answers
    assert seen > 9
    output = list(reader.tokens)
    later = verifier.submit(window_of(request, output))
    run(verifier)
    commits = [f.result() for f in (cold, later)]
    assert [c.next_token for c in commits if isinstance(c, Commit)] == [
        lab.oracle(request).tokens[0], lab.oracle(request).tokens[len(output)]
    ]  # fmt: skip
    if not control:
        assert reader.answers == seen
        assert not len(verifier._followers)
        assert isinstance(commits[1], Commit) and commits[1].timings.cached_rows > len(request.prompt)
        verifier.release("r")
        run(verifier)
        check_pool(verifier._pool)
    else:
        assert reader.answers > seen


def test_who_is_out_of_credit_may_lose_its_kv(lab: Lab) -> None:
    reader, verifier = followed(lab, request_of("r", 6), 5)
    verifier._store.release("r")
    assert verifier._pool.held == 0
    for block in list(verifier._pool._idle):  # what the cache still has of it is lost, too
        verifier._pool._unpublish(block)
        del verifier._pool._idle[block]
        verifier._pool._free.append(block)
    told: list[bool] = []
    verifier.renew("r", 999, told.append)
    run(verifier)
    check(lab, reader)
    assert told == [True]


def test_a_failed_step_is_told_and_a_new_window_goes_on(lab: Lab) -> None:
    verifier = lab.verifier(wrap=lambda runner: LateRunner(runner, fail_at=8))
    reader = Reader(request_of("r", 7))
    reader.follow(verifier, 47)
    run(verifier)
    assert [type(e) for e in reader.errors] == [StepFailed]
    assert 0 < len(reader.tokens) < 48
    reader.errors.clear()
    reader.follow(verifier, 47)
    run(verifier)
    check(lab, reader)
    check_pool(verifier._pool)


def test_closing_says_so(lab: Lab) -> None:
    verifier = lab.verifier(wrap=Lates()).start()
    readers = [Reader(request_of(f"r{i}", 8, max_tokens=700)) for i in range(2)]
    readers[0].follow(verifier, 690)
    readers[1].follow(verifier, 3)
    assert wait_until(lambda: len(readers[0].tokens) > 3 and len(readers[1].tokens) == 4)
    verifier.close()
    assert [type(e) for r in readers for e in r.errors] == [VerifierUnavailable] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"credit": -1},
        {"credit": 5, "max_len": 0},
        {"credit": 5, "score": True},
        {"max_len": 769},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (1 << 20,)},
    ],
)
def test_what_can_never_be_followed_is_refused(lab: Lab, changes: dict[str, Any]) -> None:
    verifier, reader = lab.verifier(), Reader(request_of("r", 9))
    verifier.follow(replace(reader.window(1), **changes), reader)
    run(verifier)
    assert [type(e) for e in reader.errors] == [Failure]


def test_what_never_fits_the_cache_is_refused_and_what_just_fits_ends(lab: Lab) -> None:
    verifier = lab.verifier(64, wrap=Lates())
    for length, fits in ((45, True), (46, False)):
        reader = Reader(request_of(f"r{length}", 9, length=20, max_tokens=length))
        reader.follow(verifier, 100)
        run(verifier)
        assert bool(reader.errors) != fits
        if fits:
            check(lab, reader)


# ---- broken versions


class FedOneRowOff(LateRunner):
    """A stale token: of the neighbouring row."""

    def _fed(self, s: SequenceRows) -> SequenceRows:
        return super()._fed(replace(s, feed=(s.feed + 1) % len(self._tokens)) if s.feed >= 0 else s)


class FedOneStepLate(LateRunner):
    """A stale token: of the step before."""

    def _compute(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        newest, self._tokens = self._tokens, getattr(self, "_older", self._tokens)
        results = super()._compute(bucket, sequences)
        self._older = newest
        return results


@pytest.mark.parametrize("broken", [FedOneRowOff, FedOneStepLate])
def test_control_a_stale_token_is_noticed(lab: Lab, broken: type[LateRunner]) -> None:
    verifier = lab.verifier(wrap=Lates(broken))
    readers = [Reader(request_of(f"r{i}", i)) for i in range(3)]
    for reader in readers:
        reader.follow(verifier, 40)
    run(verifier)
    assert any(tuple(r.tokens) != lab.oracle(r.request).tokens[:41] for r in readers)


def test_control_a_wrong_position_in_the_noise_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of("r", 1)
    lab.oracle(request)
    right = SequenceRows.draw_at

    def one_too_late(self: SequenceRows, position: int) -> Draw:
        draw = right(self, position)
        return replace(draw, history=range(len(draw.history) + 1)) if self.count == 1 else draw

    monkeypatch.setattr(SequenceRows, "draw_at", one_too_late)
    reader, _ = followed(lab, request, 40)
    assert tuple(reader.tokens) != lab.oracle(request).tokens[:41]


def test_control_a_row_past_the_end_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = request_of("r", 2)
    stop = lab.oracle(plain).tokens[9]
    let_go = Followers._let_go

    def keeps(self: Followers, d: Decode, keep: bool) -> None:
        let_go(self, d, keep)
        d.abandoned = False

    monkeypatch.setattr(Followers, "_let_go", keeps)
    verifier, reader = lab.verifier(wrap=Lates()), Reader(replace(plain, stop_token_ids=(stop,)))
    reader.follow(verifier, 40)
    with suppress(KeyError):  # it is let go a second time
        run(verifier)
    assert tuple(reader.tokens) != lab.oracle(reader.request).tokens
