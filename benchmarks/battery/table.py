"""Writes docs/battery.md from benchmarks/results/battery-*.json; `--check` only compares.

    python -m benchmarks.battery.table [--check]

Only what was run is in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.report import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "battery.md"
HEAD = """# Failures that users reported, tried

Users of inference servers reported these failures. Each is a small check that runs against any
OpenAI endpoint (`python -m benchmarks.battery --help`). Answers are equal when token ids, text,
finish reason and log-probabilities are, compared with `==`.

This page is written by `python -m benchmarks.battery.table` from benchmarks/results/battery-*.json.
Only what was run is in it. A pass is no proof: a check that finds no difference with a small model on
this machine may find one elsewhere.
"""

TRIED = """
Not in the table: vLLM's CPU build 0.27.0 with `VLLM_BATCH_INVARIANT=1`. It starts without a warning, and
its first request ends the engine: the mean of its batch-invariant operators is a Triton kernel, which this
CPU build cannot launch (`TypeError` in `mean_dim` of vLLM). So no
check could be run on it. On a GPU it has not been run here.

Runs differ in which checks find something: on an Intel Xeon (2026-12-02, without `restart`, results as
of commit 4bcffcd) the same vLLM passed 9 of 27, and failed `long-prompt-joins` too.
"""


def load_results(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The results by name."""
    return {
        file.stem.removeprefix("battery-"): json.loads(file.read_text())
        for file in sorted(directory.glob("battery-*.json"))
    }


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    rules: dict[str, dict[str, Any]] = {}
    for result in results.values():
        for name, item in result["raw"]["checks"].items():
            rules.setdefault(name, item)
    lines = [HEAD, "## Who passes\n"]
    lines += [f"| check | reported in | {' | '.join(results)} |", "|---" * (2 + len(results)) + "|"]
    for name, item in rules.items():
        cells = [r["raw"]["checks"].get(name, {}).get("verdict", "not run") for r in results.values()]
        cells = [f"**{cell}**" if cell == "fail" else cell for cell in cells]
        lines.append(f"| {_cell(item['rule'])} (`{name}`) | {_cell(item['reports'])} | {' | '.join(cells)} |")
    lines.append(TRIED)
    lines.append("\n## What was run\n")
    for name, result in results.items():
        lines += _system(name, result)
    return "\n".join(lines).rstrip() + "\n"


def _system(name: str, result: dict[str, Any]) -> list[str]:
    raw, machine = result["raw"], result["machine"]
    asked = json.dumps(raw["extra"]) if raw["extra"] else "nothing (the system has no such field)"
    lines = [
        f"### {name}\n",
        f"{raw['system']}. {result['date'][:10]}, {machine.get('gpu', {}).get('name') or machine['cpu']}. "
        f"Determinism is asked for with: {asked}. Answers of {raw['tokens']} tokens, "
        f"{raw['load']} requests beside.\n",
    ]
    kinds = [(n, v) for n, v in raw["checks"].items() if v["verdict"] != "pass"]
    lines += [f"- `{n}`: {v['verdict']}: {_cell(v['detail'])}" for n, v in kinds] or ["All checks passed."]
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main() -> int:
    """1 with --check if the page is not what the results say."""
    text = page(load_results())
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
