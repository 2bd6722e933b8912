"""How long a plan stands (llm42/session/standing.py): rounds take what a table says, whatever the model
expects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import pytest

from llm42.session import standing
from llm42.session.load import Plan, Rounds
from llm42.session.standing import HOLD_S, Done, Standing

COUNT, STEP_S = 32, 0.1


@dataclass
class Replica:
    """Has `count` requests in progress all the time, of which each ends after 100 tokens."""

    truth: dict[Plan, float]
    model: Rounds
    noise: float = 0.0
    count: int = COUNT
    room: bool = True
    kept: bool = False
    now: float = 0.0
    standing: Standing = field(default_factory=Standing)
    done: Done = field(default_factory=Done)
    work: float = 0.0
    stood: dict[Plan, float] = field(default_factory=dict)
    """Seconds of each plan."""

    def __post_init__(self) -> None:
        self.random = Random(0)
        for _ in range(100):
            self.done.begin(True, self.now)

    def run(self, seconds: float) -> Plan:
        """Goes on for so long."""
        until = self.now + seconds
        while self.now < until:
            plan = self.standing.next(self.now, self.count, self.done, self.model, self.room, self.kept)
            assert plan is not None
            slower = 1.0 + self.random.uniform(-self.noise, self.noise)
            self.work += STEP_S * self.count / (self.truth[plan] * slower)
            self.done.tokens = int(self.work)
            self.done.ended = int(self.work / 100)
            self.stood[plan] = self.stood.get(plan, 0.0) + STEP_S
            self.now += STEP_S
        return plan

    def rest(self, seconds: float, looks: bool = False) -> None:
        """Nobody is there for so long. looks: somebody asks for the plan all the same."""
        self.done.end(self.now, 0)
        until = self.now + seconds
        while looks and self.now + 0.5 < until:
            self.now += 0.5
            self.standing.next(self.now, 0, self.done, None, self.room)
        self.now = until
        self.done.begin(True, self.now)


def truth(verify: float, direct: float, moved: float = 1.0) -> dict[Plan, float]:
    return {"verify": verify, "direct": direct, "moved": moved}


def test_what_the_model_says_is_taken_at_first() -> None:
    cases = ((1, 2, 3), "verify"), ((2, 1.85, 3), "verify"), ((2, 1, 3), "direct"), ((3, 2, 1), "moved")
    for model, plan in cases:
        assert Replica(truth(1, 1), Rounds(*model)).run(1.0) == plan
    assert Replica(truth(1, 1), Rounds(3, 2, 1), room=False).run(1.0) == "direct", "no room for best effort"


def test_a_wrong_model_is_found_out() -> None:
    """It says that direct saves a third; it costs a half more."""
    replica = Replica(truth(0.010, 0.015), Rounds(0.012, 0.008, 0.02))
    assert replica.run(300.0) == "verify"
    assert replica.standing.changes <= 4
    assert replica.stood["direct"] < 60.0


def test_control_without_measuring_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "MEASURE_S", 1e9)
    monkeypatch.setattr(standing, "LONGEST_S", 1e9)
    replica = Replica(truth(0.010, 0.015), Rounds(0.012, 0.008, 0.02))
    assert replica.run(300.0) == "direct" and "verify" not in replica.stood


def test_a_change_that_does_not_help_is_taken_back() -> None:
    """Both ways are tried; the one that seems to be better by what the model says of it is not."""
    replica = Replica(truth(0.010, 0.011), Rounds(0.0095, 0.0101, 0.02))
    replica.run(30.0)
    replica.model = Rounds(0.0095, 0.0085, 0.02)
    assert replica.run(200.0) == "verify"
    assert 0.0 < replica.stood["direct"] < 20.0


def test_plans_do_not_swing() -> None:
    """The model says of the other way whatever it is that it is better, as counts that follow the plan would
    have it."""
    replica = Replica(truth(0.010, 0.0102), Rounds(0.0101, 0.0100, 0.02), noise=0.01)
    for _ in range(1200):
        plan = replica.run(0.1)
        low, high = 0.008, 0.010
        replica.model = Rounds(high, low, 0.02) if plan == "verify" else Rounds(low, high, 0.02)
    assert replica.standing.changes <= 6


def test_control_without_a_hold_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "HOLD_S", 0.0)
    monkeypatch.setattr(standing, "NOISE", 1.0)
    for name in ("SETTLE_S", "MEASURE_S"):
        monkeypatch.setattr(standing, name, 0.5)
    replica = Replica(truth(0.010, 0.0102), Rounds(0.0101, 0.0100, 0.02), noise=0.01)
    for _ in range(1200):
        plan = replica.run(0.1)
        replica.standing._off.clear()
        low, high = 0.008, 0.010
        replica.model = Rounds(high, low, 0.02) if plan == "verify" else Rounds(low, high, 0.02)
    assert replica.standing.changes > 12


def test_another_load_begins_anew() -> None:
    """What was measured of one says nothing of four times as many requests."""
    replica = Replica(truth(0.010, 0.015), Rounds(0.012, 0.008, 0.02))
    assert replica.run(100.0) == "verify"
    replica.truth, replica.count = truth(0.020, 0.012), 4 * COUNT
    assert replica.run(60.0) == "direct"


def test_best_effort_goes_back_where_there_is_no_room() -> None:
    replica = Replica(truth(0.010, 0.011, 0.007), Rounds(0.010, 0.011, 0.007))
    assert replica.run(10.0) == "moved"
    replica.room = False
    assert replica.run(0.2) == "verify"


def test_a_plan_stands_while_nobody_asks() -> None:
    replica = Replica(truth(0.010, 0.015), Rounds(0.010, 0.015, 0.02))
    plan = replica.run(HOLD_S)
    assert replica.standing.next(replica.now + 1.0, 3, replica.done, None, True) == plan


def test_nothing_is_planned_where_nothing_is_known() -> None:
    assert Standing().next(1.0, 3, Done(), None, True) is None


def in_bursts() -> Replica:
    """Of ten seconds, with pauses: each begins with prompts, so that its first rounds are long."""
    replica = Replica(truth(0.05, 0.003), Rounds(0.005, 0.003, 0.02), count=4)
    for _ in range(10):
        replica.truth = truth(0.05, 0.01)
        replica.run(2.5)
        replica.truth = truth(0.05, 0.003)
        replica.run(7.5)
        replica.rest(20.0)
    return replica


def test_a_burst_is_not_measured_from_its_beginning() -> None:
    assert "verify" not in in_bursts().stood


def test_who_only_looks_changes_nothing() -> None:
    """The dashboard asks what is expected also while nobody is there."""
    found = []
    for looks in (False, True):
        replica = Replica(truth(0.05, 0.003), Rounds(0.005, 0.003, 0.02))
        replica.run(10.0)
        replica.rest(5.0, looks)
        replica.run(0.1)
        found.append((replica.standing._mean, replica.standing.plan, replica.standing.changes))
    assert found[0] == found[1] == (COUNT, "direct", 0)


def after_a_rest(seconds: float) -> Plan:
    """The model was wrong about requests like those before."""
    replica = Replica(truth(0.010, 0.015), Rounds(0.012, 0.008, 0.02))
    assert replica.run(100.0) == "verify"
    replica.rest(seconds)
    return replica.run(1.0)


def test_after_a_long_rest_it_is_another_load() -> None:
    assert after_a_rest(standing.FORGOTTEN_S) == "direct"


def test_control_it_would_go_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rest_s = standing.FORGOTTEN_S
    monkeypatch.setattr(standing, "FORGOTTEN_S", math.inf)
    assert after_a_rest(rest_s) == "verify"


def in_a_burst() -> Plan:
    """The first one seems to do best in the way in which all that come with it do not."""
    replica = Replica(truth(0.010, 0.010), Rounds(0.010, 0.012, 0.02), count=1)
    assert replica.run(0.1) == "verify"
    replica.count, replica.model = COUNT, Rounds(0.012, 0.010, 0.02)
    return replica.run(0.5)


def test_a_burst_has_a_plan_of_its_own() -> None:
    assert in_a_burst() == "direct"


def test_control_it_would_have_the_plan_of_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "YOUNG_S", 0.0)
    monkeypatch.setattr(standing, "FEW", 10 * COUNT)
    assert in_a_burst() == "verify"


def after_a_moment() -> Plan:
    """For a second the model is far off."""
    replica = Replica(truth(0.010, 0.011), Rounds(0.010, 0.011, 0.02))
    replica.run(4.0)
    replica.model = Rounds(0.020, 0.010, 0.02)
    replica.run(1.0)
    replica.model = Rounds(0.010, 0.011, 0.02)
    return replica.run(0.2)


def test_what_seems_so_for_a_moment_changes_nothing() -> None:
    assert after_a_moment() == "verify"


def test_control_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "CLEAR_S", 0.0)
    assert after_a_moment() == "direct"


def test_rest_is_what_nobody_was_there() -> None:
    done = Done()
    for now, begins, left in (
        (1.0, True, 0),
        (2.0, False, 0),
        (5.0, True, 0),
        (6.0, True, 0),
        (9.0, False, 1),
    ):
        if begins:
            done.begin(True, now)
        else:
            done.end(now, left)
    assert done.rested_s == 3.0


def test_control_it_would_turn_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RESTED_S", 1e9), ("SETTLE_S", 0.1), ("MEASURE_S", 1.0)):
        monkeypatch.setattr(standing, name, value)
    assert "verify" in in_bursts().stood


def after_it_was_kept() -> Plan:
    """Best effort stayed where it was while the plan was that it moves, and all was slow for so long."""
    replica = Replica(truth(0.010, 0.011, 0.014), Rounds(0.010, 0.011, 0.007), kept=True)
    assert replica.run(25.0) == "moved"
    replica.truth, replica.kept = truth(0.010, 0.011, 0.007), False
    return replica.run(3.0)


def test_what_comes_while_best_effort_is_kept_says_nothing_of_its_moving() -> None:
    assert after_it_was_kept() == "moved"


def test_control_it_would_speak_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    as_ever = Standing.next
    monkeypatch.setattr(Standing, "next", lambda self, *args: as_ever(self, *args[:5]))
    with pytest.raises(AssertionError):
        after_it_was_kept()


def after_a_slow_beginning() -> float:
    """Steps are slow at first, as the model knows: by how much it is off in the end."""
    replica = Replica(truth(0.020, 0.03), Rounds(0.020, 0.03, 0.04))
    replica.run(standing.SETTLE_S + 3.0)
    replica.truth, replica.model = truth(0.010, 0.03), Rounds(0.010, 0.03, 0.04)
    replica.run(4.0)
    return replica.standing._off["verify"]


def test_what_is_measured_is_compared_with_what_was_expected_meanwhile() -> None:
    assert abs(after_a_slow_beginning() - 1.0) < 0.05


def test_control_it_would_be_with_what_is_expected_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Standing._measure

    def at_the_end(self: Standing, count: int, expected: float, before: standing.Mark) -> None:
        since = self._from
        measure(self, count, expected, before)
        if since is not None and self._from is not since and self._measured is not None:
            self._off["verify"] = self._measured / expected

    monkeypatch.setattr(Standing, "_measure", at_the_end)
    assert after_a_slow_beginning() > 1.2


def with_gaps(gap_s: float) -> float:
    """Now and then nobody is deterministic, and nothing is expected: by how much the model is off in the
    end."""
    replica = Replica(truth(0.010, 0.03), Rounds(0.010, 0.03, 0.04))
    replica.run(1.0)
    for _ in range(8):
        model, replica.model = replica.model, None  # type: ignore[assignment]
        replica.run(gap_s)
        replica.model = model
        replica.run(4.0)
    return replica.standing._off["verify"]


def test_while_nothing_is_expected_nothing_is_measured() -> None:
    assert 0.95 < with_gaps(6.0) < 1.05


def test_control_what_came_then_would_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing.Mark, "later", lambda self, since, until: self)
    assert with_gaps(6.0) < 0.6


def changes_of_a_load(at: float, rest_s: float = 0.0) -> int:
    """That comes at once to a replica which was first asked at that moment. How often it is another one."""
    replica = Replica(truth(0.010, 0.011), Rounds(0.010, 0.011, 0.02), count=1, now=at)
    found = [replica.standing._is_another_load]
    count = 0

    def counted(done: Done) -> bool:
        nonlocal count
        other = found[0](done)
        count += other
        return other

    replica.standing._is_another_load = counted  # type: ignore[method-assign]
    replica.run(0.3)
    replica.count = COUNT
    replica.run(30.0)
    if rest_s:
        replica.rest(rest_s)
        replica.count = 2 * COUNT
        replica.run(30.0)
    return count


def test_a_load_is_no_other_because_it_begins() -> None:
    """Whatever the clock shows when the first one comes."""
    assert changes_of_a_load(0.0) == changes_of_a_load(1e6) == 0


def test_control_it_would_be_one_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "SHOWN_S", 0.0)
    assert changes_of_a_load(1e6) > 0


def test_after_a_short_rest_it_is_compared_with_the_one_before() -> None:
    assert changes_of_a_load(0.0, standing.RESTED_S) == 1


def test_requests_that_leave_one_side_alone_go_there_sooner() -> None:
    """No best effort, or all of it moves: no two sides share the device."""
    for one_device, plan in ((True, "direct"), (False, "verify")):
        replica = Replica(truth(1, 1), Rounds(1.0, 0.93, 0.93), standing=Standing(one_device), room=False)
        assert replica.run(1.0) == plan
    replica = Replica(truth(1, 1), Rounds(1.0, 0.93, 2.0), standing=Standing(True))
    replica.done.begin(False, 0.0)
    assert replica.run(1.0) == "verify", "best effort stays on the other side"
    replica = Replica(truth(1, 1), Rounds(1.0, 2.0, 0.93), standing=Standing(True))
    assert replica.run(1.0) == "moved"


def on_one_device(seems: float) -> Replica:
    """The model is too good for every plan. It says that direct takes so much of a round of verify's."""
    replica = Replica(truth(0.014, 0.014), Rounds(0.010, 0.014 * seems, 0.02), standing=Standing(True))
    replica.run(60.0)
    return replica


def test_what_was_not_measured_must_seem_to_save_more() -> None:
    """For it is not as good as the model says either; but where it says much more it is tried."""
    assert "direct" not in on_one_device(0.88).stood
    assert "direct" in on_one_device(0.75).stood


def test_control_it_would_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "UNTRIED", standing.MARGIN)
    assert "direct" in on_one_device(0.88).stood
