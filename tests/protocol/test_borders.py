"""Ends of the output at, just before and just after a window's border, for every window length."""

from __future__ import annotations

import pytest

from llm42.config import SessionSettings
from llm42.protocol import Commit, FinishReason, Request, Window
from llm42.session.actions import Action, Emit, Rollback
from llm42.session.machine import Session
from tests.protocol.session_model import PROMPT, canonical, verify

STOP = 255
"""A stop token that the model gives only where a test puts it."""


def right_output(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(canonical(tokens))
    return tokens[len(PROMPT) :]


RIGHT = right_output(2 * 128 + 4)


def run(
    length: int,
    max_tokens: int,
    stop_at: int | None,
    wrong_at: int | None = None,
    make: type[Session] = Session,
) -> Session:
    """Feeds candidates until the session ends; checks what is emitted after each commit. The canonical
    output is RIGHT with STOP at `stop_at`; the fast path's differs at `wrong_at`, where it proposes STOP."""
    truth = [STOP if i == stop_at else t for i, t in enumerate(RIGHT)]
    settings = SessionSettings(
        min_window=length, start_window=length, max_window=length, lookahead=length + 2
    )
    request = Request("r", PROMPT, max_tokens, deterministic=True, stop_token_ids=(STOP,))
    session, shown, now = make(request, settings, 0.0), [], 0.0
    parked = False
    told = 0
    while not session.finish:
        while told < session.limit and not parked:
            token = STOP if told == wrong_at else truth[told]
            session.candidates(session.epoch, told, (token,))
            told, parked = told + 1, token == STOP
        now += 1.0
        window = session.due(now)
        assert window is not None, "no progress"
        emit, *rest = session.commit(answer(window, truth), now)
        assert isinstance(emit, Emit) and emit.tokens
        shown += emit.tokens
        for action in rest:
            if isinstance(action, Rollback):
                told, parked, wrong_at = len(action.output), False, None
    assert shown == session.committed
    return session


def answer(window: Window, truth: list[int]) -> Commit:
    """As `verify`, for a truth with a stop token in it."""
    begin = len(window.tokens) - len(PROMPT)
    accepted = 0
    while accepted < len(window.candidates) and window.candidates[accepted] == truth[begin + accepted]:
        accepted += 1
    made = verify(Window("r", PROMPT, len(PROMPT), tuple(RIGHT[:accepted]), window.sampling))
    return Commit("r", len(window.tokens), accepted, truth[begin + accepted], made.logprobs, "fp")


LENGTHS = [1, 2, 3, 7, 8, 31, 63, 64, 127, 128]


@pytest.mark.parametrize("length", range(1, 129))
def test_every_window_length_gives_the_same_output(length: int) -> None:
    session = run(length, 130, None)
    assert (session.committed, session.finish) == (RIGHT[:130], FinishReason.LENGTH)
    assert session.stats.rollbacks == 0


@pytest.mark.parametrize("beside", [-1, 0, 1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_max_tokens_beside_a_border(length: int, beside: int) -> None:
    for windows in (1, 2):
        most = max(1, windows * length + beside)
        session = run(length, most, None)
        assert (session.committed, session.finish) == (RIGHT[:most], FinishReason.LENGTH)


@pytest.mark.parametrize("beside", [-1, 0, 1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_stop_token_beside_a_border(length: int, beside: int) -> None:
    for windows in (1, 2):
        at = max(0, windows * length - 1 + beside)
        session = run(length, 2 * 128 + 4, at)
        assert (session.committed, session.finish) == ([*RIGHT[:at], STOP], FinishReason.STOP)


@pytest.mark.parametrize("beside", [-1, 0, 1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_refused_stop_token_beside_a_border_ends_nothing(length: int, beside: int) -> None:
    at, most = max(0, length - 1 + beside), 2 * length + 2
    session = run(length, most, None, wrong_at=at)
    assert (session.committed, session.finish) == (RIGHT[:most], FinishReason.LENGTH)
    if at < most:
        assert session.stats.rollbacks == 1
        assert session.stats.rolled_back_tokens == 1, "the fast path parks behind its end token"


def test_an_end_of_length_wins_only_when_the_last_token_is_no_stop_token() -> None:
    assert run(4, 5, 4).finish is FinishReason.STOP
    assert run(4, 5, 5).finish is FinishReason.LENGTH


class DropsTheEndOnABorder(Session):
    """Takes no notice of a stop token that comes as the verifier's own token after a full match."""

    def commit(self, commit: Commit, now: float) -> list[Action]:
        assert self.in_flight is not None
        full = commit.accepted == len(self.in_flight.candidates)
        actions = Session.commit(self, commit, now)
        if full and commit.next_token == STOP:
            self.finish = None
        return actions


def test_control_a_border_case_is_noticed() -> None:
    """Just after the border and nowhere else: the fast path has parked there, and nothing follows."""
    for at in (2, 3, 5):
        assert run(4, 20, at, make=DropsTheEndOnABorder).committed == [*RIGHT[:at], STOP]
    with pytest.raises(AssertionError, match="no progress"):
        run(4, 20, 4, make=DropsTheEndOnABorder)
