"""The runner of the tiers: what fails fails the tier, and what is left out is named, or fails CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiers

SAMPLE = """
import pytest

def test_right(): pass

@pytest.mark.skip(reason="no such device")
def test_left_out(): pass

@pytest.mark.slow
def test_slow(): pass
"""
WRONG = "\ndef test_wrong(): assert False\n"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "BUILD", tmp_path)
    monkeypatch.setattr(tiers, "SKIPS", tmp_path / "skips.txt")
    (tmp_path / "skips.txt").write_text("# nothing\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # to import them takes most of the time
    return tmp_path


def run(build: Path, monkeypatch: pytest.MonkeyPatch, *sources: str) -> int:
    """A tier whose parts are these files."""
    parts = []
    for number, source in enumerate(sources):
        file = build / f"test_part{number}.py"
        file.write_text(source)
        options = ("-c", "/dev/null", "--rootdir", str(build))
        parts.append(tiers.Part(f"part{number}", (str(file),), "not slow", options))
    monkeypatch.setattr(tiers, "parts_of", lambda _: parts)
    return tiers.run("sample", [])


def test_what_is_left_out_is_counted_with_how_to_get_it(
    build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(build, monkeypatch, SAMPLE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Left out: 1 slow (make test-all); 1 skipped (no such device)"
    assert "1 passed, 1 skipped, 1 deselected" in lines[-2], "pytest's closing line"
    told = json.loads((build / "sample.json").read_text())
    assert told["cpu"].keys() == told["seconds"].keys() == {"test_part0.py::test_right", *told["skipped"]}


def test_one_part_that_fails_fails_the_tier(
    build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(build, monkeypatch, SAMPLE + WRONG, SAMPLE) == 1
    out = capsys.readouterr().out
    assert "def test_wrong" in out, "the whole output of the part that failed"
    assert "1 failed" in out
    assert json.loads((build / "sample.json").read_text())["failed"] == ["test_part0.py::test_wrong"]


def test_a_part_that_cannot_be_collected_or_runs_nothing_fails_the_tier(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(build, monkeypatch, SAMPLE, "import nothing_of_this_name") != 0
    assert run(build, monkeypatch, SAMPLE, "") == tiers.NOTHING_TO_RUN


BESIDE_THE_OTHER = """
import pathlib, time

def test_both_run():
    pathlib.Path("{me}").touch()
    end = time.monotonic() + 60
    while not pathlib.Path("{other}").exists():
        assert time.monotonic() < end, "it ran alone"
        time.sleep(0.02)
"""
ALONE = """
import os, time

def test_alone():
    os.mkdir("busy")
    time.sleep(0.3)
    os.rmdir("busy")
"""


def test_so_many_parts_run_side_by_side(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "AT_ONCE", 2)
    pair = [BESIDE_THE_OTHER.format(me=me, other=other) for me, other in ("ab", "ba")]
    assert run(build, monkeypatch, *pair) == 0
    monkeypatch.setattr(tiers, "AT_ONCE", 1)
    assert run(build, monkeypatch, ALONE, ALONE, ALONE) == 0
    assert len(json.loads((build / "sample.json").read_text())["ran"]) == 3


def told(build: Path, tier: str, **found: Any) -> None:
    (build / f"{tier}.json").write_text(json.dumps(found))


def test_more_than_the_written_list_fails(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(build, "all", ran=["a::t"], skipped={"b::one[x]": "no b"}, left_out={"c::v": "vllm"})
    told(build, "vllm", ran=["c::v"])
    assert tiers.tell(["all"]) == 1
    assert tiers.tell(["all", "vllm"]) == 1, "the other tier ran one, not both"
    assert "b::one[x]: no b" in capsys.readouterr().out
    (build / "skips.txt").write_text("# why\nb::one*  # nobody has a b\n")
    assert tiers.tell(["all", "vllm"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Left out: 1 skipped (no b)"
    assert tiers.tell(["all"]) == 1, "vLLM's were not run"


def test_a_tier_that_ran_nothing_is_no_success(build: Path) -> None:
    assert tiers.tell(["all"]) == 1
    told(build, "all", ran=[])
    assert tiers.tell(["all"]) == 1
    told(build, "all", ran=["a::t"])
    assert tiers.tell(["all", "vllm"]) == 1, "the other one has not run"
    assert tiers.tell(["all"]) == 0
