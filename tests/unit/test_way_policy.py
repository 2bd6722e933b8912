"""Which way is chosen: what is expected at the ends, and each term of the model with a case that it decides.

A case is a request and a load with a term in it, and what these are without; the choices differ. So whoever
drops the term fails its case. What comes of the choices over time: test_way_simulation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llm42.session.policy import (
    HOLD,
    LEAST_LEFT,
    MARGIN,
    MOVE_MARGIN,
    WAYS,
    Load,
    Progress,
    Way,
    choose,
    choose_best_effort,
    kv_needed,
    moves,
    patience_s,
    rates,
    round_s,
    settled_window,
    switch_s,
    total_s,
)
from llm42.step_times import Costs, VerifierLoad
from tests.support.simulated_cluster import OURS, VLLM

MUCH = 10**9


def verifier(**more: Any) -> VerifierLoad:
    known = {"decode_steps": OURS, "window_steps": OURS, "places": 1024, "kv_free": MUCH}
    return VerifierLoad(**(known | more))


LOAD = Load(fast=VLLM, verifier=verifier())
NEW = Progress(None, length=1024, most=256, window=63)


def under_way(way: Way, output: int = 128, most: int = 1024, **more: Any) -> Progress:
    known = {"length": 1024 + output, "held": 1024 + output} | more
    return replace(NEW, way=way, output=output, most=most, **known)


def many(**more: Any) -> Load:
    return replace(LOAD, **({"best_effort": 248, "deterministic": 8} | more))


@pytest.mark.parametrize("count", [8, 64, 256])
def test_where_all_are_deterministic_the_verifier_decodes(count: int) -> None:
    assert choose(NEW, replace(LOAD, deterministic=count)) == "direct"


@pytest.mark.parametrize(("count", "best_effort"), [(1, 63), (5, 251), (25, 231), (1, 7)])
def test_few_among_many_are_verified(count: int, best_effort: int) -> None:
    load = replace(LOAD, deterministic=count, best_effort=best_effort)
    assert choose(NEW, load) == "verify"
    assert choose(under_way("direct"), load) == "verify"


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
            assert choose(NEW, known) == "verify"
            assert [choose(under_way(way), known) for way in WAYS] == [*WAYS]
            assert not moves(known)
            assert choose_best_effort(NEW, replace(known, moves=True)) == "verify"
            assert rates(NEW, known) == {}


def test_a_verifier_that_was_never_asked_to_decode_is_tried() -> None:
    windows_alone = verifier(decode_steps=Costs())
    assert choose(NEW, replace(LOAD, deterministic=64, verifier=windows_alone)) == "direct"


TERMS: dict[str, tuple[Progress, Load, Progress, Load]] = {
    "best effort shares the step": (
        under_way("verify"), many(), under_way("verify"), many(best_effort=0),
    ),
    "rollbacks": (
        under_way("verify", wasted=60.0), many(), under_way("verify"), many(),
    ),
    "others are decoded there anyway": (
        under_way("verify"), many(verifier=verifier(others=20)), under_way("verify"), many(),
    ),
    "the prompt is computed twice": (
        replace(NEW, length=60_000), many(deterministic=64, best_effort=64),
        replace(NEW, length=10), many(deterministic=64, best_effort=64),
    ),
    "a switch computes what the fast path does not hold": (
        under_way("direct", held=0, length=90_000), many(), under_way("direct"), many(),
    ),
    "tokens that are left pay for a switch": (
        under_way("direct", output=1024, most=1034, held=0), many(),
        under_way("direct", output=1024, most=2048, held=0), many(),
    ),
    "windows that wait": (
        under_way("verify", ahead=8), many(verifier=verifier(waited_s=9.0)),
        under_way("verify", ahead=8), many(),
    ),
    "short windows fill steps badly": (
        under_way("verify", window=1), many(deterministic=64, best_effort=64),
        under_way("verify", window=63), many(deterministic=64, best_effort=64),
    ),
    "a slow fast path has short windows": (
        under_way("verify", deadline_s=0.001), many(deterministic=64, best_effort=64),
        under_way("verify"), many(deterministic=64, best_effort=64),
    ),
    "KV for what is to come": (
        under_way("verify"), many(best_effort=0, verifier=verifier(kv_free=100)),
        under_way("verify"), many(best_effort=0),
    ),
    "KV that others were promised": (
        under_way("verify"), many(best_effort=0, promised=MUCH - 100.0),
        under_way("verify"), many(best_effort=0),
    ),
    "KV for a prompt": (
        NEW, replace(LOAD, deterministic=8, verifier=verifier(kv_free=1024)),
        NEW, replace(LOAD, deterministic=8),
    ),
    "places": (
        NEW, replace(LOAD, deterministic=8, verifier=verifier(direct=1000)),
        NEW, replace(LOAD, deterministic=8),
    ),
    "on two devices neither waits": (
        under_way("verify"), many(one_device=False, deterministic=60, best_effort=196),
        under_way("verify"), many(one_device=True, deterministic=60, best_effort=196),
    ),
    "several verifiers share the requests": (
        under_way("verify"),
        many(one_device=False, deterministic=248, best_effort=8, verifier=verifier(share=0.1, others=200)),
        under_way("verify"),
        many(one_device=False, deterministic=248, best_effort=8, verifier=verifier(share=1.0, others=700)),
    ),
    "best effort that has moved is in the same step": (
        under_way("verify"), many(movable=248, moves=True), under_way("verify"), many(movable=248),
    ),
}  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
def test_each_term_decides_somewhere(term: str) -> None:
    request, load, without, load_without = TERMS[term]
    assert choose(request, load) != choose(without, load_without)


def test_a_round_is_what_the_formula_says() -> None:
    load = many(deterministic=64, best_effort=64)
    fast, decoded = 64 / (2 * 0.0094), 64 / (2 * 0.0060)
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
    assert round_s(NEW, moved, "direct") == pytest.approx(OURS.at(128))
    assert rates(NEW, moved)["direct"] == pytest.approx(64 / OURS.at(128))
    assert rates(NEW, replace(load, deterministic=0)) == {}


def test_the_prefill_of_a_switch() -> None:
    request = under_way("direct", held=1000, length=1500)
    assert switch_s(request, many(), "verify") == pytest.approx(8 * 500 * VLLM.row_s)
    assert switch_s(request, many(), "direct") == 0.0
    assert switch_s(replace(request, way="verify"), many(), "verify") == 0.0
    assert switch_s(NEW, many(), "verify") == pytest.approx(8 * 1024 * VLLM.row_s)
    unknown = many(fast=replace(VLLM, row_s=0.0))
    assert switch_s(NEW, unknown, "verify") == pytest.approx(8 * 1024 * OURS.row_s), "as its verifier does"


def test_few_outputs_are_as_long_as_they_may_be() -> None:
    assert under_way("verify", output=0, most=10_000).left == LEAST_LEFT
    assert under_way("verify", output=1000, most=10_000).left == 1000
    assert under_way("verify", output=1000, most=1010).left == 10
    assert kv_needed(under_way("verify", output=1000, most=1010)) == 2034


def test_who_has_begun_needs_a_margin() -> None:
    """Near a tie it stays in either way; a new one takes what is cheaper by however little."""
    near = [
        replace(LOAD, best_effort=best_effort, deterministic=count)
        for best_effort in range(0, 256, 3)
        for count in range(1, 256 - best_effort, 3)
    ]
    tied = [
        load
        for load in near
        if 0
        < abs(1 - total_s(under_way("verify"), load, "verify") / total_s(under_way("verify"), load, "direct"))
        < MARGIN / 2
    ]
    assert tied
    for load in tied:
        assert [choose(under_way(way), load) for way in WAYS] == [*WAYS]
        costs = [total_s(NEW, load, way) for way in WAYS]
        assert choose(NEW, load) == ("direct" if costs[1] <= costs[0] else "verify")


# ---- best effort


def all_movable(count: int, best_effort: int, **more: Any) -> Load:
    return many(deterministic=count, best_effort=best_effort, movable=best_effort, **more)


def test_best_effort_moves_where_both_gain() -> None:
    load = all_movable(32, 32)
    assert moves(load)
    there = replace(load, moves=True)
    assert choose_best_effort(NEW, there) == "direct"
    assert choose(NEW, there) == "direct"
    assert choose_best_effort(under_way("verify"), there) == "direct"
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
    assert not moves(load())
    assert choose_best_effort(NEW, load()) == "verify"
    assert choose_best_effort(under_way("direct"), load()) == "verify", "it goes back"


@pytest.mark.parametrize("full", [{"kv_free": 10}, {"direct": 1024}])
def test_a_full_verifier_takes_no_best_effort(full: dict[str, int]) -> None:
    load = all_movable(32, 32, moves=True, verifier=verifier(**full))
    for request in (NEW, under_way("verify"), under_way("direct")):
        assert choose_best_effort(request, load) == "verify"


def test_a_long_prompt_does_not_move_for_a_few_tokens() -> None:
    load = all_movable(32, 32, moves=True)
    long = under_way("verify", output=1000, most=1010, length=60_000)
    assert choose_best_effort(long, load) == "verify"
    assert choose_best_effort(replace(long, most=50_000), load) == "direct"


def test_that_best_effort_moves_stands_until_there_is_another_answer() -> None:
    """Between the two there is room: what comes by margin does not go by noise."""

    def of(seconds: float) -> Load:
        costs = Costs(((64.0, seconds),))
        return all_movable(32, 32, verifier=verifier(decode_steps=costs))

    stays_s = min(round_s(NEW, of(0.01), way) for way in WAYS)
    between = of(stays_s * (1 - MOVE_MARGIN / 2))
    assert not moves(between)
    assert moves(replace(between, moves=True))
    assert not moves(replace(of(stays_s * 1.5), moves=True))


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
