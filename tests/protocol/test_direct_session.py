"""Properties of a session in mode direct: whatever becomes of its verifier's commits, the output is the
oracle's, no token comes twice or is left out; broken sessions fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.config import SessionSettings
from llm42.protocol import Commit, FinishReason, Request
from llm42.session.actions import Action, Emit, Extend, Renew, Resend, Rollback
from llm42.session.machine import Session
from tests.protocol.direct_model import commit_of, play_direct
from tests.protocol.session_model import END, PROMPT, VOCAB, canonical, play, verify


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_tokens=st.integers(1, 90),
    credit=st.integers(1, 64),
    output=st.sampled_from([0, 0, 1, 7]),
)
def test_every_property_holds(seed: int, max_tokens: int, credit: int, output: int) -> None:
    assert play_direct(seed, max_tokens, credit, output=output) == []


class AppendsBehindAGap(Session):
    """Takes a commit for what comes next although one before it is missing."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        stands = len(PROMPT) + len(self.committed)
        return super().commit(replace(commit, base=min(commit.base, stands)), now)


class AppendsRepeats(Session):
    """Takes a commit for what comes next although it was there before."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        stands = len(PROMPT) + len(self.committed)
        return super().commit(replace(commit, base=max(commit.base, stands)), now)


class LowersItsRenewals(Session):
    """Counts credit from where it was counted before."""

    def _renewals(self) -> list[Action]:
        return [Renew(a.until - self.credit) for a in super()._renewals() if isinstance(a, Renew)]


class NeverRenews(Session):
    """Leaves the verifier to its first credit: it is asked again only when the time is over."""

    def _renewals(self) -> list[Action]:
        return []


class SkipsTheOverlap(Session):
    """Leaves out a whole commit when its beginning is known."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        if commit.base < len(PROMPT) + len(self.committed):
            return []
        return super().commit(commit, now)


@pytest.mark.parametrize("planted", [AppendsBehindAGap, AppendsRepeats, LowersItsRenewals])
def test_control_planted_sessions_are_noticed(planted: type[Session]) -> None:
    def fails(seed: int) -> bool:
        try:
            return bool(play_direct(seed, 60, 8, make=planted))
        except ValueError:
            return True  # the session's own checks noticed

    assert any(fails(seed) for seed in range(40))


def windows_of(kind: type[Session]) -> int:
    """How many windows it needs for 45 tokens that come in threes, one after the other."""
    session = kind(Request("r", PROMPT, 45, deterministic=True), DIRECT, 0.0)
    told = until = len(PROMPT)
    for turn in range(1000):
        if session.finish:
            return session.stats.windows
        if window := session.due(0.0):
            told, until = len(window.tokens), len(window.tokens) + 1 + window.credit
        end = min(told + 3, until)
        actions = session.commit(commit_of(RIGHT, told, end), 0.0) if end > told else []
        told = end
        until = max([until, *(a.until for a in actions if isinstance(a, Renew))])
        if not actions and turn % 5 == 0:
            session.lost()
    raise AssertionError


def test_one_window_does_when_nothing_is_lost() -> None:
    assert windows_of(Session) == 1


@pytest.mark.parametrize("kind", [NeverRenews, SkipsTheOverlap])
def test_what_a_request_costs_without_renewals(kind: type[Session]) -> None:
    """The control: without renewals credit ends again and again. Overlaps do not matter here."""
    assert (windows_of(kind) > 3) == (kind is NeverRenews)


# ---- single cases


def right(count: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        tokens.append(canonical(tokens))
    return tokens


RIGHT, FIRST = right(60), len(PROMPT)
DIRECT = SessionSettings(mode="direct", credit=8)


def begun(max_tokens: int = 50, stop_token_ids: tuple[int, ...] = ()) -> Session:
    request = Request("r", PROMPT, max_tokens, deterministic=True, stop_token_ids=stop_token_ids)
    session = Session(request, DIRECT, 0.0)
    assert session.due(0.0) is not None
    return session


def said(session: Session, begin: int, end: int) -> list[Action]:
    """What becomes of a commit of output tokens begin ... end - 1."""
    return session.commit(commit_of(RIGHT, FIRST + begin, FIRST + end), 1.0)


def test_one_window_is_answered_by_many_commits() -> None:
    session = begun()
    assert [type(a) for a in said(session, 0, 1)] == [Emit]
    assert session.due(9.0) is None, "the verifier goes on by itself"
    assert session.deadline(9.0) is None
    assert session.wanted(9.0) == float("inf")
    emit, renew = said(session, 1, 6)
    assert isinstance(emit, Emit) and emit.tokens == (*RIGHT[FIRST + 1 : FIRST + 6],)
    assert renew == Renew(FIRST + 6 + 8)
    assert session.last_commit == 1.0


def test_credit_is_renewed_when_half_is_used_and_never_beyond_the_end() -> None:
    session = begun(max_tokens=12)
    assert len(said(session, 0, 4)) == 1
    assert said(session, 4, 5)[1:] == [Renew(FIRST + 12)]
    assert len(said(session, 5, 9)) == 1, "nothing is left to ask for"
    assert len(said(session, 9, 12)) == 1
    assert session.finish is FinishReason.LENGTH


def test_a_repeat_does_nothing_and_an_overlap_adds_what_is_new() -> None:
    session = begun()
    said(session, 0, 3)
    assert said(session, 0, 3) == said(session, 1, 2) == []
    (emit, _) = said(session, 1, 5)
    assert isinstance(emit, Emit)
    assert emit.tokens == (*RIGHT[FIRST + 3 : FIRST + 5],)
    assert [p.token for p in emit.logprobs] == list(emit.tokens)


def test_a_gap_is_asked_for_once_and_never_appended() -> None:
    session = begun()
    said(session, 0, 2)
    assert said(session, 3, 4) == [Resend()]
    assert session.committed == RIGHT[FIRST : FIRST + 2]
    window = session.due(1.0)
    assert window is not None and window.tokens == (*RIGHT[: FIRST + 2],)
    assert said(session, 4, 6) == [], "it is under way behind the gap"
    assert session.due(1.0) is None
    assert isinstance(said(session, 2, 7)[0], Emit)
    assert said(session, 9, 11) == [Resend()], "another gap"
    assert session.stats.windows == 2


def test_two_tokens_for_one_place_are_loud() -> None:
    session = begun()
    said(session, 0, 3)
    other = commit_of(RIGHT, FIRST + 1, FIRST + 5)
    with pytest.raises(ValueError, match=f"a broken promise: .* at position {FIRST + 1}"):
        session.commit(replace(other, next_token=(other.next_token + 1) % VOCAB), 1.0)
    assert session.committed == RIGHT[FIRST : FIRST + 3]


@pytest.mark.parametrize(
    "changes", [{"request_id": "s"}, {"base": FIRST - 1}, {"accepted": 1}, {"logprobs": ()}]
)
def test_a_commit_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    session = begun()
    with pytest.raises(ValueError, match="does not answer"):
        session.commit(replace(commit_of(RIGHT, FIRST, FIRST + 2), **changes), 1.0)  # type: ignore[arg-type]
    assert session.committed == []


def test_tokens_past_the_end_are_dropped() -> None:
    session = begun(max_tokens=4)
    (emit,) = said(session, 0, 9)
    assert isinstance(emit, Emit) and emit.tokens == (*RIGHT[FIRST : FIRST + 4],)
    assert said(session, 4, 9) == []
    session = begun(stop_token_ids=(RIGHT[FIRST + 2],))
    (emit,) = said(session, 0, 9)
    assert isinstance(emit, Emit) and len(emit.tokens) == RIGHT[FIRST:].index(RIGHT[FIRST + 2]) + 1
    assert session.finish is FinishReason.STOP
    assert session.stats.direct_tokens == len(emit.tokens)


def test_after_a_stop_from_outside_nothing_comes() -> None:
    session = begun()
    said(session, 0, 2)
    session.stop()
    assert said(session, 2, 6) == []
    assert session.due(1.0) is None


def test_after_a_loss_the_window_comes_in_full_again() -> None:
    session = begun()
    said(session, 0, 5)
    session.lost()
    window = session.due(1.0)
    assert window is not None
    assert (window.tokens, window.credit, window.prompt_len) == ((*RIGHT[: FIRST + 5],), 8, FIRST)
    assert said(session, 5, 6)[1:] == []
    assert said(session, 6, 10)[1:] == [Renew(FIRST + 10 + 8)]


# ---- windows with candidates and credit


def checked(session: Session, decoded: int) -> Commit:
    """The answer to the window that is due, with some tokens decoded after it."""
    window = session.due(9.0)
    assert window is not None and (window.credit, window.max_len) == (session.credit, FIRST + 50)
    commit, tokens = verify(window), (*window.tokens, *window.candidates)
    end = len(window.tokens) + commit.accepted + 1
    assert tokens[: end - 1] == (*RIGHT[: end - 1],)
    more = commit_of(RIGHT, end, end + decoded)
    found = (more.next_token, *more.decoded)
    return replace(commit, logprobs=commit.logprobs + more.logprobs, decoded=found)


def with_candidates(credit: int, *candidates: int) -> Session:
    session = Session(Request("r", PROMPT, 50, deterministic=True), SessionSettings(), 0.0)
    session.credit = credit
    session.candidates(0, 0, candidates)
    return session


def test_decoded_tokens_come_after_the_verifiers_own() -> None:
    session = with_candidates(8, *RIGHT[FIRST : FIRST + 4])
    emit, extend = session.commit(checked(session, 3), 9.0)
    assert isinstance(emit, Emit) and emit.tokens == (*RIGHT[FIRST : FIRST + 8],)
    assert isinstance(extend, Extend)
    assert (session.stats.direct_tokens, session.stats.verified_tokens) == (3, 8)
    assert session.candidates(0, 4, RIGHT[FIRST + 4 : FIRST + 9]) == []
    assert session.proposed == RIGHT[FIRST + 8 : FIRST + 9], "those before were compared as they came"


@pytest.mark.parametrize("wrong", [3, 4, 6])
def test_a_candidate_that_is_not_what_was_decoded_is_a_rollback(wrong: int) -> None:
    """Wrong in the window, at the verifier's own token, or behind it."""
    proposed = RIGHT[FIRST : FIRST + 4]
    session = with_candidates(8, *(proposed if wrong > 3 else [*proposed[:3], END]))
    assert proposed[3] != END
    commit = checked(session, 3)
    later = [*RIGHT[FIRST + 4 : FIRST + wrong], (RIGHT[FIRST + wrong] + 1) % VOCAB]
    if wrong > 3:
        assert session.candidates(0, 4, later) == []
    emit, rollback = session.commit(commit, 9.0)
    assert isinstance(emit, Emit) and isinstance(rollback, Rollback)
    assert rollback.output == (*session.committed,) == (*RIGHT[FIRST : FIRST + len(emit.tokens)],)
    assert (session.stats.rollbacks, session.stats.rolled_back_tokens) == (1, 1)


def test_what_follows_a_window_with_candidates_is_appended() -> None:
    session = with_candidates(8, *RIGHT[FIRST : FIRST + 4])
    session.commit(checked(session, 1), 9.0)
    emit, extend = said(session, 6, 8)
    assert isinstance(emit, Emit) and isinstance(extend, Extend)
    assert session.committed == RIGHT[FIRST : FIRST + 8]


def test_without_credit_nothing_is_decoded() -> None:
    session = with_candidates(0, *RIGHT[FIRST : FIRST + 4])
    window = session.due(9.0)
    assert window is not None and (window.credit, window.stop_token_ids, window.max_len) == (0, (), 0)
    commit, more = verify(window), commit_of(RIGHT, FIRST + 5, FIRST + 6)
    decoded = replace(commit, logprobs=commit.logprobs + more.logprobs, decoded=(more.next_token,))
    with pytest.raises(ValueError, match="does not answer"):
        session.commit(decoded, 9.0)
    assert session.commit(commit, 9.0)
    with pytest.raises(ValueError, match="does not answer this session's window"):
        session.commit(more, 9.0)


def test_the_mode_is_a_setting() -> None:
    assert play(1, 0.9, 40, SessionSettings(min_window=7, start_window=7, max_window=7)) == []
    with pytest.raises(ValueError, match="mode"):
        SessionSettings(mode="both")  # type: ignore[arg-type]
