"""What the benchmark of verify mode makes of what its sides found, without them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.lib.report import Figure, report
from benchmarks.verify_mode.arguments import merge
from benchmarks.verify_mode.cells import (
    CELLS,
    KV,
    PREDICTED,
    SHAPES,
    TARGETS,
    fits,
    rows_of,
    stage_of,
    stages,
)
from benchmarks.verify_mode.figures import differing, figures_of, ratio, steps_figure, wrongly_cached
from benchmarks.verify_mode.loads import Load, Meter, Wanted, is_deterministic, wanted
from benchmarks.verify_mode.warmed import Prompts, Watched
from llm42.engine.base import Engine, EngineOutput, Sink
from llm42.protocol import Request

LOAD = Load(4, (8, 16), (32,), percent=50, ramp_s=1.0, window_s=2.0)


def lanes(**rates: float) -> dict[str, dict[str, Any]]:
    return {lane: {"tok_s": rate} for lane, rate in rates.items()}


@pytest.mark.parametrize("percent", [0, 2, 10, 50, 100])
def test_the_share_is_exact(percent: int) -> None:
    assert sum(is_deterministic(n, percent) for n in range(300)) == 3 * percent


def test_every_side_gets_the_same_requests() -> None:
    ours, theirs, others = (list(islice(wanted(LOAD, seed, 100), 40)) for seed in ("a", "a", "b"))
    assert ours == theirs and ours != others
    assert {len(one.prompt) for one in ours} == {8, 16} and {one.tokens for one in ours[4:]} == {32}
    assert len({one.tokens for one in ours[:4]}) > 1  # else all would end together


def test_the_share_of_a_load_changes_none_of_its_requests() -> None:
    half, none = (list(islice(wanted(replace(LOAD, percent=p), "a", 100), 40)) for p in (50, 0))
    assert [(a.prompt, a.tokens) for a in half] == [(b.prompt, b.tokens) for b in none]
    assert sum(one.deterministic for one in half) == 20


def test_only_the_window_counts() -> None:
    now = [0.0]
    meter = Meter(LOAD, clock=lambda: now[0])
    for at, tokens, deterministic in (
        (0.5, 1000, False),  # in the ramp
        (1.5, 100, False),  # made before: they only say when counting begins
        (2.0, 30, True),
        (2.5, 20, False),
        (3.1, 1000, True),  # too late
    ):
        now[0] = at
        meter.add(tokens, deterministic)
    assert meter.over
    assert meter.found() == {"tok_s": 50.0, "deterministic_tok_s": 30.0, "tokens": 50, "seconds": 1.0}


def test_without_tokens_there_is_no_rate() -> None:
    assert Meter(LOAD).found()["tok_s"] == 0.0


def test_a_load_that_two_cells_need_runs_once() -> None:
    (row, _) = rows_of(["kept_50", "auto_kept_50"])
    assert row.lanes == ("vllm", "verify", "direct", "auto") and row.cells == ("kept_50", "auto_kept_50")
    assert [row.lanes for row in rows_of(["kept_50"])] == [("vllm", "verify")] * 2


def test_cells_are_complete() -> None:
    assert set(PREDICTED) == set(TARGETS) == {*CELLS, "auto_over_pinned"}
    assert stages(CELLS) == ["steps", "beside", "smollm2"]
    assert all(rows_of([cell]) for cell in CELLS if stage_of(cell) != "steps")


def test_what_runs_at_once_has_room() -> None:
    engine, verifier = KV["beside"]
    for load in SHAPES.values():
        assert load.in_flight * load.longest <= engine
        assert 2 * load.in_flight * load.longest <= 1.1 * verifier


def test_a_figure_is_the_worst_of_its_loads_and_waits_for_all() -> None:
    rows = {"50_256_256": [lanes(vllm=100, verify=80), lanes(vllm=50, verify=30), lanes(vllm=100, verify=71)]}
    assert "kept_50" not in figures_of(rows)
    rows["50_1024_256"] = [lanes(vllm=100, verify=60)]
    found = figures_of(rows)
    assert (found["kept_50_256_256"].value, found["kept_50_256_256"].met) == (0.71, True)
    assert (found["kept_50"].value, found["kept_50"].met) == (0.6, False)


def test_a_round_counts_with_both_sides_only() -> None:
    assert ratio([lanes(vllm=100), lanes(verify=80)], "verify", "vllm") is None
    assert ratio([lanes(vllm=100), lanes(vllm=10, verify=8)], "verify", "vllm") == 0.8


def test_auto_is_compared_with_the_better_pinned_mode_of_each_round() -> None:
    rows = {
        "50_256_256": [lanes(vllm=100, verify=80, direct=60, auto=76)],
        "100_at_8": [lanes(vllm=100, direct=90, auto=99)],
    }
    found = figures_of(rows)
    assert found["auto_over_pinned_50_256_256"].value == 0.95
    assert found["auto_over_pinned_100_at_8"].value == 1.1
    assert (found["auto_over_pinned"].value, found["auto_over_pinned"].met) == (0.95, False)


def test_rollbacks_at_8_are_only_written_down() -> None:
    def run(rollbacks: int) -> list[dict[str, Any]]:
        return [{"verify": {"tok_s": 1.0, "committed": 5000, "stats": {"rollbacks": rollbacks}}}] * 2

    name = "rollbacks_per_1000_wide"
    rows = {f"{name}_at_8": run(40), f"{name}_at_64": run(0), f"{name}_at_256": run(1)}
    found = figures_of(rows)
    assert (found[f"{name}_at_8"].value, found[f"{name}_at_8"].target) == (8.0, None)
    assert (found[name].value, found[name].met) == (0.2, False)


def test_answers_of_two_modes_are_compared() -> None:
    verify, direct = {"digests": {"1": "a", "2": "b", "3": "c"}}, {"digests": {"1": "a", "2": "x", "4": "d"}}
    assert differing({"vllm": {}, "verify": verify, "direct": direct}) == (2, 1)
    assert differing({"verify": verify, "auto": verify}) == (3, 0)


def test_the_worst_step() -> None:
    assert not steps_figure([])
    assert not steps_figure([1.0, 1.04])["best_effort_step_max"].met
    assert steps_figure([0.9, 1.02])["best_effort_step_max"].met


def test_what_fits() -> None:
    assert fits(10.0, 13.0, 3.0) and not fits(10.0, 12.9, 3.0)


def prefilled(verify: float, warmed: float, found: int, of: int = 100) -> dict[str, dict[str, Any]]:
    """A round of the two lanes; `found` of the warmed one's prompt tokens were cached."""
    told = {"verify": {"tokens": of, "cached": 1}, "warmed": {"tokens": of, "cached": found}}
    return {
        lane: {"tok_s": rate, "engine_prompts": told[lane]}
        for lane, rate in (("verify", verify), ("warmed", warmed))
    }


def test_the_gain_of_prefilling_once() -> None:
    (row,) = rows_of(["prefill_once_50"])
    assert (row.name, row.lanes) == ("50_1024_256", ("verify", "warmed"))
    found = figures_of({row.name: [prefilled(100, 120, 98), prefilled(50, 55, 97), lanes(verify=70)]})
    gain = found["prefill_once_gain_50"]
    assert (gain.value, gain.target) == (1.15, None)
    assert found["prefill_once_cached_50_warmed"].value == 0.975
    assert found["prefill_once_cached_50_verify"].value == 0.01


def test_it_is_said_where_prompts_were_cached_or_not_as_they_should() -> None:
    assert not wrongly_cached(prefilled(1, 1, 98)) and not wrongly_cached(lanes(vllm=1, verify=1))
    assert wrongly_cached(prefilled(1, 1, 30)) == ["warmed: 0.3 of its prompts were cached"]
    assert wrongly_cached(prefilled(1, 1, 98, of=10)) == [
        "warmed: 9.8 of its prompts were cached", "verify: 0.1 of its prompts were cached",
    ]  # fmt: skip


def test_prompts_in_the_cache_are_as_many_as_run_and_used_last_first() -> None:
    load = replace(LOAD, in_flight=8)
    prompts, one = Prompts(load, "a", 100, True), next(wanted(replace(load, percent=100), "a", 100))
    assert len(prompts.all) == 4 and prompts.all != Prompts(load, "b", 100, True).all
    uses = [prompts.of(one) for _ in range(4)]
    taken = [use.__enter__() for use in uses]
    assert {prompt for _, prompt, _ in taken} == set(prompts.all)
    uses[1].__exit__(None, None, None)
    with prompts.of(one) as again, prompts.of(one) as more:
        assert again == taken[1] and more[1] in prompts.all
    best_effort = Wanted(0, (1, 2), 5, False)
    for mine, which in ((prompts, best_effort), (Prompts(load, "a", 100, False), one)):
        with mine.of(which) as found:
            assert found == (str(which.number), which.prompt, "")


def test_what_ends_a_salt_is_the_verifiers_alone_and_what_was_cached_is_counted() -> None:
    class Fake:
        def submit(self, request: Request, sink: Sink, limit: int) -> None:
            assert (request.cache_salt, limit) == ("a", 3)
            for cached in (2, None):
                sink(EngineOutput(request.request_id, 0, 0, (1,), cached_tokens=cached))

        def alive(self) -> bool:
            return True

    watched, outputs = Watched(cast(Engine, Fake())), list[EngineOutput]()
    for deterministic in (True, False):
        request = Request("r", (1, 2, 3), 3, deterministic=deterministic, cache_salt="a/7")
        watched.submit(request, outputs.append, 3)
    assert watched.alive() and len(outputs) == 4
    assert watched.take() == {"tokens": 3, "cached": 2} and watched.take() == {"tokens": 0, "cached": 0}


def test_results_are_joined_also_to_one_that_was_joined_before(tmp_path: Path) -> None:
    """All runs side by side; the last figure stands and says of which run it is."""
    files = []
    for day in (1, 2, 3):
        figures = {
            "kept_2": Figure(day / 10, "ratio", None, "higher"),
            f"only_{day}": Figure(day, "s", None, "lower"),
        }
        files.append(report(f"run-{day}", figures, {"day": day}, tmp_path))
    merge(tmp_path, "two", files[:2])
    whole = json.loads(merge(tmp_path, "whole", [tmp_path / "two.json", files[2]]).read_text())
    dates = [json.loads(file.read_text())["date"] for file in files]
    assert [(run["day"], run["date"]) for run in whole["raw"]["runs"]] == [*enumerate(dates, 1)]
    assert {key: (told["value"], told["run"]) for key, told in whole["figures"].items()} == {
        "kept_2": (0.3, 3), "only_1": (1, 1), "only_2": (2, 2), "only_3": (3, 3),
    }  # fmt: skip
    assert whole["date"] == dates[2]
