"""What is remembered of how long steps take, and of how busy verifiers are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from llm42 import step_times
from llm42.engine.vllm.connection import TIMED, Stats
from llm42.step_times import (
    APART_S,
    HALF_S,
    KEPT,
    LATE_S,
    OLD_S,
    RESTED_S,
    SILENT_S,
    SIZES,
    TELL_S,
    Costs,
    Fading,
    Neighbour,
    Peak,
    StepTimes,
    VerifierLoad,
    Worked,
)


class Clock:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """Steps, as far apart as they need be."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.times = StepTimes(self.clock)

    def add(self, decoded: int, others: float, seconds: float) -> None:
        self.clock.now += APART_S
        self.times.add(decoded, others, seconds)

    @property
    def costs(self) -> Costs:
        self.clock.now += 1.0
        return self.times.costs


def test_each_size_is_apart() -> None:
    made = Timed()
    assert made.costs == Costs()
    for _ in range(20):
        made.add(1, 0, 0.005)
        made.add(64, 0, 0.009)
    assert made.costs.times == ((1.0, pytest.approx(0.005)), (64.0, pytest.approx(0.009)))


def test_a_few_slow_or_fast_ones_are_nothing() -> None:
    """The first step of a size often compiles something; several may be told of at once."""
    made = Timed()
    for seconds in (1.0, *[0.01] * 5, 1e-5, *[0.01] * 5):
        made.add(8, 0, seconds)
    assert made.costs.times == ((8.0, pytest.approx(0.01)),)


def test_both_directions_count_alike() -> None:
    made = Timed()
    for seconds in [0.01] * 20 + [0.03] * KEPT:
        made.add(8, 0, seconds)
    assert made.costs.times[0][1] == pytest.approx(0.03)
    for _ in range(KEPT):
        made.add(8, 0, 0.01)
    assert made.costs.times[0][1] == pytest.approx(0.01)


def test_what_goes_on_for_a_moment_is_not_remembered_often() -> None:
    made = Timed()
    for _ in range(KEPT):
        made.add(8, 0, 0.01)
    for _ in range(1000):
        made.times.add(8, 0, 0.5)
    assert made.costs.times[0][1] == pytest.approx(0.01)


def test_sizes_are_bounded() -> None:
    made = Timed()
    for rows in range(1, 100_000, 997):
        made.add(rows, 0, 0.1)
    assert len(made.costs.times) <= SIZES


def test_fewer_rows_never_take_longer() -> None:
    made = Timed()
    made.add(2, 0, 0.1)
    made.add(64, 0, 0.01)
    assert made.costs.at(1) <= made.costs.at(64) == pytest.approx(0.01)


def test_old_ones_are_forgotten() -> None:
    """So the way is tried anew where nothing else was measured since."""
    made = Timed()
    made.add(8, 0, 0.01)
    made.clock.now += OLD_S - 10
    assert made.costs.times
    made.clock.now += 20
    assert made.costs == Costs()


DECODED, ROW_S = 0.0176, 25e-6
"""Of 256 requests, and of a row of a prompt."""


@pytest.mark.parametrize("clean", [False, True], ids=["a prompt in every step", "some steps without"])
def test_prompts_are_told_apart(clean: bool) -> None:
    """Under continuous arrivals there may be no step without one."""
    made, random = Timed(), Random(0)
    for i in range(60):
        others = 0 if clean and i % 3 == 0 else random.randrange(100, 2000)
        made.add(random.randrange(250, 256), others, DECODED + ROW_S * others + random.gauss(0, 0.0002))
    found = made.costs
    assert found.row_s == pytest.approx(ROW_S, rel=0.1)
    assert found.times[0][1] == pytest.approx(DECODED, rel=0.1)


def test_control_prompts_would_count_as_decoding() -> None:
    made = Timed()
    for others in range(100, 2000, 100):
        made.add(256, 0, DECODED + ROW_S * others)  # whoever does not say how much of the step was a prompt's
    assert made.costs.times[0][1] > 1.5 * DECODED


def test_prompts_of_one_length_are_bounded() -> None:
    made = Timed()
    for _ in range(20):
        made.add(256, 1024, DECODED + ROW_S * 1024)
    assert 0 < made.costs.row_s <= (DECODED + ROW_S * 1024) / 1280
    assert 0 < made.costs.times[0][1] < DECODED + ROW_S * 1024


@pytest.mark.parametrize(("share", "alone_s"), [(0.0, 0.02), (0.5, 0.015), (1.0, 0.01)])
def test_what_shares_the_device_is_not_counted(share: float, alone_s: float) -> None:
    """Half of the time in which both computed was not this side's."""
    made = Timed()
    made.times.neighbour = lambda: share * made.clock.now
    for _ in range(5):
        made.add(8, 0, 0.02)
    assert made.costs.times == ((8.0, pytest.approx(alone_s)),)


def test_a_neighbour_of_whom_nothing_is_known_is_none() -> None:
    """It is asked on the thread that decodes."""
    made = Timed()

    def lost() -> float:
        raise ConnectionError

    made.times.neighbour = lost
    made.add(8, 0, 0.02)
    assert made.costs.times == ((8.0, pytest.approx(0.02)),)


CURVE = Costs(((2.0, 0.004), (10.0, 0.012), (100.0, 0.03)), 1e-4)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 0.003), (2, 0.004), (6, 0.008), (10, 0.012), (55, 0.021), (100, 0.03), (200, 0.05)],
)
def test_other_sizes_are_estimated(rows: float, seconds: float) -> None:
    assert CURVE.at(rows) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.0153), (64, 0.0215), (512, 0.0664)])
def test_of_one_size_others_are_rather_too_cheap(rows: float, seconds: float) -> None:
    """In proportion to the rows 64 of them would take 0.32 s; nobody would ever try."""
    assert Costs(((4.0, 0.0155),), 1e-4).at(rows) == pytest.approx(seconds, rel=0.05)
    assert Costs(((4.0, 0.02),)).at(256) == pytest.approx(0.02)


def test_the_best_row() -> None:
    assert CURVE.best_row_s == pytest.approx(0.0003)


# ---- vLLM


def told(steps: list[tuple[int, int]], spacing: list[float]) -> Stats:
    clock = Clock()
    stats = Stats(times=StepTimes(clock))
    for (decoded, prompts), pause in zip(steps, spacing, strict=True):
        clock.now += pause
        stats.step(decoded, prompts, clock.now)
    clock.now += 1.0
    return stats


def test_steps_of_vllm_are_timed_together() -> None:
    """Two may be told of at the same moment."""
    bunched = [0.02, 0.0] * TIMED * 20
    assert told([(4, 0)] * len(bunched), bunched).times.costs.times == (pytest.approx((4.0, 0.01), rel=0.1),)


def test_vllm_with_a_prompt_in_each_step() -> None:
    """256 requests of 256 tokens: one prompt ends in every step."""
    random = Random(1)
    steps = [(256, random.choice((0, 500, 1000, 3000))) for _ in range(1000)]
    found = told(steps, [DECODED + ROW_S * prompts for _, prompts in steps]).times.costs
    assert found.times == (pytest.approx((256.0, DECODED), rel=0.1),)
    assert found.row_s == pytest.approx(ROW_S, rel=0.1)


def told_late(theirs: float) -> Costs:
    """Prompts of several chunks, one after another, each told with its last chunk. theirs: what somebody else
    says of a row."""
    clock, random = Clock(), Random(2)
    stats = Stats(times=StepTimes(clock, late=True))
    stats.times.row_s = lambda: theirs
    for _ in range(400):
        chunks = random.choice((4, 8, 12))
        for i in range(chunks):
            clock.now += DECODED + ROW_S * 2000
            stats.step(256, 2000 * chunks if i == chunks - 1 else 0, clock.now)
    clock.now += 1.0
    return stats.times.costs


def test_rows_that_are_told_late_cost_what_the_neighbour_says() -> None:
    found = told_late(1.2 * ROW_S)
    assert found.row_s == pytest.approx(1.2 * ROW_S)
    assert found.times[0][1] < 2 * DECODED


def test_control_by_what_is_told_they_cost_nothing() -> None:
    found = told_late(0.0)
    assert found.row_s < ROW_S / 2 and found.times[0][1] > 2 * DECODED


def test_a_rest_of_vllm_is_not_timed() -> None:
    steps = [(4, 0)] * (TIMED // 2) + [(0, 0)] + [(4, 0)] * (TIMED + 1)
    spacing = [0.01] * (TIMED // 2) + [0.01, 60.0] + [0.01] * TIMED
    stats = told(steps, spacing)
    assert stats.times.costs.times == (pytest.approx((4.0, 0.01)),)
    worked = stats.times.worked.seconds
    stats.rest()
    assert stats.times.worked.seconds == pytest.approx(worked)


# ---- what is of late


def test_how_long_it_has_worked() -> None:
    clock = Clock()
    worked = Worked(clock)
    clock.now += 5.0
    worked.begin()
    clock.now += 2.0
    assert worked.seconds == pytest.approx(2.0), "the present step, too"
    worked.begin()
    clock.now += 1.0
    worked.end()
    clock.now += 5.0
    assert worked.seconds == pytest.approx(3.0)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_how_long_another_has_worked_is_told_now_and_then(share: float) -> None:
    clock = Clock()
    neighbour = Neighbour(clock)
    for _ in range(50):
        clock.now += 2 * TELL_S
        neighbour.tell(share * clock.now)
    before = neighbour.seconds
    assert before == pytest.approx(share * 49 * 2 * TELL_S), "since it was first heard"
    clock.now += TELL_S
    assert neighbour.seconds - before == pytest.approx(share * TELL_S), "as if it went on"
    clock.now += 100 * SILENT_S
    assert neighbour.seconds - before == pytest.approx(share * SILENT_S), "for a while"


def test_what_is_told_twice_at_once_says_nothing_new() -> None:
    """An answer at the end of a step, and one more: not that it works all the time."""
    clock = Clock()
    neighbour = Neighbour(clock)
    for i in range(20):
        clock.now += 0.5
        neighbour.tell(0.05 * i)
        clock.now += 1e-4
        neighbour.tell(0.05 * i + 1e-4)
    before = neighbour.seconds
    clock.now += 0.1
    assert neighbour.seconds - before == pytest.approx(0.01, rel=0.1)


def test_a_process_that_has_started_anew_counts_anew() -> None:
    clock = Clock()
    neighbour = Neighbour(clock)
    for told in (100.0, 1.0, 1.5):
        clock.now += 1.0
        neighbour.tell(told)
    assert neighbour.seconds == pytest.approx(0.5)


def measured_beside_an_idle_one() -> list[float]:
    """Steps of 10 ms, each after a rest after which the neighbour is heard anew; it has worked long ago."""
    clock, neighbours = Clock(), list[Neighbour]()
    times = StepTimes(clock)
    for _ in range(8):
        neighbours.append(Neighbour(clock))
        heard = tuple(neighbours)
        times.neighbour = lambda heard=heard: sum(n.seconds for n in heard)  # type: ignore[misc]
        neighbours[-1].tell(5000.0)
        clock.now += 0.2
        times.add(4, 0, 0.01)
        clock.now += 3.0
    return [seconds for _, _, seconds, _ in times._sizes[3]]


def test_one_that_is_heard_anew_has_not_computed_all_that_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "SETTLES_S", 0.0)
    assert measured_beside_an_idle_one() == [0.01] * 8


def test_control_it_would_count_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(neighbour: Neighbour, seconds: float) -> None:
        neighbour._last = 0.0, neighbour._clock(), 0.0, seconds

    monkeypatch.setattr(Neighbour, "tell", tell)
    monkeypatch.setattr(step_times, "SETTLES_S", 0.0)
    assert measured_beside_an_idle_one() == [0.005] * 8


def test_a_mean_fades_by_itself() -> None:
    clock = Clock()
    mean = Fading(clock)
    for _ in range(100):
        clock.now += 0.001
        mean.add(4.0)
    assert mean.value == pytest.approx(4.0, rel=0.01)
    clock.now += 3 * HALF_S
    assert mean.value == pytest.approx(0.5, rel=0.01)


def test_the_most_of_late() -> None:
    clock = Clock()
    peak = Peak(clock)
    peak.set(8)
    peak.set(0)
    clock.now += LATE_S - 0.1
    assert peak.most == 8
    clock.now += LATE_S
    assert peak.most == 8, "no less than so long"
    clock.now += 2 * LATE_S
    assert peak.most == 0


# ---- what a replica knows of a verifier


@pytest.mark.parametrize("kind", ["decode", "windows"])
def test_one_kind_of_step_tells_of_the_other(kind: str) -> None:
    known = Costs(((1.0, 0.01),))
    load = VerifierLoad(known) if kind == "windows" else VerifierLoad(window_steps=known)
    assert load.is_measured and not VerifierLoad().is_measured
    find: Callable[[VerifierLoad], Costs] = lambda of: getattr(of, kind)  # noqa: E731
    assert find(load) == known


def test_more_than_was_ever_decoded_costs_what_rows_do() -> None:
    load = VerifierLoad(Costs(((1.0, 0.005),)), Costs(((16.0, 0.007), (64.0, 0.008), (256.0, 0.014))))
    assert load.decode.at(1) == pytest.approx(0.005)
    assert load.decode.at(64) == pytest.approx(0.006, rel=0.1)
    assert load.decode.at(256) == pytest.approx(0.012, rel=0.1)


def after_a_rest() -> tuple[float, float]:
    """Seconds of a step before a rest; and after it, when others begin on the same device, of whom nothing
    has been heard yet."""
    made = Timed()
    for _ in range(4):
        made.add(2, 0, 0.005)
    before = made.costs.at(2)
    made.clock.now += RESTED_S
    for _ in range(4):
        made.add(2, 0, 0.08)
    return before, made.costs.at(2)


def test_the_first_steps_after_a_rest_tell_nothing() -> None:
    before, after = after_a_rest()
    assert after == before


def test_control_they_would_be_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "SETTLES_S", 0.0)
    before, after = after_a_rest()
    assert after > 2 * before


def test_few_decoded_rows_beside_a_long_prompt_tell_nothing() -> None:
    """Twice as long as they should be, since something else went on: of 1 in 1,024 rows that is all noise."""
    made = Timed()
    for _ in range(4):
        made.add(64, 0, 0.010)
        made.add(64, 900, 0.010 + 900 * 30e-6)
        made.add(1, 1023, 0.005 + 1023 * 45e-6)
    assert made.costs.times == ((64.0, pytest.approx(0.010)),)


def test_control_they_would_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MOSTLY", 1.0)
    made = Timed()
    for _ in range(4):
        made.add(64, 0, 0.010)
        made.add(64, 900, 0.010 + 900 * 30e-6)
        made.add(1, 1023, 0.005 + 1023 * 45e-6)
    assert made.costs.times[0][0] == 1.0


def test_what_a_row_costs_is_seen_where_there_are_many() -> None:
    """Steps that differ by a row or two differ by what else goes on."""
    made, noise = Timed(), Random(0)
    for n in range(KEPT):
        made.add(64, n % 3, 0.010 + noise.uniform(0.0, 0.004))
        made.add(16, 600 * (n % 2), 0.007 + 600 * (n % 2) * 30e-6)
    assert made.costs.row_s == pytest.approx(30e-6, rel=0.1)


def test_sizes_near_each_other_are_one() -> None:
    """They differ by chance: a row more would seem to cost a millisecond."""
    made = Timed()
    for _ in range(5):
        made.add(127, 0, 0.0100)
        made.add(129, 0, 0.0120)
    assert len(made.costs.times) == 1
    assert made.costs.at(256) < 0.02


def test_control_their_difference_would_be_a_rows_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "NEAR", 1.0)
    made = Timed()
    for _ in range(5):
        made.add(127, 0, 0.0100)
        made.add(129, 0, 0.0120)
    assert len(made.costs.times) == 2


def test_beyond_the_sizes_a_row_costs_no_more_than_its_share() -> None:
    steep = Costs(((100.0, 0.010), (101.0, 0.020)), 1e-6)
    assert steep.at(202) == pytest.approx(0.040)
    assert steep.at(50) == pytest.approx(0.005)
    assert steep.at(100.5) == pytest.approx(0.015)


def test_a_step_alone_tells_nothing_beside_others() -> None:
    """What arrives late is followed by what seems to take no time."""
    made = Timed()
    made.add(16, 0, 0.0004)
    for _ in range(2 * step_times.CLEAN):
        made.add(64, 0, 0.010)
    assert [rows for rows, _ in made.costs.times] == [64]
    for _ in range(2 * step_times.CLEAN):
        made.add(16, 0, 0.0004)
    assert dict(made.costs.times) == pytest.approx({16: 0.0025, 64: 0.010}), "a row never costs less in fewer"


def in_a_burst(made: Timed) -> Costs:
    """Each step has 1024 rows, fewer of prompts the more it decodes, and takes a little longer."""
    for decoded in (4, 5, 6, 7, 4, 5, 6, 7):
        made.add(decoded, 1024 - decoded, 0.039 + 0.0001 * decoded)
    return made.costs


def test_in_a_burst_rows_are_not_told_apart_by_chance() -> None:
    assert in_a_burst(Timed()).row_s > 30e-6


def test_control_they_would_seem_to_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "APART", 0.0)
    assert in_a_burst(Timed()).row_s == 0.0
