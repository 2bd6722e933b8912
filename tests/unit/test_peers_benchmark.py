"""What the benchmark of all peers plans, and what it makes of what they found, without them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.lib.sides import Process
from benchmarks.peers import cells, equal, systems
from benchmarks.peers.cells import (
    DEFAULT,
    GROUPS,
    KV_TOKENS,
    MAX_LEN,
    SECOND,
    estimate_s,
    every_row,
    left_out,
    predicted,
    row_of,
    rows_of,
)
from benchmarks.peers.figures import figures_of, table
from benchmarks.peers.h200 import merge
from benchmarks.peers.latency import Latencies
from benchmarks.peers.loads import CHAT, DOCUMENTS, LOADS, SHAPES, SHARES, longest
from benchmarks.verify_mode.loads import wanted
from llm42.engine import build
from tests.support.patience import PATIENCE_S

DOCUMENT = {"machine": {}, "versions": {}, "date": "", "command": "x"}


def run(tok_s: float, **more: Any) -> dict[str, Any]:
    return {"tok_s": tok_s, **more}


def waits(who: str, kind: str, **at: float) -> dict[str, Any]:
    return {"waits": {who: {kind: at}}}


# ---- loads


@pytest.mark.parametrize(
    ("lengths", "median", "p90"),
    [(CHAT[0], 1730, 5696), (CHAT[1], 415, 834), (DOCUMENTS[0], 7059, 12_985), (DOCUMENTS[1], 208, 371)],
)
def test_lengths_have_the_published_percentiles(lengths: Any, median: float, p90: float) -> None:
    quantiles = lengths.quantiles(1000)
    assert statistics.median(quantiles) == pytest.approx(median, rel=0.01)
    assert quantiles[900] == pytest.approx(p90, rel=0.02)
    assert max(quantiles) <= lengths.longest and all(a <= b for a, b in pairwise(quantiles))


def test_requests_of_a_traced_load_are_the_same_for_all() -> None:
    first, again, other = (list(islice(wanted(SHAPES["chat"], s, 99), 60)) for s in ("a", "a", "b"))
    assert first == again and first != other
    assert len({len(one.prompt) for one in first}) > 10


def test_all_loads_fit_the_model_and_on_the_mean_the_cache() -> None:
    assert longest(list(LOADS.values())) <= MAX_LEN
    for name, load in LOADS.items():
        mean = sum(load.prompts) / len(load.prompts) + sum(load.outputs) / len(load.outputs)
        assert load.in_flight * mean <= KV_TOKENS, name


# ---- latencies


def test_only_waits_within_the_window_count_by_class() -> None:
    now = [0.0]
    seen = Latencies(1.0, 5.0, clock=lambda: now[0])

    def at(seconds: float, what: Any, *args: Any) -> None:
        now[0] = seconds
        what(*args)

    at(0.0, seen.started, "early", False)
    at(0.5, seen.came, "early", 1)  # its first token is in the ramp
    at(1.5, seen.came, "early", 4)
    at(1.5, seen.started, "det", True)
    at(2.0, seen.came, "det", 1)
    at(3.0, seen.came, "det", 10)
    at(3.0, seen.ended, "det")
    at(4.0, seen.ended, "early")
    at(4.0, seen.came, "early", 3)  # nobody's any more
    at(6.0, seen.started, "late", False)
    at(6.5, seen.came, "late", 1)
    found = seen.found()
    assert found["deterministic"]["ttft_ms"] == {"p50": 500.0, "p99": 500.0, "count": 1}
    assert found["deterministic"]["itl_ms"]["p50"] == 100.0
    assert found["deterministic"]["gap_ms"]["p50"] == 1000.0
    assert found["best_effort"]["ttft_ms"] == {} and found["best_effort"]["itl_ms"]["p50"] == 250.0
    assert found["all"]["itl_ms"]["count"] == 2


def test_a_late_request_has_waited_since_it_should_have_come() -> None:
    now = [2.0]
    seen = Latencies(0.0, 9.0, clock=lambda: now[0])
    seen.started("a", True, late_s=0.5)
    now[0] = 3.0
    seen.came("a", 1)
    assert seen.found()["all"]["ttft_ms"]["p50"] == 1500.0


# ---- the plan


@pytest.mark.parametrize(("level", "group"), DEFAULT)
def test_a_command_has_vllm_in_each_row_and_fits(level: str, group: str) -> None:
    rows = rows_of(DEFAULT[level, group], level, group)
    assert all("vllm" in row.lanes and len(row.lanes) > 1 for row in rows)
    reused = sum(
        row.load.seconds + 1 for a, row in enumerate(rows) if row.shape in {r.shape for r in rows[:a]}
    )
    assert estimate_s(rows, group) - reused < 570


def test_what_is_not_run_is_named() -> None:
    for (level, _), names in DEFAULT.items():
        assert set(names) | set(left_out(names, level)) == set(every_row(level))
        assert not set(names) & set(left_out(names, level))


def test_both_commands_of_auto_together_have_all_six_loads() -> None:
    names = {*DEFAULT["engine", "auto"], *SECOND}
    assert {f"{p}_{shape}" for p in (2, 10, 50) for shape in SHAPES} <= names
    assert {f"100_{shape}" for shape in LOADS} <= set(DEFAULT["engine", "canonical"])


def test_every_cell_has_a_prediction() -> None:
    for name in every_row("http"):
        for lane in dict.fromkeys(lane for group in GROUPS.values() for lane in group):
            assert predicted(name, lane) > 0
    assert set(cells.TARGETS) <= set(cells.PREDICTED)
    assert {int(name.split("_")[0]) for name in every_row("engine")} == set(SHARES)


def test_a_short_row_is_short() -> None:
    row = row_of("100_documents", "engine", "canonical", short=True)
    assert row.load.longest < 160 and row.load.in_flight < 10


# ---- figures


def test_kept_is_the_mean_of_ratios_within_a_round_and_worst_the_least() -> None:
    rows = {
        "100_256_256": [{"vllm": run(100), "canonical": run(96)}, {"vllm": run(200), "canonical": run(196)}],
        "100_chat": [{"vllm": run(50), "canonical": run(45)}],
        "100_low_1": [{"vllm": run(10), "canonical": run(5)}],
        "2_chat": [{"vllm": run(10), "auto": run(9.9)}, {"auto": run(100)}],
    }
    found = figures_of(rows, "engine")
    assert found["canonical_100_256_256"].value == 0.97
    assert found["kept_100"].value == 0.935 and not found["kept_100"].met
    assert found["worst_100"].value == 0.9 and found["worst_100"].met
    assert found["worst_low_100"].value == 0.5 and found["worst_low_100"].target is None
    assert found["loads_in_kept_100"].value == 2 and not found["loads_in_kept_100"].met
    assert found["kept_2"].value == 0.99 and "kept_10" not in found


def test_without_vllm_beside_it_there_is_no_ratio() -> None:
    assert "canonical_100_chat" not in figures_of({"100_chat": [{"canonical": run(9)}]}, "engine")


def test_targets_are_those_of_the_comparison() -> None:
    row = {"vllm": run(10), "auto": run(8), "canonical": run(9)}
    found = figures_of({f"{p}_chat": [row] for p in SHARES}, "engine")
    told = {k: (f.target, f.better) for k, f in found.items() if k in cells.TARGETS}
    assert told == {
        "kept_2": (0.98, "higher"), "kept_10": (0.93, "higher"), "kept_50": (0.80, "higher"),
        "kept_100": (0.95, "higher"), "worst_100": (0.88, "higher"),
    }  # fmt: skip


def test_best_effort_is_compared_with_all_of_vllms() -> None:
    rows = {
        "10_chat": [
            {
                "vllm": run(1) | waits("all", "itl_ms", p50=10.0),
                "auto": run(1) | waits("best_effort", "itl_ms", p50=10.4),
            }
        ]
    }
    assert figures_of(rows, "engine")["best_effort_p50_ratio_10"].value == 1.04


def test_first_tokens_are_compared_where_requests_come_at_random() -> None:
    row = {
        "vllm": run(1, client_cpu=0.2) | waits("all", "ttft_ms", p99=100.0),
        "canonical": run(1, client_cpu=0.9) | waits("all", "ttft_ms", p99=140.0),
    }
    found = figures_of({"100_open_256_256": [row], "100_256_256": [row]}, "http")
    assert found["ttft_p99_ratio_100"].value == 1.4 and not found["ttft_p99_ratio_100"].met
    assert found["client_cpu_vllm"].met and not found["client_cpu_canonical"].met
    assert found["http_kept_100"].value == 1.0 and "kept_100" not in found


def test_verify_pinned_must_have_verified_and_rolled_back() -> None:
    stats = {"windows": 4, "rollbacks": 0, "rolled_back_tokens": 0}
    found = figures_of({"10_chat": [{"verify": run(1, committed=500, stats=stats)}]}, "engine")
    assert found["verify_windows"].met and not found["verify_rollbacks"].met
    stats |= {"rollbacks": 2, "rolled_back_tokens": 5}
    found = figures_of({"10_chat": [{"verify": run(1, committed=500, stats=stats)}]}, "engine")
    assert found["verify_rollbacks"].met and found["rollbacks_per_1000_verify_10_chat"].value == 4.0
    assert found["lost_per_1000_verify_10_chat"].value == 10.0


def test_the_table_has_a_line_for_each_run() -> None:
    (vllm, ours) = table({"10_chat": [{"vllm": run(2000.0), "auto": run(1900.0)}]})
    assert (vllm["load"], vllm["percent"], ours["system"]) == ("chat", 10, "auto")
    assert ours["predicted_tok_s"] > 0


# ---- equal requests


def outputs(**seen: int) -> equal.Outputs:
    return equal.Outputs(Counter(seen))


def test_an_output_is_its_tokens_and_its_logprobs() -> None:
    seen = equal.Outputs()
    for tokens, logprob in (([1, 2], -0.5), ([1, 2], -0.5), ([1, 2], -0.25), ([1, 3], -0.5)):
        seen.add(tokens, [logprob])
    told = seen.told()
    assert (told["answers"], told["distinct"], told["texts"], told["first_difference"]) == (4, 3, 2, 1)


def test_parts_of_ours_have_all_requests() -> None:
    assert sum(equal.parts_of("auto", 10_000).values()) == 10_000
    assert set(equal.parts_of("auto", 100)) == {"started", "replicas", "mixed"}
    assert equal.parts_of("vllm", 100) == {"mixed": 100}


def test_outputs_of_all_parts_are_counted_together() -> None:
    found = {
        "auto": {"mixed": outputs(a=6000), "replicas": outputs(a=3000), "started": outputs(b=1000)},
        "vllm": {"mixed": outputs(a=9000, b=1000)},
    }
    figures = equal.figures_of(found, 10_000)
    assert figures["distinct_outputs_10000"].value == 2 and not figures["distinct_outputs_10000"].met
    assert figures["vllm_distinct_outputs_10000"].value == 2 and figures["vllm_distinct_outputs_10000"].met


def test_fewer_requests_are_not_called_10000() -> None:
    figures = equal.figures_of({"auto": {"mixed": outputs(a=70)}}, 10_000)
    assert "distinct_outputs_10000" not in figures and figures["distinct_outputs_70"].met
    assert not figures["equal_requests"].met


# ---- one result of several commands


def test_a_merged_result_takes_each_ratio_within_its_command(tmp_path: Path) -> None:
    def document(level: str, name: str, vllm: float, ours: float) -> Path:
        rows = {name: {"rounds": [{"vllm": run(vllm), "canonical": run(ours)}]}}
        raw = {"arguments": {"level": level}, "rows": rows}
        path = tmp_path / f"{level}-{name}-{vllm}.json"
        path.write_text(json.dumps(DOCUMENT | {"figures": {}, "raw": raw}))
        return path

    parts = [
        document("engine", "100_chat", 100, 90),
        document("engine", "100_256_256", 10, 10),  # another clock: no ratio across
        document("http", "100_chat", 100, 80),
    ]
    equal_part = tmp_path / "equal.json"
    told = {"value": 1, "unit": "outputs", "target": 1, "better": "lower", "met": True}
    equal_part.write_text(json.dumps(DOCUMENT | {"figures": {"distinct_outputs_10000": told}, "raw": {}}))
    whole = json.loads(merge(tmp_path, "whole", [*parts, equal_part]).read_text())
    found = {name: figure["value"] for name, figure in whole["figures"].items()}
    assert (found["kept_100"], found["worst_100"], found["http_kept_100"]) == (0.95, 0.9, 0.8)
    assert found["distinct_outputs_10000"] == 1
    assert "10_chat" in whole["raw"]["engine"]["left_out"]
    assert "100_256_256" in whole["raw"]["http"]["left_out"]
    assert whole["figures"]["distinct_outputs_10000"]["run"] == 4 and len(whole["raw"]["runs"]) == 4
    joined = [merge(tmp_path, "two", parts[:2]), merge(tmp_path, "rest", [parts[2], equal_part])]
    assert json.loads(merge(tmp_path, "again", joined).read_text()) == whole


# ---- how the sides are started


class Started:
    """Stands for a Process."""

    environments: ClassVar[dict[str, Mapping[str, str]]] = {}

    def __init__(self, kind: str, module: str, words: Any, environment: Mapping[str, str], out: Path) -> None:
        self.environments[kind] = environment


def test_vllm_is_told_to_spawn_its_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "Process", Started)
    args = Namespace(group="canonical", cpu=True, engine="vllm", scratch=tmp_path, out=tmp_path)
    engines = systems.Engines(args, "m")
    for kind in ("vllm", "invariant"):
        engines._boot(kind)
    # by the name that vLLM reads, which ours sets too; an unknown one is ignored without a word
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    assert (
        f'"{name}", "spawn"' in Path(build.__file__).with_name("vllm").joinpath("connection.py").read_text()
    )
    assert [Started.environments[kind].get(name) for kind in ("vllm", "invariant")] == ["spawn", "spawn"]
    assert "VLLM_BATCH_INVARIANT" not in Started.environments["vllm"]


@pytest.mark.parametrize(("module", "with_ray"), [("side", False), ("replica", True)])
def test_rays_import_is_left_to_ours(module: str, with_ray: bool) -> None:
    code = f"import sys, benchmarks.peers.{module}; print('ray' in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_MODE"}
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    assert told.stdout.split()[-1].decode() == str(with_ray)


def test_a_side_that_is_given_up_says_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "stands_still.py").write_text(
        "import multiprocessing, sys, threading\n"
        "def child_stands_here(ready):\n"
        "    ready.set()\n"
        "    threading.Event().wait()\n"
        "def side_stands_here():\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    ready = context.Event()\n"
        "    context.Process(target=child_stands_here, args=(ready,)).start()\n"
        "    ready.wait()\n"
        "    open(int(sys.argv[1]), 'w').write('{}\\n')\n"
        "    threading.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    side_stands_here()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    side = Process("one", "stands_still", [], environment, tmp_path)
    side.answer(PATIENCE_S)
    side.end_with_stacks()
    log = (tmp_path / "one.log").read_text()
    assert "side_stands_here" in log and "child_stands_here" in log
