"""Which way is chosen: what is expected at the ends, and each term of the model with a case that it decides.

A case is a request and a load with a term in it, and what these are without; the choices differ. So whoever
drops the term fails its case. What comes of the choices over time: test_way_simulation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llm42.session.load import LEAST_LEFT, WAYS, Load, Progress, Way
from llm42.session.policy import (
    HOLD,
    MARGIN,
    MOVE_MARGIN,
    choose,
    choose_best_effort,
    kv_needed,
    moves,
    patience_s,
    planned,
    prompts_s,
    rates,
    round_s,
    settled_window,
    switch_s,
)
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


# ---- the plan


@pytest.mark.parametrize("count", [8, 64, 256])
def test_where_all_are_deterministic_the_verifier_decodes(count: int) -> None:
    assert planned(TYPICAL, replace(LOAD, deterministic=count)) == "direct"


@pytest.mark.parametrize(("count", "best_effort"), [(1, 63), (5, 251), (25, 231), (1, 7)])
def test_few_among_many_are_verified(count: int, best_effort: int) -> None:
    load = replace(LOAD, deterministic=count, best_effort=best_effort)
    assert planned(TYPICAL, load) == planned(TYPICAL, replace(load, plan="direct")) == "verify"


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
            assert planned(TYPICAL, known) is None
            for plan in (None, *WAYS):
                told = replace(known, plan=plan, moves=True)
                assert choose(NEW, told) == "verify"
                assert [choose(under_way(way), told) for way in WAYS] == [*WAYS]
                assert choose_best_effort(NEW, told) == "verify"
            assert not moves(TYPICAL, known)
            assert rates(NEW, known) == {}


def test_a_verifier_that_was_never_asked_to_decode_is_tried() -> None:
    windows_alone = verifier(decode_steps=Costs())
    assert planned(TYPICAL, replace(LOAD, deterministic=64, verifier=windows_alone)) == "direct"


def test_a_plan_stands_while_nobody_needs_it() -> None:
    for plan in (None, *WAYS):
        assert planned(TYPICAL, many(deterministic=0, plan=plan)) == plan


HALF = {"deterministic": 32, "best_effort": 32}
PLANS: dict[str, tuple[Progress, Load, Progress, Load]] = {
    "best effort shares the step": (TYPICAL, many(), TYPICAL, many(best_effort=0)),
    "rollbacks": (replace(TYPICAL, wasted=9.0), many(**HALF), TYPICAL, many(**HALF)),
    "others are decoded there anyway": (
        TYPICAL, many(**HALF, verifier=verifier(others=20)), TYPICAL, many(**HALF),
    ),
    "the prompt is computed twice": (
        replace(TYPICAL, length=4000), many(**HALF), TYPICAL, many(**HALF),
    ),
    "how long outputs are": (
        replace(TYPICAL, length=4000), many(**HALF),
        replace(TYPICAL, length=4000, most=10_000, typical=10_000), many(**HALF),
    ),
    "windows that wait": (
        replace(TYPICAL, ahead=8), many(**HALF, verifier=verifier(waited_s=9.0)),
        replace(TYPICAL, ahead=8), many(**HALF),
    ),
    "short windows fill steps badly": (replace(TYPICAL, window=7), many(**HALF), TYPICAL, many(**HALF)),
    "a slow fast path has short windows": (
        replace(TYPICAL, deadline_s=0.05), many(**HALF), TYPICAL, many(**HALF),
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
    assert planned(typical, load) != planned(without, load_without)


def test_a_plan_needs_a_margin_to_change() -> None:
    loads = [
        replace(LOAD, best_effort=best_effort, deterministic=count)
        for best_effort in range(0, 256, 3)
        for count in range(1, 256 - best_effort, 3)
    ]

    def cost(load: Load, way: Way) -> float:
        return TYPICAL.left * round_s(TYPICAL, load, way) + prompts_s(TYPICAL, load, way)

    near = [load for load in loads if abs(1 - cost(load, "verify") / cost(load, "direct")) < MARGIN / 2]
    assert near
    for load in near:
        assert [planned(TYPICAL, replace(load, plan=way)) for way in WAYS] == [*WAYS]


def test_a_round_is_what_the_formula_says() -> None:
    load = many(deterministic=64, best_effort=64)
    fast, decoded = 64 / (2 * 0.0094), 64 / (2 * 0.0096)
    assert round_s(NEW, load, "direct") == pytest.approx(128 / (fast + decoded))
    # F(128) = 10.5 ms; windows of 64 rows take 6 ms, in which less than one other comes
    assert round_s(NEW, load, "verify") == pytest.approx(0.0105 + 64 * 0.0060 / 64)
    apart = replace(load, one_device=False)
    assert round_s(NEW, apart, "direct") == pytest.approx(128 / (2 * (fast + decoded)))
    assert round_s(NEW, apart, "verify") == pytest.approx(0.0105)
    others = replace(load, verifier=verifier(others=64))
    assert round_s(NEW, others, "verify") == pytest.approx(2 * 0.0105 + 64 * 0.0060 / 64)
    assert rates(NEW, load) == {"verify": pytest.approx(64 / 0.0165), "direct": pytest.approx(decoded)}
    moved = replace(load, movable=64, moves=True)
    assert round_s(NEW, moved, "direct") == pytest.approx(0.0108)
    assert rates(NEW, moved)["direct"] == pytest.approx(64 / 0.0108)
    assert rates(NEW, replace(load, deterministic=0)) == {}


def test_prompts_are_computed_by_both_or_by_one() -> None:
    fast, canonical = 8 * 1024 * VLLM.row_s, 8 * 1024 * WINDOWS.row_s
    assert prompts_s(NEW, many(), "verify") == pytest.approx(fast + canonical)
    assert prompts_s(NEW, many(), "direct") == pytest.approx(canonical)
    apart = many(one_device=False, verifier=verifier(share=0.5))
    assert prompts_s(NEW, apart, "verify") == pytest.approx(max(fast, canonical / 2))
    assert prompts_s(NEW, apart, "direct") == pytest.approx(canonical / 2)


# ---- one request


DIRECT, VERIFY = many(best_effort=0, plan="direct"), many(plan="verify")
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
    load = replace(LOAD, best_effort=0, deterministic=8)
    tie = round_s(under_way("verify"), load, "verify")
    for gain, goes in ((MARGIN / 2, False), (MARGIN * 2, True)):
        costs = Costs(((8.0, tie * (1 - gain)),))
        told = replace(load, plan="direct", verifier=verifier(decode_steps=costs))
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
    return many(deterministic=count, best_effort=best_effort, movable=best_effort, **more)


def test_best_effort_moves_where_both_gain() -> None:
    load = all_movable(32, 32)
    assert moves(TYPICAL, load)
    there = replace(load, moves=True)
    assert choose_best_effort(NEW, there) == "direct"
    assert planned(TYPICAL, there) == "direct"
    long = under_way("verify", output=8000, most=50_000, length=8100)
    assert choose_best_effort(long, there) == "direct"
    assert choose_best_effort(under_way("direct"), there) == "direct"


CASES: list[tuple[str, Callable[[], Load]]] = [
    ("nobody is deterministic", lambda: all_movable(0, 32)),
    ("few among many", lambda: all_movable(1, 255)),
    ("devices of their own", lambda: all_movable(32, 32, one_device=False)),
    ("none can", lambda: many(deterministic=32, best_effort=32)),
    ("a slow verifier", lambda: all_movable(
        32, 32, verifier=verifier(decode_steps=Costs(((64.0, 0.1),)), window_steps=Costs(((64.0, 0.1),)))
    )),
]  # fmt: skip


@pytest.mark.parametrize(("why", "load"), CASES)
def test_and_nowhere_else(why: str, load: Callable[[], Load]) -> None:
    assert not moves(TYPICAL, load())
    assert choose_best_effort(NEW, load()) == "verify"
    assert choose_best_effort(under_way("direct"), load()) == "verify", "it goes back"


@pytest.mark.parametrize("full", [{"kv_free": MUCH // 4}, {"direct": 800}])
def test_a_full_verifier_takes_no_best_effort(full: dict[str, int]) -> None:
    load = all_movable(32, 32, moves=True, verifier=verifier(**full))
    for request in (NEW, under_way("verify"), under_way("direct")):
        assert choose_best_effort(request, load) == "verify"


def test_a_long_prompt_does_not_move_for_a_few_tokens() -> None:
    load = all_movable(32, 32, moves=True)
    long = under_way("verify", output=1000, most=1200, length=60_000)
    assert choose_best_effort(long, load) == "verify"
    assert choose_best_effort(replace(long, length=100), load) == "direct"


def test_that_best_effort_moves_stands_until_there_is_another_answer() -> None:
    """Between the two there is room: what comes by margin does not go by noise."""

    def of(seconds: float) -> Load:
        costs = Costs(((32.0, 0.02), (64.0, seconds)))
        return all_movable(32, 32, verifier=verifier(decode_steps=costs))

    stays_s = round_s(TYPICAL, of(0.02), "verify")
    between = of(stays_s * (1 - MOVE_MARGIN / 2))
    assert not moves(TYPICAL, between)
    assert moves(TYPICAL, replace(between, moves=True))
    assert moves(TYPICAL, of(stays_s * (1 - 2 * MOVE_MARGIN)))
    assert not moves(TYPICAL, replace(of(stays_s * 1.5), moves=True))


def test_others_requests_are_not_tried_for_little() -> None:
    """Of so many decoded together only an estimate is known, which is rather too cheap."""
    measured, row_s = Costs(((8.0, 0.0056), (64.0, 0.0085))), 51.8e-6
    known = all_movable(8, 56, verifier=verifier(decode_steps=measured))
    one_size = verifier(decode_steps=Costs(measured.times[:1], row_s), window_steps=Costs())
    guessed = replace(known, verifier=one_size)
    assert one_size.decode.at(64) == pytest.approx(measured.at(64), rel=0.01)
    assert moves(TYPICAL, known) and not moves(TYPICAL, guessed)


# ---- how long somebody waits


def test_patience() -> None:
    load = replace(LOAD, deterministic=8)
    begun, fresh = (patience_s(under_way("direct"), load, 0.5, begun) for begun in (True, False))
    assert 2.0 < begun < fresh
    slow = replace(load, verifier=verifier(decode_steps=Costs(((8.0, 1.0),))))
    assert patience_s(under_way("direct"), slow, 0.5, True) > 30
    assert patience_s(under_way("direct"), Load(), 0.5, True) > begun


@pytest.mark.parametrize(("run", "window"), [(0.0, 7), (100.0, 15), (300.0, 31), (1e9, 63)])
def test_windows_settle_as_the_sessions_do(run: float, window: int) -> None:
    assert settled_window(run, 7, 63) == window


def test_a_decision_stands_for_a_while() -> None:
    assert HOLD > 15, "candidates of a first window: a switch may cost a prompt"
