"""Known defects of decode-verify-rollback implementations, planted one by one into a session that is right
otherwise: the checker of the session's properties notices each, and says what is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from llm42.config import SessionSettings
from llm42.protocol import Commit, FinishReason, TokenLogprob, Window
from llm42.session.actions import Action, Emit, Extend, Rollback
from llm42.session.machine import Session
from tests.protocol.session_model import END, VOCAB, play, verify
from tests.support import Answer, differences

SETTINGS = SessionSettings(min_window=3, start_window=7, max_window=7, lookahead=24)
"""Lookahead of several windows, so that more than one window of candidates is often unverified."""


def broken_properties(
    make: Callable[..., Session] = Session, answer: Callable[[Window], Commit] = verify, runs: int = 60
) -> set[str]:
    """What `play` reports over some schedules; an assertion inside the session counts as noticed there."""
    found: set[str] = set()
    for seed in range(runs):
        try:
            found.update(play(seed, 0.85, 60, SETTINGS, make, answer))
        except (AssertionError, IndexError) as error:
            found.add(f"the session's own check: {error!r}")
    return found


def test_the_session_itself_has_none_of_them() -> None:
    assert broken_properties() == set()


class LastPositionIsNoMismatch(Session):
    """A mismatch at the last position of all candidates counts as zero tokens to roll back, so the fast
    path keeps its own token as the next input. The output heals in the next window."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        sent = len(self.in_flight.candidates)
        if commit.accepted != sent - 1 or len(self.proposed) != sent:
            return Session.commit(self, commit, now)
        epoch, rollbacks, lost = self.epoch, self.stats.rollbacks, self.stats.rolled_back_tokens
        actions = Session.commit(self, commit, now)
        self.epoch, self.stats.rollbacks, self.stats.rolled_back_tokens = epoch, rollbacks, lost
        return [Extend(self.limit) if isinstance(a, Rollback) else a for a in actions]


class ReplacedTokenIsNotCounted(Session):
    """The same arithmetic in the counters only."""

    def _roll_back(self, lost: int) -> Rollback:
        return Session._roll_back(self, lost - 1)


@dataclass(slots=True)
class StaleFinish(Session):
    """The length at which an end-of-text candidate was seen outlives its rollback and cuts the output."""

    finished_length: int = field(default=10**9)

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        if epoch == self.epoch and END in tokens:
            self.finished_length = min(self.finished_length, start + list(tokens).index(END) + 1)
        return Session.candidates(self, epoch, start, tokens)

    def _append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Emit:
        emit = Session._append(self, tokens, logprobs)
        if self.finish is None or self.finished_length >= len(self.committed):
            return emit
        keep = max(0, len(emit.tokens) - (len(self.committed) - self.finished_length))
        return Emit(emit.tokens[:keep], emit.logprobs[:keep])


class CutsFromTheTail(Session):
    """Drops as many tokens from the end of everything decoded as the window lost: the wrong ones when more
    than one window is unverified."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        lost = len(self.in_flight.candidates) - commit.accepted
        decoded = [*self.committed, *self.proposed]
        emit, *rest = Session.commit(self, commit, now)
        if lost and rest and isinstance(rest[0], Rollback):
            output = [*decoded[: len(decoded) - lost], commit.next_token]
            self.proposed, self._fast = output[len(self.committed) :], len(output)
            rest = [replace(rest[0], output=tuple(output))]
        return [emit, *rest]


class RunsOn(Session):
    """Tokens after the end of the output are emitted too."""

    def _append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Emit:
        before = len(self.committed)
        Session._append(self, tokens, logprobs)
        self.committed[before:] = tokens
        return Emit(tuple(tokens), tuple(logprobs))


class EmitsCandidates(Session):
    """Shows tokens before they are committed."""

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        current = epoch == self.epoch
        actions = Session.candidates(self, epoch, start, tokens)
        return [*actions, Emit(tuple(tokens), ())] if current else actions


class NeverRollsBack(Session):
    """Takes the correction, but leaves the fast path on its own tokens."""

    def _roll_back(self, lost: int) -> Rollback:
        epoch, rollback = self.epoch, Session._roll_back(self, lost)
        self.epoch = epoch
        return rollback

    def commit(self, commit: Commit, now: float) -> list[Action]:
        return [a for a in Session.commit(self, commit, now) if not isinstance(a, Rollback)]


class IgnoresADifferentBonus(Session):
    """Compares candidates with the verifier only inside the window."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        sent = len(self.in_flight.candidates)
        if commit.accepted == sent and len(self.proposed) > sent:
            self.proposed[sent] = commit.next_token
        return Session.commit(self, commit, now)


class LosesTheBonus(Session):
    """Drops the verifier's own token after a full match."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        full = commit.accepted == len(self.in_flight.candidates)
        actions = Session.commit(self, commit, now)
        emit = actions[0]
        if full and isinstance(emit, Emit) and len(emit.tokens) == commit.accepted + 1:
            actions[0] = Emit(emit.tokens[:-1], emit.logprobs[:-1])
        return actions


class StopsOnCandidates(Session):
    """Ends when the fast path proposes an end token, before the verifier has agreed."""

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        actions = Session.candidates(self, epoch, start, tokens)
        if epoch == self.epoch and END in tokens:
            self.finish = self.finish or FinishReason.STOP
        return actions


class TakesStaleEpochs(Session):
    """Late outputs from before a rollback count as new ones."""

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        return Session.candidates(self, self.epoch, self._fast, tokens)


class SendsTwoWindows(Session):
    """Forgets that a window is in flight."""

    def due(self, now: float) -> Window | None:
        before, self.in_flight = self.in_flight, None
        window = Session.due(self, now)
        if window is None:
            self.in_flight = before
        return window


class NoLookaheadBound(Session):
    """Lets the fast path run to the end."""

    @property
    def limit(self) -> int:
        return self.request.max_tokens


PLANTED = {
    LastPositionIsNoMismatch: "the fast path goes on from tokens that are not committed",
    ReplacedTokenIsNotCounted: "rolled_back_tokens is",
    StaleFinish: "instead of [",
    CutsFromTheTail: "the fast path goes on from tokens that are not committed",
    RunsOn: "instead of [",
    EmitsCandidates: "something was emitted that is not committed",
    NeverRollsBack: "a rollback is missing",
    IgnoresADifferentBonus: "a rollback is missing",
    LosesTheBonus: "instead of [",
    StopsOnCandidates: "instead of [",
    TakesStaleEpochs: "rollback",
    SendsTwoWindows: "two windows in flight",
    NoLookaheadBound: "the fast path is beyond the lookahead bound",
}


@pytest.mark.parametrize(("planted", "symptom"), PLANTED.items(), ids=lambda p: getattr(p, "__name__", ""))
def test_control_a_planted_defect_is_noticed(planted: type[Session], symptom: str) -> None:
    found = broken_properties(planted)
    assert any(symptom in text for text in found), sorted(found)[:5]


def accepts_everything(window: Window) -> Commit:
    """A verifier that never looks."""
    real, count = verify(window), len(window.candidates)
    spread = (real.logprobs * (count + 1))[: count + 1]
    return replace(real, accepted=count, logprobs=spread)


def depends_on_the_window(window: Window) -> Commit:
    """A verifier whose bits follow the row's place in the window: rows from the fifth on give another
    token."""
    real = verify(window)
    if real.accepted < 4:
        return real
    return replace(real, next_token=(real.next_token + 1) % VOCAB)


@pytest.mark.parametrize("answer", [accepts_everything, depends_on_the_window])
def test_control_a_wrong_verifier_is_noticed(answer: Callable[[Window], Commit]) -> None:
    assert any("instead of [" in text for text in broken_properties(answer=answer))


def test_extra_tail_tokens_are_a_difference() -> None:
    """Measuring the first mismatch against the first run's length, as one published check does, sees
    nothing here."""
    first = Answer((5, 6, 7), tuple(TokenLogprob(t, -1.0) for t in (5, 6, 7)), "abc", FinishReason.LENGTH)
    later = replace(
        first, tokens=(*first.tokens, 8), logprobs=(*first.logprobs, TokenLogprob(8, -1.0)), text="abcd"
    )
    equal = [a == b for a, b in zip(first.tokens, later.tokens, strict=False)]
    assert len(first.tokens) - equal.count(True) == 0
    assert differences(later, first) == [
        "4 tokens instead of 3",
        "4 logprobs instead of 3",
        "text 'abcd' instead of 'abc'",
    ]
    assert differences(first, later)
    assert not differences(first, replace(first))
