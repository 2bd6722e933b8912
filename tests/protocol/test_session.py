"""Properties of the session over random candidates, schedules, lost calls and late outputs; broken
sessions fail."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.config import SessionSettings
from llm42.protocol import Commit, FinishReason, Request, VerifyTimings, Window
from llm42.session.actions import Action, Emit, Extend, Rollback
from llm42.session.machine import Session
from tests.protocol.session_model import END, PROMPT, VOCAB, canonical, play, verify

LENGTHS = st.integers(1, 128)


def config(length: int = 7, lookahead: int = 128) -> SessionSettings:
    return SessionSettings(
        min_window=min(length, lookahead), start_window=length, max_window=length, lookahead=lookahead
    )


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 0.98, 1.0]),
    max_tokens=st.integers(1, 90),
    length=LENGTHS,
)
def test_every_property_holds(seed: int, accuracy: float, max_tokens: int, length: int) -> None:
    assert play(seed, accuracy, max_tokens, config(length)) == []


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), lookahead=st.integers(1, 20))
def test_a_small_lookahead_changes_nothing(seed: int, lookahead: int) -> None:
    assert play(seed, 0.9, 50, config(min(7, lookahead), lookahead)) == []


# ---- planted sessions: each must be noticed by the very same checker


class EmitsCandidates(Session):
    """Shows candidates as they come."""

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        actions = super().candidates(epoch, start, tokens)
        return [*actions, Emit(tuple(tokens), ())] if epoch == self.epoch else actions


class NeverRollsBack(Session):
    """Goes on after a mismatch as if nothing had happened."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        return [a for a in super().commit(commit, now) if not isinstance(a, Rollback)]


class IgnoresTheCorrection(Session):
    """Commits the fast path's token where the verifier's differs."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        wrong = (*self.in_flight.candidates, commit.next_token)[commit.accepted]
        return super().commit(replace(commit, next_token=wrong), now)


class LastPositionIsNoMismatch(Session):
    """The reference's first defect: a mismatch at a window's last position leaves the fast path's token
    standing."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        sent = self.in_flight.candidates
        if commit.accepted == len(sent) - 1:
            commit = replace(commit, next_token=sent[-1])
        return super().commit(commit, now)


class StaleFinish(Session):
    """The reference's second defect: an end-of-text candidate ends the output although it is rolled back."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        seen = END in self.in_flight.candidates
        actions = super().commit(commit, now)
        if seen:
            self.finish = self.finish or FinishReason.STOP
        return actions


class CutsTheWrongTokens(Session):
    """The reference's third defect: with more candidates than a window, the cut is counted from the tail."""

    def _roll_back(self, lost: int) -> Rollback:
        keep = self.proposed[lost // 2 :][:1]
        action = super()._roll_back(lost)
        self.committed += keep
        return action


class LosesTheBonus(Session):
    """Drops the verifier's token after a full match."""

    def _append(self, tokens: Sequence[int], logprobs: Sequence[object]) -> Emit:
        full = self.in_flight is None and len(tokens) > 1
        cut = tokens[:-1] if full else tokens
        return super()._append(cut, logprobs[: len(cut)])  # type: ignore[arg-type]


class RunsOn(Session):
    """Extra tokens after the end (the reference's checker does not see them)."""

    def _append(self, tokens: Sequence[int], logprobs: Sequence[object]) -> Emit:
        before = len(self.committed)
        super()._append(tokens, logprobs)  # type: ignore[arg-type]
        self.committed[before:] = tokens
        return Emit(tuple(tokens), tuple(logprobs))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "planted",
    [
        EmitsCandidates,
        NeverRollsBack,
        IgnoresTheCorrection,
        LastPositionIsNoMismatch,
        StaleFinish,
        CutsTheWrongTokens,
        LosesTheBonus,
        RunsOn,
    ],
)
def test_control_planted_sessions_are_noticed(planted: type[Session]) -> None:
    def fails(seed: int) -> bool:
        try:
            return bool(play(seed, 0.8, 60, config(7), make=planted))
        except (AssertionError, ValueError, IndexError):
            return True  # the session's own invariants noticed

    assert any(fails(seed) for seed in range(40))


def test_control_a_verifier_that_accepts_everything_is_noticed() -> None:
    def accept(window: Window) -> Commit:
        real = verify(window)
        count = len(window.candidates)
        return replace(real, accepted=count, logprobs=(real.logprobs * (count + 1))[: count + 1])

    assert any(play(seed, 0.8, 60, config(7), answer=accept) for seed in range(5))


# ---- single cases


@dataclass
class Made:
    session: Session
    right: list[int]


def made(max_tokens: int = 50, length: int = 4) -> Made:
    request = Request("r", PROMPT, max_tokens, deterministic=True)
    right = list(PROMPT)
    while len(right) < len(PROMPT) + 60:
        right.append(canonical(right))
    return Made(Session(request, config(length), 0.0), right[len(PROMPT) :])


def test_an_equal_bonus_is_not_sent_again() -> None:
    m = made()
    assert m.session.candidates(0, 0, m.right[:6]) == []
    window = m.session.due(0.0)
    assert window is not None
    assert len(window.candidates) == 4
    emit, extend = m.session.commit(verify(window), 1.0)
    assert isinstance(emit, Emit)
    assert emit.tokens == tuple(m.right[:5])
    assert isinstance(extend, Extend)
    assert m.session.proposed == m.right[5:6]
    assert m.session.stats.rollbacks == 0


def test_a_different_bonus_is_a_rollback_and_counted() -> None:
    m = made()
    m.session.candidates(0, 0, [*m.right[:4], m.right[4] + 1, 7])
    window = m.session.due(0.0)
    assert window is not None
    _, rollback = m.session.commit(verify(window), 1.0)
    assert isinstance(rollback, Rollback)
    assert rollback.output == tuple(m.right[:5])
    assert (m.session.stats.rollbacks, m.session.stats.rolled_back_tokens) == (1, 2)


def test_a_bonus_the_fast_path_has_not_reached_is_compared_when_it_comes() -> None:
    m = made()
    m.session.candidates(0, 0, m.right[:4])
    window = m.session.due(0.0)
    assert window is not None
    m.session.commit(verify(window), 1.0)
    (rollback,) = m.session.candidates(0, 4, [m.right[4] + 1])
    assert isinstance(rollback, Rollback)
    assert rollback.output == tuple(m.right[:5])
    assert m.session.candidates(0, 5, [1]) == []  # an old epoch's output is ignored
    assert m.session.proposed == []


def test_a_bonus_past_the_end_is_dropped() -> None:
    m = made(max_tokens=4)
    m.session.candidates(0, 0, m.right[:4])
    window = m.session.due(0.0)
    assert window is not None
    (emit,) = m.session.commit(verify(window), 1.0)
    assert isinstance(emit, Emit)
    assert emit.tokens == tuple(m.right[:4])
    assert m.session.finish is FinishReason.LENGTH


def test_the_replaced_token_counts_as_rolled_back() -> None:
    m = made()
    m.session.candidates(0, 0, [*m.right[:3], m.right[3] + 1])
    window = m.session.due(0.0)
    assert window is not None
    _, rollback = m.session.commit(verify(window), 1.0)
    assert isinstance(rollback, Rollback)
    assert m.session.stats.rolled_back_tokens == 1


def test_the_deadline_sends_a_short_window() -> None:
    m = made(length=30)
    m.session.candidates(0, 0, m.right[:2])
    assert m.session.due(0.0) is None
    deadline = m.session.deadline(0.0)
    assert deadline is not None
    assert m.session.wanted(0.0) == m.session.target
    assert m.session.wanted(deadline) == 0, "whatever comes is sent now"
    assert m.session.deadline(deadline) is None
    window = m.session.due(deadline)
    assert window is not None
    assert window.candidates == tuple(m.right[:2])
    assert m.session.deadline(0.0) is None
    assert m.session.wanted(deadline) == float("inf")


class WantsMore(Session):
    """Has candidates handed over a token too late."""

    def wanted(self, now: float) -> float:
        wanted = super().wanted(now)
        return wanted + 1 if wanted else 0


def _first_windows(
    kind: type[Session], seed: int, accuracy: float, ends: tuple[int, ...] = ()
) -> list[tuple[int, int]]:
    """For each window of an output: after how many output tokens it is sent, and after how many when tokens
    are handed over only from `wanted` on (or with an end token, or at the bound), joined."""
    rng, sent = random.Random(seed), []
    session = kind(Request("r", PROMPT, 120, stop_token_ids=ends, deterministic=True), config(7, 24), 0.0)
    while not session.done:
        eager, waiting = copy.deepcopy(session), list[int]()
        first: int | None = None
        window = session.due(0.0)
        while window is None:
            at = session._fast + len(waiting)
            right = canonical((*PROMPT, *eager.committed, *eager.proposed))
            if at < len(eager.committed):
                right = eager.committed[at]
            token = right if rng.random() < accuracy else rng.randrange(VOCAB)
            waiting.append(token)
            if eager.candidates(eager.epoch, at, (token,)):  # not what is committed there: both start anew
                assert session.candidates(session.epoch, at, (token,))
                waiting.clear()
                continue
            if first is None and eager.due(0.0) is not None:
                first = at + 1
            if at + 1 >= session.wanted(0.0) or token in ends or at + 1 == session.limit:
                assert not session.candidates(session.epoch, session._fast, tuple(waiting))
                waiting.clear()
                window = session.due(0.0)
        sent.append((session._fast if first is None else first, session._fast))
        session.commit(verify(window), 0.0)
    return sent


@pytest.mark.parametrize("ends", [(), (END,)])
@pytest.mark.parametrize("accuracy", [1.0, 0.95, 0.5])
def test_candidates_that_are_handed_over_late_delay_no_window(accuracy: float, ends: tuple[int, ...]) -> None:
    sent = [pair for seed in range(40) for pair in _first_windows(Session, seed, accuracy, ends)]
    assert len(sent) >= (40 if ends else 400)
    assert all(eager == joined for eager, joined in sent)


def test_control_handed_over_a_token_later_they_do() -> None:
    sent = [pair for seed in range(40) for pair in _first_windows(WantsMore, seed, 1.0)]
    assert any(eager < joined for eager, joined in sent)


def test_the_target_follows_acceptance_and_the_queue() -> None:
    request = Request("r", PROMPT, 500, deterministic=True)
    session = Session(request, SessionSettings(), 0.0)
    right = list(PROMPT)
    start = session.target
    for _ in range(start + 1):
        right.append(canonical(right))
    session.candidates(0, 0, right[len(PROMPT) :])
    window = session.due(0.0)
    assert window is not None
    session.commit(verify(window), 0.0)
    assert session.target == 2 * start + 1
    session.candidates(0, start + 1, [session.committed[-1], *[VOCABLESS] * 40])
    window = session.due(9.0)
    assert window is not None
    session.commit(verify(window), 9.0)
    assert session.target == start
    session.candidates(session.epoch, len(session.committed), [VOCABLESS] * 40)
    window = session.due(99.0)
    assert window is not None
    slow = replace(verify(window), timings=VerifyTimings(queue_s=5.0))
    session.commit(slow, 99.0)
    assert session.target == 2 * start + 1


VOCABLESS = 255
"""A token the canonical function never gives."""


def test_a_commit_for_another_window_is_refused() -> None:
    m = made()
    m.session.candidates(0, 0, m.right[:4])
    window = m.session.due(0.0)
    assert window is not None
    with pytest.raises(ValueError, match="does not answer"):
        m.session.commit(replace(verify(window), base=99), 1.0)


@pytest.mark.parametrize(("accepted", "logprobs"), [(5, 6), (-1, 0), (4, 4), (2, 5)])
def test_a_commit_that_cannot_answer_the_window_is_refused(accepted: int, logprobs: int) -> None:
    """Four candidates: more accepted than were sent, or not one log-probability per token."""
    m = made()
    m.session.candidates(0, 0, m.right[:4])
    window = m.session.due(0.0)
    assert window is not None
    right = verify(window)
    wrong = replace(right, accepted=accepted, logprobs=(right.logprobs * 2)[:logprobs])
    with pytest.raises(ValueError, match="does not answer a window of 4"):
        m.session.commit(wrong, 1.0)
    assert m.session.committed == []
