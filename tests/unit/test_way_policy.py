"""Which way is chosen: what is expected at the ends, and each term of the model with a case that it decides.

A case is a request and a load with a term in it, and what these are without; the choices differ. So whoever
drops the term fails its case. What comes of the choices over time: test_way_simulation.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llm42.session.load import LEAST_LEFT, WAYS, Load, Progress, Rounds, Way
from llm42.session.policy import (
    HOLD,
    MARGIN,
    choose,
    choose_best_effort,
    has_room_for_all,
    kv_needed,
    patience_of_best_effort_s,
    patience_s,
    rates,
    round_s,
    settled_window,
    switch_s,
)
from llm42.session.rounds import rounds
from llm42.step_times import Costs, VerifierLoad
from tests.support.simulated_cluster import DECODE, VLLM, WINDOWS

MUCH = 10**9


def verifier(**more: Any) -> VerifierLoad:
    known = {"decode_steps": DECODE, "window_steps": WINDOWS, "places": 1024}
    known |= {"kv_tokens": MUCH, "kv_free": MUCH}
    return VerifierLoad(**(known | more))


LOAD = Load(fast=VLLM, verifier=verifier())
TYPICAL = Progress(None, length=256, most=256, window=63, typical=256)
NEW = Progress(None, length=1024, most=256, window=63)


def under_way(way: Way, output: int = 128, most: int = 1024, **more: Any) -> Progress:
    known = {"length": 1024 + output, "held": 1024 + output} | more
    return replace(NEW, way=way, output=output, most=most, **known)


def many(**more: Any) -> Load:
    return replace(LOAD, **({"best_effort": 248, "deterministic": 8} | more))


def planned(load: Load, typical: Progress = TYPICAL) -> Load:
    """With what the model says of it."""
    return replace(load, rounds=rounds(typical, load))


def cheaper(typical: Progress, load: Load) -> Way | None:
    """The way with the shorter round; None: too little is known."""
    known = planned(load, typical)
    return min(WAYS, key=lambda way: round_s(known, way)) if known.rounds else None


# ---- the model


@pytest.mark.parametrize("count", [8, 64, 256])
def test_where_all_are_deterministic_the_verifier_decodes(count: int) -> None:
    assert cheaper(TYPICAL, replace(LOAD, deterministic=count)) == "direct"


@pytest.mark.parametrize(("count", "best_effort"), [(1, 63), (5, 251), (25, 231), (1, 7)])
def test_few_among_many_are_verified(count: int, best_effort: int) -> None:
    assert cheaper(TYPICAL, replace(LOAD, deterministic=count, best_effort=best_effort)) == "verify"


def test_what_is_not_known_is_measured() -> None:
    """The fast path goes first, which measures both sides; nobody is moved by nothing."""
    for load in (
        Load(),
        Load(fast=VLLM),
        Load(fast=VLLM, verifier=VerifierLoad()),
        Load(verifier=verifier()),
    ):
        for best_effort in (0, 3):
            known = replace(load, best_effort=best_effort, movable=best_effort)
            assert rounds(TYPICAL, known) is None
            for plan in (None, *WAYS):
                told = replace(known, plan=plan, moves=True)
                assert choose(NEW, told) == "verify"
                assert [choose(under_way(way), told) for way in WAYS] == [*WAYS]
                assert choose_best_effort(NEW, told) == "verify"
            assert rates(known) == {}


def test_a_verifier_that_was_never_asked_to_decode_is_tried() -> None:
    windows_alone = verifier(decode_steps=Costs())
    assert cheaper(TYPICAL, replace(LOAD, deterministic=64, verifier=windows_alone)) == "direct"


def test_nothing_is_said_where_nobody_asks() -> None:
    assert rounds(TYPICAL, many(deterministic=0)) is None


HALF, FEWER = {"deterministic": 32, "best_effort": 32}, {"deterministic": 44, "best_effort": 212}
MANY, TWO = {"deterministic": 155, "best_effort": 101}, {"deterministic": 2, "best_effort": 0}
PLANS: dict[str, tuple[Progress, Load, Progress, Load]] = {
    "best effort shares the step": (TYPICAL, many(), TYPICAL, many(best_effort=0)),
    "rollbacks": (replace(TYPICAL, wasted=9.0), many(**HALF), TYPICAL, many(**HALF)),
    "others are decoded there anyway": (
        TYPICAL, many(**HALF, verifier=verifier(others=20)), TYPICAL, many(**HALF),
    ),
    "the prompt is computed twice": (
        replace(TYPICAL, length=4000), many(**FEWER), TYPICAL, many(**FEWER),
    ),
    "how long outputs are": (
        replace(TYPICAL, length=4000), many(**FEWER),
        replace(TYPICAL, length=4000, most=10_000, typical=10_000), many(**FEWER),
    ),
    "windows that wait": (
        replace(TYPICAL, ahead=8), many(**HALF, verifier=verifier(waited_s=9.0)),
        replace(TYPICAL, ahead=8), many(**HALF),
    ),
    "short windows of few requests fill steps badly": (
        replace(TYPICAL, window=7), many(**TWO), TYPICAL, many(**TWO),
    ),
    "a slow fast path has short windows": (
        replace(TYPICAL, deadline_s=0.02), many(**MANY), TYPICAL, many(**MANY),
    ),
    "on two devices neither waits": (
        TYPICAL, many(**HALF, one_device=False), TYPICAL, many(**HALF),
    ),
    "on two devices a verifier has nothing else to do than prompts": (
        replace(TYPICAL, length=2000), many(best_effort=0, deterministic=64, one_device=False),
        replace(TYPICAL, length=2000), many(best_effort=0, deterministic=64),
    ),
    "several verifiers share the requests": (
        TYPICAL, many(best_effort=0, deterministic=64, one_device=False, verifier=verifier(share=0.1)),
        TYPICAL, many(best_effort=0, deterministic=64, one_device=False),
    ),
    "best effort that has moved is in the same step": (
        TYPICAL, many(**HALF, movable=32, moves=True), TYPICAL, many(**HALF, movable=32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("term", PLANS)
def test_each_term_decides_somewhere(term: str) -> None:
    typical, load, without, load_without = PLANS[term]
    assert cheaper(typical, load) != cheaper(without, load_without)


def test_a_round_is_what_the_formula_says() -> None:
    """Without prompts; as many of both kinds begin, with equal outputs."""
    short = replace(TYPICAL, length=0)
    load = many(deterministic=64, best_effort=64)
    # where each side has half of the device, equal shares end where b / F(b) = d / S(d)
    x = 64.0
    for _ in range(50):
        x = 128 * DECODE.at(x) / (DECODE.at(x) + VLLM.at(128 - x))
    rate = x / (2 * DECODE.at(x)) + (128 - x) / (2 * VLLM.at(128 - x))
    found = rounds(short, load)
    assert found is not None
    assert found.direct == pytest.approx(128 / rate, rel=1e-3)
    # F(128) = 10.5 ms; windows of 64 rows, as many as come together: between one by one and full steps
    best, worst = (64 * WINDOWS.at(rows) / rows for rows in (1024, 64))
    assert 0.0105 + best < found.verify < 0.0105 + worst
    one = rounds(short, many(deterministic=1, best_effort=127))
    assert one is not None and one.verify == pytest.approx(0.0105 + WINDOWS.at(64) / 64)
    apart = rounds(short, replace(load, one_device=False))
    assert apart is not None
    assert apart.direct == pytest.approx(found.direct / 2, rel=1e-3)
    assert apart.verify == pytest.approx(0.0105)
    moved = rounds(short, replace(load, movable=64))
    assert moved is not None and moved.moved == pytest.approx(DECODE.at(128))


def test_who_begins_counts_and_not_who_is_there() -> None:
    """In direct few deterministic ones are there, since they end sooner: they are as many as before."""
    begun = many(deterministic=20, best_effort=236, begins=0.2)
    other = many(deterministic=50, best_effort=206, begins=0.2)
    assert rounds(TYPICAL, begun) == rounds(TYPICAL, other)
    counted = [rounds(TYPICAL, replace(load, begins=None)) for load in (begun, other)]
    assert counted[0] != counted[1], "control"


def test_prompts_of_best_effort_count() -> None:
    """On the fast path in both ways; on a verifier's where they move."""
    load = many(deterministic=32, best_effort=32, movable=32, kv_each=1000.0)
    light, heavy = (rounds(TYPICAL, replace(load, prompts=prompts)) for prompts in (0.0, 100.0))
    assert light is not None and heavy is not None
    assert heavy.verify > light.verify and heavy.direct > light.direct
    slow = replace(load, prompts=100.0, verifier=verifier(decode_steps=replace(DECODE, row_s=9e-3)))
    slow_rows = rounds(TYPICAL, slow)
    assert light.moved < light.direct
    assert slow_rows is not None and slow_rows.moved > slow_rows.verify


def test_what_is_not_measured_is_taken_from_the_fast_path() -> None:
    """It computes the same model; windows say little of decoding, since they share their contexts."""
    one_size = verifier(decode_steps=Costs(((8.0, 2 * VLLM.at(8)),)))
    load = many(verifier=one_size)
    assert load.decode.at(256) == pytest.approx(2 * VLLM.at(256))
    assert many(verifier=verifier(decode_steps=Costs())).decode.at(256) == pytest.approx(VLLM.at(256))


def test_rates() -> None:
    load = planned(many(deterministic=64, best_effort=64, movable=64))
    assert load.rounds is not None
    assert rates(load) == {"verify": 64 / load.rounds.verify, "direct": 64 / load.rounds.direct}
    assert rates(replace(load, moves=True))["direct"] == 64 / load.rounds.moved


# ---- one request


DIRECT, VERIFY = planned(many(best_effort=0, plan="direct")), planned(many(plan="verify"))
CHANGES: dict[str, tuple[Progress, Load, Progress, Load]] = {
    "a new one follows the plan": (NEW, DIRECT, NEW, VERIFY),
    "so does one that gains": (under_way("direct"), VERIFY, under_way("direct"), DIRECT),
    "a switch computes what the fast path does not hold": (
        under_way("direct", held=0, length=90_000), VERIFY, under_way("direct"), VERIFY,
    ),
    "tokens that are left pay for a switch": (
        under_way("direct", output=1024, most=1034, held=0), VERIFY,
        under_way("direct", output=1024, most=9000, held=0), VERIFY,
    ),
    "KV for what is to come": (
        under_way("verify"), replace(DIRECT, verifier=verifier(kv_free=100)), under_way("verify"), DIRECT,
    ),
    "KV that others were promised": (
        under_way("verify"), replace(DIRECT, promised=MUCH - 100.0), under_way("verify"), DIRECT,
    ),
    "KV for a prompt": (NEW, replace(DIRECT, verifier=verifier(kv_free=1024)), NEW, DIRECT),
    "places": (NEW, replace(DIRECT, verifier=verifier(direct=1000)), NEW, DIRECT),
}  # fmt: skip


@pytest.mark.parametrize("term", CHANGES)
def test_each_term_decides_for_somebody(term: str) -> None:
    request, load, without, load_without = CHANGES[term]
    assert choose(request, load) != choose(without, load_without)


def test_who_gains_little_stays() -> None:
    """A request need not follow a plan at once: by a margin of its own."""
    for gain, goes in ((MARGIN / 2, False), (MARGIN * 2, True)):
        told = replace(DIRECT, rounds=Rounds(0.01, 0.01 * (1 - gain), 0.01))
        assert (choose(under_way("verify"), told) == "direct") == goes


def test_the_prefill_of_a_switch() -> None:
    request = under_way("direct", held=1000, length=1500)
    assert switch_s(request, many(), "verify") == pytest.approx(8 * 500 * VLLM.row_s)
    assert switch_s(request, many(), "direct") == 0.0
    unknown = many(fast=replace(VLLM, row_s=0.0))
    assert switch_s(request, unknown, "verify") == pytest.approx(8 * 500 * DECODE.row_s), (
        "as its verifier does"
    )


def test_few_outputs_are_as_long_as_they_may_be() -> None:
    assert under_way("verify", output=0, most=10_000).left == LEAST_LEFT
    assert under_way("verify", output=1000, most=10_000).left == 1000
    assert under_way("verify", output=1000, most=1010).left == 10
    assert (TYPICAL.left, replace(TYPICAL, most=50).left) == (256, 50)
    assert kv_needed(under_way("verify", output=1000, most=1010)) == 2034


# ---- best effort


def all_movable(count: int, best_effort: int, **more: Any) -> Load:
    return planned(many(deterministic=count, best_effort=best_effort, movable=best_effort, **more))


def test_best_effort_moves_where_both_gain() -> None:
    there = all_movable(32, 32, moves=True, plan="direct")
    assert there.rounds is not None and there.rounds.moved < min(there.rounds[:2])
    assert choose_best_effort(NEW, there) == "direct"
    long = under_way("verify", output=8000, most=50_000, length=8100)
    assert choose_best_effort(long, there) == "direct"
    assert choose_best_effort(under_way("direct"), there) == "direct"


def test_nobody_stays_behind_where_the_plan_is_to_move() -> None:
    """Even if verify would do as well: the plan is another one, and few on the fast path cost half of the
    device."""
    rounds_ = Rounds(verify=0.017, direct=0.028, moved=0.0175)
    load = replace(all_movable(32, 32, moves=True, plan="direct"), rounds=rounds_)
    assert choose_best_effort(NEW, load) == "direct"
    none = rounds_._replace(direct=rounds_.moved)
    assert choose_best_effort(NEW, replace(load, rounds=none)) == "verify", "nothing is gained"


@pytest.mark.parametrize(("behind", "way"), [(1, "direct"), (20, "verify"), (None, "verify")])
def test_the_last_ones_behind_follow(behind: int | None, way: Way) -> None:
    """What has to be computed anew is theirs alone; of many it takes longer than they would stay."""
    load = replace(all_movable(32, 32, moves=True, plan="direct"), rounds=Rounds(0.017, 0.028, 0.0175))
    begun = under_way("verify", output=64, most=256, length=4000)
    assert choose_best_effort(begun, replace(load, behind=behind)) == way


@pytest.mark.parametrize("load", [all_movable(0, 32, moves=True), all_movable(32, 32)])
def test_and_nowhere_else(load: Load) -> None:
    """Where nobody is deterministic any more, it goes back; and unless it is the plan."""
    assert choose_best_effort(NEW, load) == "verify"
    assert choose_best_effort(under_way("direct"), load) == "verify", "it goes back"
    assert choose_best_effort(under_way("verify"), load) == "verify"


def test_a_slow_verifier_decodes_no_best_effort() -> None:
    slow = Costs(((64.0, 0.1),))
    found = all_movable(32, 32, verifier=verifier(decode_steps=slow, window_steps=slow)).rounds
    assert found is not None and found.moved > found.verify


@pytest.mark.parametrize("full", [{"kv_free": MUCH // 4}, {"direct": 800}])
def test_a_full_verifier_takes_no_best_effort(full: dict[str, int]) -> None:
    load = all_movable(32, 32, moves=True, verifier=verifier(**full))
    for request in (NEW, under_way("verify"), under_way("direct")):
        assert choose_best_effort(request, load) == "verify"


def test_best_effort_moves_if_there_is_room_for_all_of_it() -> None:
    """Half of it there is worst."""
    load = all_movable(32, 96, kv_each=1000.0)
    assert has_room_for_all(TYPICAL, load)
    assert not has_room_for_all(TYPICAL, replace(load, verifier=verifier(kv_tokens=150_000)))
    assert not has_room_for_all(TYPICAL, replace(load, verifier=verifier(places=128)))
    assert not has_room_for_all(TYPICAL, many(deterministic=32, best_effort=32)), "nobody can"


def test_a_long_prompt_does_not_move_for_a_few_tokens() -> None:
    load = all_movable(32, 32, moves=True)
    long = under_way("verify", output=1000, most=1200, length=60_000)
    assert choose_best_effort(long, load) == "verify"
    assert choose_best_effort(replace(long, length=100), load) == "direct"


def test_a_long_prompt_begins_where_it_need_not_wait() -> None:
    load = all_movable(32, 32, moves=True)
    long = replace(NEW, length=60_000, deadline_s=0.5)
    assert choose_best_effort(long, load) == "verify"
    quick = replace(load, verifier=verifier(decode_steps=replace(DECODE, row_s=1e-9)))
    assert choose_best_effort(long, quick) == "direct", "control"


def test_replicas_share_a_verifiers_room() -> None:
    """Each sees the same room, and promises no more than its part."""
    room = verifier(kv_tokens=4000, kv_free=2600)
    load = replace(DIRECT, verifier=room)
    new = replace(NEW, typical=256)
    assert choose(new, load) == "direct"
    crowd = replace(load, promised=1200.0, coming=1)
    assert choose(new, crowd) == "direct"
    assert choose(new, replace(crowd, verifier=replace(room, replicas=2))) == "verify"
    places = verifier(direct=100, places=256)
    waiting = replace(DIRECT, coming=80, verifier=places)
    assert choose(new, waiting) == "direct"
    assert choose(new, replace(waiting, verifier=replace(places, replicas=2))) == "verify"


# ---- how long somebody waits


def test_patience() -> None:
    load = replace(LOAD, deterministic=8)
    begun, fresh = (patience_s(under_way("direct"), load, 0.5, begun) for begun in (True, False))
    assert 2.0 < begun < fresh
    slow = replace(load, verifier=verifier(decode_steps=Costs(((8.0, 1.0),))))
    assert patience_s(under_way("direct"), slow, 0.5, True) > 30
    assert patience_s(under_way("direct"), Load(), 0.5, True) > begun


def test_patience_of_best_effort() -> None:
    """Bounded, however long the prompts of all would take."""
    few, all_of_them = replace(LOAD, deterministic=2), replace(LOAD, deterministic=128, movable=128)
    found = [patience_of_best_effort_s(under_way("direct"), load, 0.5) for load in (Load(), few, all_of_them)]
    assert found[0] == 2.0 < found[1] < 3.0 < found[2] <= 8.0


@pytest.mark.parametrize(("run", "window"), [(0.0, 7), (100.0, 15), (300.0, 31), (1e9, 63)])
def test_windows_settle_as_the_sessions_do(run: float, window: int) -> None:
    assert settled_window(run, 7, 63) == window


def test_a_decision_stands_for_a_while() -> None:
    assert HOLD > 15, "candidates of a first window: a switch may cost a prompt"
