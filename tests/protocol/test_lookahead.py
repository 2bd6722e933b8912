"""How far the fast path may run ahead, and how windows grow, follow the mismatches seen so far; on the
tokens they have no influence (test_session.py, with these rules as they are)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.events import Costs, Simulation
from benchmarks.simulation.session import Before
from llm42.config import SessionSettings
from llm42.protocol import Commit, Request, VerifyTimings
from llm42.session.actions import Extend, Rollback
from llm42.session.machine import Session
from tests.protocol.session_model import PROMPT, VOCAB, canonical, play, verify

SETTINGS = SessionSettings()


def session_of(make: type[Session] = Session) -> Session:
    return make(Request("r", PROMPT, 10_000, deterministic=True), SETTINGS, 0.0)


def feed(session: Session, right: int, wrong: bool, queue_s: float = 0.0) -> Extend | Rollback:
    """A window of `right` candidates that match and perhaps one that does not."""
    start = len(session.committed)
    tokens = [*PROMPT, *session.committed]
    for _ in range(right):
        tokens.append(canonical(tokens))
    session.candidates(session.epoch, start, [*tokens[len(PROMPT) + start :], *[VOCAB] * wrong])
    window = session.due(session.last_commit + 2 * SETTINGS.commit_deadline_s)
    assert window is not None
    commit = replace(verify(window), timings=VerifyTimings(queue_s=queue_s))
    action = session.commit(commit, session.last_commit)[-1]
    if isinstance(action, Extend):  # the bonus token, which the fast path decodes as well
        session.candidates(session.epoch, len(session.committed) - 1, session.committed[-1:])
    assert isinstance(action, Extend | Rollback)
    return action


def ahead(session: Session) -> int:
    return session.limit - len(session.committed)


def test_without_a_mismatch_the_whole_lookahead_is_open() -> None:
    session = session_of()
    assert ahead(session) == SETTINGS.lookahead
    for _ in range(4):
        feed(session, 20, wrong=False)
    assert ahead(session) == SETTINGS.lookahead
    assert session.target == SETTINGS.max_window


def test_the_bound_is_twice_the_mean_run() -> None:
    session = session_of()
    for count in range(1, 9):
        action = feed(session, 9, wrong=True)
        run = (10 * count + SETTINGS.max_window) / count
        assert ahead(session) == min(SETTINGS.lookahead, int(2 * run))
        assert action.limit == session.limit
    assert ahead(session) == 35


def test_the_bound_leaves_room_for_the_shortest_window() -> None:
    session = session_of()
    for _ in range(60):
        feed(session, 0, wrong=True)
    assert ahead(session) == session.target == SETTINGS.min_window


def test_one_early_mismatch_is_forgiven() -> None:
    """A request that mismatches once in a while never has to wait for a verifier that keeps up."""
    session = session_of()
    feed(session, 3, wrong=True)
    assert ahead(session) == SETTINGS.lookahead
    feed(session, 1, wrong=True)
    assert ahead(session) < SETTINGS.lookahead
    for _ in range(5):
        feed(session, 15, wrong=False)
    assert ahead(session) == SETTINGS.lookahead


def test_the_bound_never_moves_back_within_an_epoch() -> None:
    """The fast path may have got there already."""
    session = session_of()
    for count in range(40):
        before, epoch = session.limit, session.epoch
        feed(session, 1 + count % 13, wrong=not count % 3)
        assert session.epoch != epoch or session.limit >= before


def test_windows_grow_while_it_pays() -> None:
    session = session_of()
    for _ in range(6):
        feed(
            session, 20, wrong=True
        )  # a run of 31 tokens: windows of 8 rows, 64 of them are too many to double
    assert session.target == SETTINGS.min_window
    feed(session, 7, wrong=False)
    assert session.target == SETTINGS.min_window
    feed(session, 7, wrong=False, queue_s=2 * SETTINGS.commit_deadline_s)
    assert session.target == 2 * SETTINGS.min_window + 1, "the queue is what commits wait for"


def test_control_the_rules_before_fail_these_tests() -> None:
    session = session_of(Before)
    for _ in range(6):
        feed(session, 20, wrong=True)
    feed(session, 7, wrong=False)
    assert session.target > SETTINGS.min_window
    assert ahead(session) == SETTINGS.lookahead


def targets_in_a_long_queue(make: type[Session]) -> list[tuple[int, int]]:
    """(target, bound) after each of many mismatches, every commit long in the queue."""
    session, found = session_of(make), []
    for _ in range(60):
        feed(session, 7, wrong=True, queue_s=2 * SETTINGS.commit_deadline_s)
        found.append((session.target, ahead(session)))
    return found


def test_a_long_queue_does_not_make_windows_as_long_as_the_lookahead() -> None:
    """Such a window would be sent when the fast path has stopped at its bound, and it waits meanwhile."""
    found = targets_in_a_long_queue(Session)
    assert all(target <= max(SETTINGS.min_window, bound // 2) for target, bound in found[1:])
    assert found[-1][0] > SETTINGS.min_window, "the queue still counts"


def test_a_full_match_never_shortens_windows() -> None:
    session = Session(Request("r", PROMPT, 10_000, deterministic=True), SessionSettings(lookahead=63), 0.0)
    feed(session, 3, wrong=True)
    for _ in range(30):
        before = session.target
        feed(session, 40, wrong=False, queue_s=2 * SETTINGS.commit_deadline_s)
        assert session.target >= before


class GrowsInAnyQueue(Session):
    """Doubles its windows with the queue, whatever the bound is."""

    def _adapt(self, commit: Commit, sent: int) -> None:
        if commit.timings.queue_s > self.settings.commit_deadline_s:
            self.target = min(self.settings.max_window, 2 * self.target + 1)


def test_control_growth_without_the_bound_is_noticed() -> None:
    found = targets_in_a_long_queue(GrowsInAnyQueue)
    assert any(target > bound // 2 for target, bound in found[1:])


class ShrinkingBound(Session):
    """Tightens the bound of a fast path that may have got there already."""

    @property
    def limit(self) -> int:
        return len(self.committed) + max(2, 100 - 9 * self.stats.windows)


def test_control_a_bound_that_moves_back_is_noticed() -> None:
    session = session_of(ShrinkingBound)
    before = session.limit
    feed(session, 5, wrong=False)
    assert session.limit < before


@pytest.mark.parametrize("accuracy", [0.3, 0.8, 0.95])
def test_every_property_holds_with_a_bound_that_moves(accuracy: float) -> None:
    settings = SessionSettings(min_window=3, start_window=7, max_window=15, lookahead=64)
    for seed in range(40):
        assert play(seed, accuracy, 90, settings) == []


def run(make: type[Session], rate: float, costs: Costs = Costs(), times: int = 1) -> dict[str, float]:  # noqa: B008
    return Simulation(rate, 16, 16 * times, costs, make=make).run(15)


def test_simulated_mismatches_cost_less_than_before() -> None:
    before, now = run(Before, 0.04), run(Session, 0.04)
    assert now["committed_tok_s"] > 1.15 * before["committed_tok_s"]
    assert now["lost_per_rollback"] < 0.65 * before["lost_per_rollback"]


@pytest.mark.parametrize("rate", [0.0, 0.001])
def test_simulated_rare_mismatches_cost_nothing(rate: float) -> None:
    before, now = run(Before, rate), run(Session, rate)
    assert now["committed_tok_s"] > 0.98 * before["committed_tok_s"]
    assert now["stood_per_1000"] == 0


def test_simulated_late_commits_with_others_waiting() -> None:
    """The place of a request at its bound is another's."""
    far = Costs(round_trip=0.45)
    before, now = run(Before, 0.04, far, times=2), run(Session, 0.04, far, times=2)
    assert now["stood_per_1000"] > before["stood_per_1000"]
    assert now["committed_tok_s"] > 1.05 * before["committed_tok_s"]
