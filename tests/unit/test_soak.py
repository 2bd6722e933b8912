"""A soak's figures: what they would say of a leak, of a wrong answer, and of nothing at all."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak.cpu import Soak, figures_of
from benchmarks.soak.watch import GAUGES, Held, growth, sums

RIGHT = {0: "[[1], [-0.5]]"}
QUIET = {"tasks": 22.0, "kv": 0.0, "held": 0.0}
OLD = Held(pid=7, pss_mib=200.0, descriptors=60, threads=30, age_s=900.0)


def soak() -> Soak:
    made = Soak(None, argparse.Namespace())  # type: ignore[arg-type]
    made.tally.answers[0] = Counter({RIGHT[0]: 5})
    made.tally.outcomes = Counter({"stream: finished": 5, "leave: left": 1})
    return made


def missed(run: Soak, after: Held = OLD, quiet: dict[str, float] = QUIET) -> set[str]:
    """Figures of the run that miss their targets."""
    ends: dict[str, Any] = {"before": QUIET, "after": quiet}
    figures = figures_of(run, {"replica": [OLD]}, {"replica": [after]}, ends, RIGHT)
    return {name for name, figure in figures.items() if not figure.met}


def test_nothing_is_said_of_a_run_that_leaves_things_as_they_were() -> None:
    assert missed(soak()) == set()


@pytest.mark.parametrize(
    ("grown", "figure"),
    [
        ({"pss_mib": 300.0}, "memory_growth_mib"),
        ({"descriptors": 90}, "descriptor_growth"),
        ({"threads": 50}, "thread_growth"),
    ],
)
def test_a_leak_of_a_process_that_lived_through_it_is_seen(grown: dict[str, Any], figure: str) -> None:
    assert missed(soak(), replace(OLD, **grown)) == {figure}


def test_a_new_process_is_not_compared_with_another_ones_beginnings() -> None:
    new = replace(OLD, pid=8, pss_mib=900.0)
    assert growth({"replica": [OLD]}, {"replica": [new, OLD]}, "pss_mib") == {"replica": 0.0}


@pytest.mark.parametrize(
    ("left", "figure"),
    [("tasks", "task_growth"), ("kv", "kv_held_at_end"), ("held", "requests_held_at_end")],
)
def test_what_is_held_at_the_end_is_seen(left: str, figure: str) -> None:
    assert missed(soak(), quiet=QUIET | {left: 40.0}) == {figure}


def test_one_wrong_bit_is_seen() -> None:
    run = soak()
    run.tally.answers[0]["[[1], [-0.5000000000000001]]"] += 1
    assert missed(run) == {"wrong_answers"}
    assert run.tally.different() == {0: 2}


@pytest.mark.parametrize(("tokens", "wrong"), [([], 0), ([1], 0), ([2], 1), ([1, 1], 1)])
def test_what_came_before_a_cut_is_compared_too(tokens: list[int], wrong: int) -> None:
    run = soak()
    run.tally.cut.append((0, tokens))
    assert run.tally.wrong(RIGHT) == wrong


def page(*left_out: str) -> str:
    """A metrics page with two series of each gauge, of value 1.5."""
    names = [f"ray_{metric.name}" for metrics in GAUGES.values() for metric in metrics]
    lines = [f'{name}{{a="{i}"}} 1.5' for name in names if name not in left_out for i in range(2)]
    return "\n".join(["# HELP ray_llm42_other words", 'ray_llm42_other{a="b"} 9', *lines])


def test_series_are_added_up() -> None:
    assert sums(page()) == {name: 3.0 * len(metrics) for name, metrics in GAUGES.items()}


def test_a_page_without_a_series_is_not_a_page_of_zeros() -> None:
    with pytest.raises(ValueError, match="no llm42_verifier_kv_held_blocks"):
        sums(page("ray_llm42_verifier_kv_held_blocks"))
