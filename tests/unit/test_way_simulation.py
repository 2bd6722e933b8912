"""The policy in a simulated cluster (tests/support/simulated_cluster.py): beside a replica that is pinned to
either way it is never worse than the better one by more than a few per cent, and nobody changes its way
often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from llm42 import step_times
from llm42.session import backoff, standing
from llm42.session.load import Load, Progress, Way
from llm42.session.policy import HOLD, WAIT_DEADLINES, choose
from llm42.session.standing import YOUNG_S
from llm42.step_times import Costs
from tests.support.simulated_cluster import Cluster, Job

WARM_S, MEASURED_S = 14.0, 10.0
WORSE = 0.04
"""Of the better pinned way's tokens per second. Runs of this length differ by as much as 2 % by chance."""


def jobs(
    share: float, prompt: int = 256, most: int = 256, best_effort: tuple[int, int] | None = None
) -> Iterator[Job]:
    """Requests of mixed lengths, this share of them deterministic. best_effort: prompt and output of the
    others."""
    random, due = Random(1), 0.0
    while True:
        due += share
        deterministic = due >= 1.0
        due -= deterministic
        lengths = (prompt, most) if deterministic or best_effort is None else best_effort
        yield Job(deterministic, *(round(n * random.uniform(0.5, 1.5)) for n in lengths))


def run(
    mode: str,
    share: float,
    at_once: int,
    prompt: int = 256,
    slower: int = 1,
    best_effort: tuple[int, int] | None = None,
    **more: Any,
) -> tuple[float, Cluster]:
    """Tokens per second once the costs are known and a trial is over. slower: times as long, for requests
    that take longer."""
    cluster, source = Cluster(mode=mode, **more), jobs(share, prompt, best_effort=best_effort)
    cluster.run(WARM_S * slower, source, at_once)
    return cluster.run((WARM_S + MEASURED_S) * slower, source, at_once), cluster


def beside_the_better(share: float, at_once: int, **more: Any) -> tuple[float, Cluster]:
    """Tokens per second, as a share of the better pinned way's."""
    pinned = {k: v for k, v in more.items() if k not in ("knows_neighbour", "decide", "movable")}
    best = max(run(mode, share, at_once, **pinned)[0] for mode in ("verify", "direct"))
    found, cluster = run("auto", share, at_once, **more)
    return found / best, cluster


FAST = Costs(((1.0, 0.02), (8.0, 0.03), (64.0, 0.16)), 2e-3)
SLOW = Costs(((1.0, 0.06), (8.0, 0.12), (64.0, 0.3)), 4e-3)
ROWS = Costs(((1.0, 0.06), (8.0, 0.08), (64.0, 0.24)), 4e-3)
"""On a CPU, where the verifier decodes more slowly than the fast path does."""
CPU = {"fast": FAST, "decode": SLOW, "windows": ROWS, "prompt": 32, "slower": 8}
MOST_CHANGES = 6
"""Of the plan in half a minute to two, in which nothing is known at first."""
CASES: list[tuple[float, int, dict[str, Any]]] = [
    *((share, at_once, {}) for share in (0.1, 0.5, 1.0) for at_once in (1, 8)),
    *((share, 64, {"slower": 3}) for share in (0.1, 0.5, 1.0)),
    *((share, 64, {"devices": 2}) for share in (0.02, 0.1, 0.5, 1.0)),
    *((share, 64, {"wrong": 0.02, "slower": 3}) for share in (0.1, 0.5, 1.0)),
    *((share, 64, {"movable": True, "slower": 3}) for share in (0.1, 0.5)),
    *((share, 128, {"slower": 2}) for share in (0.2, 0.5)),
    *((share, 256, {"slower": 4}) for share in (0.2, 0.3)),
    *((share, 64, {"best_effort": (2000, 128), "slower": 5}) for share in (0.2, 0.5)),
    (0.2, 128, {"prompt": 1000, "movable": True, "kv_tokens": 131072, "slower": 4}),
    *((share, 64, {"prompt": 1024, "slower": 3}) for share in (0.1, 0.5, 1.0)),
    *((share, 4, CPU) for share in (0.5, 1.0)),
]


@pytest.mark.parametrize(("share", "at_once", "more"), CASES)
def test_as_good_as_the_better_way(share: float, at_once: int, more: dict[str, Any]) -> None:
    found, cluster = beside_the_better(share, at_once, **more)
    assert found > 1.0 - WORSE
    for job in cluster.ended:
        assert job.changes <= bound(job)
    assert cluster.standing.changes <= MOST_CHANGES


def bound(job: Job) -> float:
    """How often it may have changed its way: every decision is twice as far from the one before; for best
    effort every other."""
    return math.log2(job.output / HOLD + 1) * (1 if job.deterministic else 2)


def test_moved_best_effort_is_faster() -> None:
    """Half and half, all in one batch: better than either way without."""
    found, _ = beside_the_better(0.5, 64, movable=True)
    assert found > 1.15


BESIDE = [(0.5, 8), (0.5, 64), (0.3, 128)]
"""Both sides are busy."""


def expected_over_found(share: float, at_once: int, **more: Any) -> float:
    """Tokens per second, of all decoded directly: what the model expects in the end over what comes."""
    cluster, source = Cluster(decide=lambda *_: "direct", **more), jobs(share)
    cluster.run(WARM_S, source, at_once)
    found = cluster.run(WARM_S + MEASURED_S, source, at_once)
    assert cluster.rounds is not None
    return at_once / cluster.rounds.direct / found


@pytest.mark.parametrize(("share", "at_once"), BESIDE)
def test_what_is_expected_comes(share: float, at_once: int) -> None:
    assert 0.9 < expected_over_found(share, at_once) < 1.1


@pytest.mark.parametrize(("share", "at_once"), BESIDE)
def test_control_without_regard_to_what_shares_the_device(share: float, at_once: int) -> None:
    """Steps seem to take twice as long where both sides are busy."""
    assert expected_over_found(share, at_once, knows_neighbour=False) < 0.7


@pytest.mark.parametrize("way", ["verify", "direct"])
def test_control_the_wrong_way_is_noticed(way: Way) -> None:
    found, _ = beside_the_better(0.1 if way == "direct" else 1.0, 64, decide=lambda _, __: way)
    assert found < 1.0 - WORSE


# ---- hysteresis


class FlipFlop:
    """Always the other way."""

    def __call__(self, request: Progress, load: Load) -> Way:
        return "direct" if request.way == "verify" else "verify"


def test_nobody_changes_often_whatever_is_decided() -> None:
    cluster = Cluster(decide=FlipFlop())
    cluster.run(WARM_S, jobs(1.0, most=1000), 8)
    assert cluster.ended and all(job.changes <= bound(job) for job in cluster.ended)
    assert max(job.changes for job in cluster.ended) >= 2


def after_a_change(**more: Any) -> tuple[Cluster, list[int]]:
    """Deterministic requests alone, which are decoded directly; then best effort comes, and direct is the
    worse way. The verifier's counts are late. What requests of others the policy is told of in the end."""
    told = list[int]()

    def decide(request: Progress, load: Load) -> Way:
        told.append(load.verifier.others if load.verifier is not None else 0)
        return choose(request, load)

    cluster, alone = Cluster(late_s=2.0, decide=decide, **more), jobs(1.0, most=2000)
    cluster.run(8.0, alone, 16)
    told.clear()
    cluster.run(30.0, jobs(0.05, most=2000), 96)
    return cluster, told


def test_late_counts_are_nobody_elses() -> None:
    """Those who went to verify are, in the verifier's count of a moment ago, not other replicas' requests."""
    cluster, told = after_a_change()
    assert cluster.plan == "verify" and cluster.changes, "the case is one"
    assert max(told) == 0


def test_control_they_would_be_taken_for_others() -> None:
    assert max(after_a_change(knows_peak=False)[1]) > 0


# ---- one load after another

LOADS = [(0.5, 256, 256), (1.0, 64, 256), (0.1, 112, 1024), (1.0, 112, 1024), (1.0, 8, 256), (0.02, 256, 256)]
"""Share, requests at a time, prompt: each wants another way than the one before."""
BEGINS_S, LOAD_S, REST_S = 6.0, 14.0, 20.0


def after_each_other() -> dict[tuple[float, int, int], float]:
    """Tokens per second of each load, six seconds after it began, over the better pinned way's."""
    cluster, found = Cluster(movable=True, kv_tokens=280_064), {}
    cluster.run(3.0, jobs(1.0), 256)
    for load in LOADS:
        share, at_once, prompt = load
        cluster.rest(REST_S)
        found[load] = _six_seconds_on(cluster, share, at_once, prompt) / max(
            _six_seconds_on(Cluster(mode=mode), share, at_once, prompt) for mode in ("verify", "direct")
        )
    return found


def _six_seconds_on(cluster: Cluster, share: float, at_once: int, prompt: int) -> float:
    began, source = cluster.now, jobs(share, prompt)
    cluster.run(began + BEGINS_S, source, at_once)
    return cluster.run(began + LOAD_S, source, at_once)


def test_a_load_after_a_rest_finds_its_way_soon() -> None:
    found = after_each_other()
    assert min(found.values()) > 0.85, found


def test_control_with_the_plan_of_the_load_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "FORGOTTEN_S", math.inf)
    monkeypatch.setattr(standing, "YOUNG_S", 0.0)
    monkeypatch.setattr(step_times, "SETTLES_S", 0.0)
    monkeypatch.setattr(step_times, "MOSTLY", 1.0)
    found = after_each_other()
    assert min(found.values()) < 0.8, found


# ---- many prompts at once


def in_the_verifier_after_a_burst(**more: Any) -> float:
    """Of 256 requests that come at once, half of them deterministic, to a replica that knows its costs, and
    of those that follow them: the part that the verifier decodes ten seconds later."""
    cluster = Cluster(movable=True, kv_tokens=280_064, **more)
    cluster.run(3.0, jobs(1.0), 256)
    cluster.rest(REST_S)
    cluster.run(cluster.now + 10.0, jobs(0.5), 256)
    assert cluster.standing.plan == "moved", "the case is one"
    return sum(job.way == "direct" for job in cluster.jobs) / 256


def test_best_effort_moves_in_a_burst() -> None:
    """It waits there for others' prompts as it would anywhere."""
    assert in_the_verifier_after_a_burst() > 0.95


def test_control_it_would_come_back_and_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 10.0)
    found = in_the_verifier_after_a_burst(patience=lambda _, __, deadline_s: WAIT_DEADLINES * deadline_s)
    assert found < 0.6


def plans_of_a_burst(share: float, at_once: int, prompt: int) -> list[str | None]:
    """Of one that comes after a rest of a load of another kind, each quarter of a second."""
    cluster, source = Cluster(movable=True, kv_tokens=280_064), jobs(share, prompt)
    cluster.run(3.0, jobs(1.0), 256)
    cluster.rest(REST_S)
    found, began = list[str | None](), cluster.now
    cluster.run(began + YOUNG_S, source, at_once)
    while cluster.now < began + BEGINS_S:
        cluster.run(cluster.now + 0.25, source, at_once)
        found.append(cluster.standing.plan)
    return found


BURSTS = [(share, *load) for share in (0.1, 0.3, 0.5, 1.0) for load in ((256, 256), (112, 1024))]


@pytest.mark.parametrize(("share", "at_once", "prompt"), BURSTS)
def test_a_burst_keeps_its_plan(share: float, at_once: int, prompt: int) -> None:
    """While its prompts are computed, what steps take is not what they will."""
    assert len(set(plans_of_a_burst(share, at_once, prompt))) == 1


def test_control_it_would_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged before it has shown itself, by costs of rows that are told apart by chance."""
    monkeypatch.setattr(standing, "SHOWN_S", 0.0)
    monkeypatch.setattr(standing, "CLEAR_ENDED", 0.0)
    monkeypatch.setattr(standing, "CLEAR_S", 0.0)
    monkeypatch.setattr(step_times, "APART", 0.0)
    assert any(len(set(plans_of_a_burst(*burst))) > 1 for burst in BURSTS)


def left_behind(before: tuple[float, int], burst: tuple[float, int, int], **more: Any) -> int:
    """Best effort that the engine has three seconds after a burst that is planned to move."""
    cluster = Cluster(movable=True, kv_tokens=280_064, **more)
    cluster.run(WARM_S, jobs(before[0]), before[1])
    cluster.rest(REST_S)
    share, at_once, prompt = burst
    cluster.run(cluster.now + 3.0, jobs(share, prompt), at_once)
    assert cluster.standing.plan == "moved", "the case is one"
    return sum(job.way == "verify" and not job.deterministic for job in cluster.jobs)


LATE = [((1.0, 64), (0.1, 112, 1024)), ((1.0, 64), (0.1, 256, 256)), ((1.0, 256), (0.1, 256, 256))]
"""Loads, and bursts after them whose first requests are too few to be moved."""


@pytest.mark.parametrize(("before", "burst"), LATE)
def test_who_comes_first_in_a_burst_goes_with_the_others(
    before: tuple[float, int], burst: tuple[float, int, int]
) -> None:
    """It is asked once more before its first token, and after some if few are left; the control asks once."""
    assert left_behind(before, burst) == 0
    assert left_behind(before, burst, knows_behind=False) == 0
    assert left_behind(before, burst, knows_behind=False, asks_again=False) > 10
