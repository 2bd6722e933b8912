"""Writes docs/performance.md and its pictures from benchmarks/results.

python -m benchmarks.report            (needs matplotlib: pip install 'llm42[pictures]')
python -m benchmarks.report --check    (says what is not as it would be written; needs no matplotlib)
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.lib.report import RESULTS
from benchmarks.report.charts import charts
from benchmarks.report.page import PICTURES, page
from benchmarks.report.results import read

DOCS = Path(__file__).parents[2] / "docs"


def explained(docs: Path) -> dict[str, str]:
    """The first page under measurements/ that links a result's file, by result."""
    found: dict[str, str] = {}
    for file in sorted((docs / "measurements").glob("*.md")):
        for name in re.findall(r"/results/([\w-]+)\.json\)", file.read_text()):
            found.setdefault(name, file.name)
    return found


def write(results: Path = RESULTS, docs: Path = DOCS) -> None:
    """Writes the page and the pictures, and removes pictures that it no longer shows."""
    from benchmarks.report.draw import draw

    found = read(results)
    (docs / "performance.md").write_text(page(found, explained(docs)))
    folder = docs / PICTURES
    folder.mkdir(exist_ok=True)
    made = charts(found)
    for chart in made:
        draw(chart, folder)
    for old in folder.glob("*.svg"):
        if old.name not in {chart.file for chart in made}:
            old.unlink()


def faults(results: Path = RESULTS, docs: Path = DOCS) -> list[str]:
    """What is not as `write` would leave it. A picture is judged by the digest of its numbers."""
    found, bad = read(results), []
    file = docs / "performance.md"
    if not file.exists() or file.read_text() != page(found, explained(docs)):
        bad.append("docs/performance.md is not what the results say")
    made = charts(found)
    for chart in made:
        picture = docs / PICTURES / chart.file
        if not picture.exists() or f"numbers {chart.digest}" not in picture.read_text():
            bad.append(f"docs/{PICTURES}/{chart.file} shows other numbers")
    for old in sorted((docs / PICTURES).glob("*.svg")):
        if old.name not in {chart.file for chart in made}:
            bad.append(f"docs/{PICTURES}/{old.name} is in no page")
    return bad


def main() -> None:
    """Exits with 1 where --check finds something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
        return
    if bad := faults():
        sys.exit("\n".join([*bad, "run python -m benchmarks.report"]))


if __name__ == "__main__":
    main()
