"""How much work is too much for a verifier, and how many verifiers are wanted: the rules, without Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from llm42.step_times import Costs
from llm42_serve.replica.admission import Admission
from llm42_serve.verifiers import load
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.load import Limits, StepTime
from llm42_serve.verifiers.scaling import LOOKS_UP, SETTLE_S, Scaler

LIMITS = Limits(share=0.9, step_s=1.0, queue_s=0.5)
LATE = 2.0


def status(**said: Any) -> VerifierStatus:
    """Of a verifier of 100 rows and 1,000 tokens of KV."""
    return VerifierStatus("ready", "a", **({"places": 100, "kv_tokens": 1000} | said))


IDLE = status()
CROWDED = {
    "places": status(direct=91, kv_used=500),
    "KV": status(direct=2, kv_used=901),
    "step time": status(direct=50, kv_used=500, step_s=1.1),
}
crowded = pytest.mark.parametrize("name", CROWDED)


@crowded
def test_too_much_of_one_thing_is_too_much(name: str) -> None:
    assert LIMITS.excess(CROWDED[name]) == (name,)
    assert LIMITS.crowded([CROWDED[name]])


@pytest.mark.parametrize(
    "within",
    [
        IDLE,
        status(direct=90, kv_used=900, step_s=1.0),
        status(direct=8, places=8),
        status(direct=1, kv_used=500, step_s=9.0),
        status(direct=24, kv_used=240, step_s=9.0),
        status(direct=0, active=500, waiting=500, kv_used=100, step_s=9.0),
        VerifierStatus("ready", "a", waiting=500, kv_tokens=1000),
        VerifierStatus("ready", "a", direct=9, step_s=9.0),
    ],
    ids=["idle", "at the bounds", "a full step", "one alone", "few", "windows", "older", "does not say"],
)
def test_less_is_not(within: VerifierStatus) -> None:
    """A slow step is its device's with few requests; windows wait if they are too many."""
    assert LIMITS.excess(within) == ()


STEPS = Costs(((1.0, 0.5), (60.0, 0.8), (90.0, 1.2)))
BESIDE: dict[str, dict[str, Any]] = {
    "places": {"direct": 91, "kv_used": 500, "yielding": 31},
    "KV": {"direct": 40, "kv_used": 950, "yielding": 10, "yielding_kv": 450},
    "step time": {"direct": 90, "kv_used": 500, "yielding": 30, "step_s": 1.2, "decode_steps": STEPS},
    "step time, not known of fewer": {"direct": 90, "kv_used": 500, "yielding": 30, "step_s": 1.2},
}


@pytest.mark.parametrize("name", BESIDE)
def test_who_gives_way_is_not_too_much(name: str) -> None:
    """Best effort that is decoded beside others turns nobody away and calls for no further verifier; were it
    not known to give way, it would: the control."""
    said = BESIDE[name]
    for known in (True, False):
        busy = status(**said) if known else status(**said | {"yielding": 0, "yielding_kv": 0})
        assert LIMITS.excess(busy) == (() if known else (name.split(",")[0],))
        admission, scaler = Admission(8, 8, 0.5, 0.5), Scaler(1, 3, LIMITS, 60.0)
        admission.look(LIMITS.crowded([busy]))
        assert admission.limit == (8 if known else 1)
        assert counts(scaler, lambda _, busy=busy: [busy], 10)[-1] == (1 if known else 2)  # type: ignore[misc]


def test_too_much_beside_who_gives_way_is_too_much() -> None:
    """What the others need alone counts as ever."""
    for name, more in (
        ("places", {"direct": 100, "kv_used": 500}),
        ("KV", {"direct": 40, "kv_used": 990, "yielding_kv": 50}),
        ("step time", {"direct": 85, "kv_used": 500, "step_s": 1.9, "decode_steps": STEPS}),
    ):
        assert LIMITS.excess(status(yielding=5, **more)) == (name,)


def test_who_gives_way_keeps_no_verifier() -> None:
    busy = {"direct": 80, "kv_used": 800}
    two = [status(**busy), status(**busy)]
    assert not LIMITS.fit(two, two[:1], 0.0), "the control"
    two = [status(**busy, yielding=70, yielding_kv=700)] * 2
    assert LIMITS.fit(two, two[:1], 0.0)


def test_nine_are_too_many_for_eight_places() -> None:
    assert LIMITS.excess(status(direct=9, places=8)) == ("places",)


@crowded
def test_an_idle_verifier_relieves_the_others(name: str) -> None:
    """Those that have too much keep it until it ends: what counts is where new work can go."""
    admission, scaler = Admission(8, 8, 0.5, 0.5), Scaler(1, 3, LIMITS, 60.0)
    assert counts(scaler, lambda _: [CROWDED[name]], 10)[-1] == 2
    two = [CROWDED[name], IDLE]
    assert counts(scaler, lambda _: two, 500, 10)[-1] == 2, "neither a third one, nor is the second given up"
    admission.look(LIMITS.crowded(two))
    assert admission.limit == 8
    both = [CROWDED[name]] * 2  # the control
    assert counts(scaler, lambda _: both, 100, 510)[-1] == 3
    admission.look(LIMITS.crowded(both))
    assert admission.limit == 1
    assert not LIMITS.crowded([])


def counts(
    scaler: Scaler,
    ready: Callable[[float], Sequence[VerifierStatus]],
    seconds: int,
    since: int = 0,
    queue_s: float = 0.0,
    coming: int = 0,
    left: Sequence[VerifierStatus] | None = None,
) -> list[int]:
    """How many are wanted, each second. left: all but the last one, if not said."""
    found = []
    for now in map(float, range(since, since + seconds)):
        present = ready(now)
        found.append(scaler.look(now, present, present[:-1] if left is None else left, queue_s, coming))
    return found


def scaler_of(**changes: Any) -> Scaler:
    return Scaler(**({"least": 1, "most": 3, "limits": LIMITS, "scale_down_s": 60.0} | changes))


@pytest.mark.parametrize("name", ["queue", *CROWDED])
def test_too_much_work_adds_verifiers_one_after_the_other(name: str) -> None:
    made, one, late = scaler_of(), CROWDED.get(name, IDLE), LATE if name == "queue" else 0.0
    found = counts(made, lambda _: [one] * made.wanted, 100, queue_s=late)
    assert found[: LOOKS_UP - 1] == [1] * (LOOKS_UP - 1)
    assert found[-1] == 3
    changes = [i for i in range(1, 100) if found[i] != found[i - 1]]
    assert len(changes) == 2
    assert changes[1] - changes[0] >= SETTLE_S
    fixed = scaler_of(most=0)
    assert set(counts(fixed, lambda _: [one], 100, queue_s=late)) == {1}


def test_one_burst_is_no_reason_and_a_starting_verifier_is_waited_for() -> None:
    made = scaler_of()
    for now in range(50):
        made.look(float(now), [IDLE], [], LATE if now % LOOKS_UP else 0.0)
    assert made.wanted == 1
    made = scaler_of()
    for now in range(200):  # the second one never becomes ready
        made.look(float(now), [IDLE], [], LATE, coming=made.wanted - 1)
    assert made.wanted == 2
    found = counts(made, lambda _: [IDLE] * made.wanted, 30, 200, queue_s=LATE)
    assert found.index(3) >= SETTLE_S - 1, "it has time to make a difference once it is there"


def test_a_quiet_time_takes_them_away_again() -> None:
    made = scaler_of()
    assert counts(made, lambda _: [IDLE] * made.wanted, 100, queue_s=LATE)[-1] == 3
    found = counts(made, lambda _: [IDLE] * made.wanted, 400, 100)
    assert found[-1] == 1
    assert found.index(1) >= 2 * 60


@pytest.mark.parametrize("coming", [2, 0], ids=["", "control: they are there"])
def test_no_quiet_time_is_counted_while_verifiers_are_missing(coming: int) -> None:
    """Nobody can ask for what they would do."""
    made = scaler_of()
    made.wanted = 2
    assert counts(made, lambda _: [] if coming else [IDLE] * 2, 59, coming=coming)[-1] == 2
    assert counts(made, lambda _: [IDLE] * 2, 30, 59)[-1] == (2 if coming else 1)
    assert counts(made, lambda _: [IDLE] * made.wanted, 60, 89)[-1] == 1


def kept(*told: VerifierStatus) -> int:
    """How many of these are kept when they have this work for long."""
    made = scaler_of()
    made.wanted = len(told)
    return counts(made, lambda _: told[: made.wanted], 70)[-1]


def test_who_is_needed_is_not_given_up() -> None:
    """No window comes or waits, but one alone would have too much. The controls: with less work, or when
    that is not counted, it is enough."""
    assert kept(*[status(direct=32)] * 2) == 2
    assert kept(*[status(direct=31)] * 2) == 1
    assert kept(*[status(direct=2, kv_used=320)] * 2) == 2
    assert kept(*[status(direct=2, kv_used=310)] * 2) == 1
    assert kept(*[status(direct=20, step_s=0.36)] * 2) == 2
    assert kept(*[status(direct=20, step_s=0.34)] * 2) == 1
    assert kept(*[status(direct=5, step_s=9.0)] * 2) == 1, "with few requests a step takes what it takes"
    assert kept(status(direct=10), status(direct=60, places=200)) == 2, "the last one is the larger"
    assert kept(status(direct=60, places=200), status(direct=10)) == 1
    made = scaler_of()
    made.wanted = 2
    assert counts(made, lambda _: [IDLE] * 2, 70, queue_s=LATE / 10)[-1] == 2, "windows wait a little"


def test_who_is_refused_counts_as_nobody() -> None:
    """Of two wanted ones one is ready. It is not given up as if it were the last one of two; the refused one
    is, which does nothing."""
    made = scaler_of()
    made.wanted = 2
    assert counts(made, lambda _: [status(direct=1)], 200)[-1] == 2, "the first one is refused"
    busy = status(direct=60)
    assert counts(made, lambda _: [busy], 200, 200, left=[busy])[-1] == 1, "the last one is"


WOBBLES: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "places": lambda part, n: {"direct": round(90 * part / n)},
    "KV": lambda part, n: {"direct": 2, "kv_used": round(900 * part / n)},
    "step time": lambda part, n: {"direct": 60 // n, "step_s": part / n},
    "few requests": lambda part, n: {"direct": round(25 * part / n), "step_s": 1.5},
}


@pytest.mark.parametrize("rest", [load.REST, 1.0], ids=["", "control: no hysteresis"])
@pytest.mark.parametrize("name", WOBBLES)
def test_work_about_the_bound_does_not_start_and_end_verifiers(
    monkeypatch: pytest.MonkeyPatch, name: str, rest: float
) -> None:
    """5 % more and less, so slowly that each half lasts longer than scale_down_s."""
    monkeypatch.setattr(load, "REST", rest)
    made = scaler_of()

    def work(now: float) -> list[VerifierStatus]:
        part = 1 + 0.05 * math.sin(2 * math.pi * now / 400)
        return [status(**WOBBLES[name](part, made.wanted))] * made.wanted

    found = counts(made, work, 4000)
    changes = sum(a != b for a, b in pairwise(found))
    assert changes == 1 if rest < 1 else changes > 5


def test_the_time_of_steps_is_that_of_the_last_ones() -> None:
    now = [100.0]
    made = StepTime(lambda: now[0])
    assert made.mean_s(0, 0.0, 0.0) == 0.0
    assert made.mean_s(10, 1.0, 0.02) == pytest.approx(0.1)
    assert made.mean_s(12, 2.0, 0.02) == pytest.approx(0.5)
    now[0] += 0.4
    assert made.mean_s(12, 2.0, 0.02) == pytest.approx(0.5), "none can have ended so soon"
    assert made.mean_s(12, 2.0, 0.0) == 0.0, "idle"
    now[0] += 0.2
    assert made.mean_s(12, 2.0, 0.02) == 0.02, "none has ended: so old is the present one"
    assert made.mean_s(12, 2.0, 7.0) == 7.0


@pytest.mark.parametrize("long_s", [6, 5], ids=["", "control: as long as they should be"])
def test_steps_that_take_longer_than_between_two_looks_count_in_each(long_s: int) -> None:
    """Else such a verifier would have too much in one look of six, and never three times in a row."""
    now = 0
    limits, made = Limits(share=0.9, step_s=5.5, queue_s=0.5), StepTime(lambda: float(now))
    scaler, excess = scaler_of(limits=limits), list[tuple[str, ...]]()
    for now in range(1, 60):
        ended, present_s = divmod(now, long_s)
        step_s = made.mean_s(ended, float(long_s * ended), present_s or 0.01)
        ready = [status(direct=50, step_s=step_s)] * scaler.wanted
        scaler.look(float(now), ready, ready[:-1])
        excess.append(limits.excess(ready[0]))
    assert set(excess[long_s:]) == ({("step time",)} if long_s > 5.5 else {()})
    assert scaler.wanted == (3 if long_s > 5.5 else 1)
