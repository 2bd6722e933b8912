"""docs/performance.md and its pictures are what benchmarks/results say. Controls: a changed value, a lost
prediction, an old picture and a result that comes later are noticed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.__main__ import DOCS, explained, faults
from benchmarks.report.charts import charts
from benchmarks.report.page import page
from benchmarks.report.predictions import predictions_of
from benchmarks.report.results import AGAINST_VLLM, read, result_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def copied(tmp_path: Path) -> tuple[Path, Path]:
    """(results, docs) that a test may change."""
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copytree(RESULTS, tmp_path / "results")
    shutil.copytree(DOCS / "figures", docs / "figures")
    shutil.copytree(DOCS / "measurements", docs / "measurements")
    shutil.copy(DOCS / "performance.md", docs)
    return tmp_path / "results", docs


def change(file: Path, figure: str, value: float) -> None:
    """Another value in a result's file; whether its target is met is told as it was."""
    document = json.loads(file.read_text())
    document["figures"][figure]["value"] = value
    file.write_text(json.dumps(document))


def test_the_page_and_its_pictures_are_what_the_results_say() -> None:
    assert faults() == []


def test_every_figure_has_a_row_and_every_result_its_date_machine_versions_and_command() -> None:
    results, text = read(RESULTS), (DOCS / "performance.md").read_text()
    sections = dict(zip(*[iter(re.split(r"^### (.*)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert sections.keys() == results.keys()
    for name, result in results.items():
        for told in (result.date, result.machine, result.versions, *result.command.split("; ")):
            assert told.strip() in sections[name]
        for row in result.rows:
            assert sections[name].count(f"\n| `{row.name}` | ") == 1


def test_what_was_missed_is_under_where_we_lose() -> None:
    results = read(RESULTS)
    lost = (DOCS / "performance.md").read_text().partition("## Where we lose")[2].partition("\n## ")[0]
    missed = [(result.name, row.name) for result in results.values() for row in result.rows if row.missed]
    assert len(missed) > 10
    for name, figure in missed:
        assert f"[{name}](#{name}) | `{figure}` | " in lost


def test_a_changed_value_is_noticed(copied: tuple[Path, Path]) -> None:
    """The control. The value is drawn, so the picture is noticed too."""
    assert faults(*copied) == []
    change(copied[0] / "h200-direct.json", "load_256_256_ours", 14_999.0)
    found = faults(*copied)
    assert found == [
        "docs/performance.md is not what the results say",
        "docs/figures/loads.svg shows other numbers",
    ]


def test_a_picture_that_is_old_lost_or_too_many_is_noticed(copied: tuple[Path, Path]) -> None:
    figures = copied[1] / "figures"
    (figures / "steps.svg").write_text(
        re.sub("numbers .{16}", "numbers 0", (figures / "steps.svg").read_text())
    )
    (figures / "loads.svg").unlink()
    (figures / "more.svg").write_text("<svg/>")
    assert faults(*copied) == [
        "docs/figures/loads.svg shows other numbers",
        "docs/figures/steps.svg shows other numbers",
        "docs/figures/more.svg is in no page",
    ]


def document(**more: Any) -> dict[str, Any]:
    """A result as a benchmark writes it."""
    figure = {"value": 0.9, "unit": "ratio", "target": 0.98, "better": "higher", "met": False}
    over = {"value": 0.97, "unit": AGAINST_VLLM, "target": None, "better": "higher", "met": True}
    return {
        "machine": {"cpu": "A processor", "cores": 2, "python": "3.11"},
        "versions": {"torch": "2.11.0", "vllm": None}, "date": "2030-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.peers", "raw": {},
        "figures": {"kept_2": figure, "auto_2_256_256": over, "invariant_2_256_256": {**over, "value": 0.55}},
        **more,
    }  # fmt: skip


def test_a_result_that_comes_later_finds_its_place() -> None:
    """By rule: its figures go to the top, to where we lose, to a picture, to a section of its own."""
    waits = {"ttft_ms": {"p50": 40.0, "p99": 90.0}, "itl_ms": {"p50": 8.0, "p99": 20.5}}
    run = {
        "row": "2_256_256", "system": "auto", "tok_s": 13_000.4, "predicted_tok_s": 13_700.0,
        "client_cpu": 0.2, "waits": {"best_effort": waits},
    }  # fmt: skip
    raw = {"predicted": {"kept_2": [0.96, "measured before"]}, "engine": {"table": [run]}}
    assert "Not measured yet: `h200-peers`, " in page({}, {})
    result = result_of("h200-peers", document(raw=raw))
    text = page({"h200-peers": result}, {"h200-peers": "auto.md"})
    assert "| 0.9 | 0.96 | at least 0.98 | **no** | 2030-01-02 | [h200-peers](#h200-peers) |" in text
    assert "Not measured yet: `h200-peers`, " not in text and "`kept_50` of `h200-peers`" in text
    assert "Told in [auto.md](measurements/auto.md)." in text
    assert "| `2_256_256` | auto | 13,000 | 13,700 | best_effort: 40, 90; 8, 20.5 | 0.2 |  |  |" in text
    lost = text.partition("## Where we lose")[2].partition("\n## ")[0]
    assert "`kept_2`" in lost and "`auto_2_256_256`" in lost and "invariant" not in lost
    (chart,) = charts({"h200-peers": result})
    assert f"(figures/{chart.file})" in text
    assert dict(chart.series) == {"auto": (0.97,), "invariant": (0.55,)}


def test_predictions_are_found_where_a_file_tells_them() -> None:
    figures = {"predicted_c": {"value": 3.0}}
    raw = {
        "parts": [{"predicted": {"a": [1.5, "why"], "d": "open"}}],
        "prediction": "b 0.99: equal products. e 1.03: once",
    }
    assert predictions_of("x", {"raw": raw, "figures": figures}) == {"a": 1.5, "b": 0.99, "c": 3.0, "e": 1.03}


def test_a_result_that_contradicts_itself_is_refused() -> None:
    """The control of what the page trusts."""
    wrong = document()
    wrong["figures"]["kept_2"]["met"] = True
    with pytest.raises(ValueError, match="kept_2"):
        result_of("x", wrong)


def test_a_figure_of_joined_runs_has_the_date_of_its_own() -> None:
    joined = document(raw={"note": "Two runs.", "runs": [{"date": "2030-01-01T"}, {"date": "2030-01-02T"}]})
    joined["figures"]["kept_2"]["run"] = 1
    result = result_of("x", joined)
    assert [row.date for row in result.rows] == ["2030-01-01", "2030-01-02", "2030-01-02"]
    text = page({"x": result}, {})
    assert "**no** | 2030-01-01 |" in text and "\n\nTwo runs.\n\n" in text


def test_results_have_a_page_that_tells_of_them() -> None:
    told = explained(DOCS)
    assert {"h200-direct", "h200-verify-mode", "cpu-soak", "session-sim"} <= told.keys()
    assert told["h200-verify-mode"] == "auto.md"


def test_pictures_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.report.draw import draw

    for chart in charts(read(RESULTS)):
        draw(chart, tmp_path)
        first = (tmp_path / chart.file).read_bytes()
        draw(chart, tmp_path)
        assert (tmp_path / chart.file).read_bytes() == first
        assert f"numbers {chart.digest}".encode() in first
