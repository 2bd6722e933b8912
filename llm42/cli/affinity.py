"""The `affinity` command."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from llm42.config import Settings
from llm42.local.affinity import measure_affinity

out, err = Console(), Console(stderr=True)


def run_affinity(
    settings: Settings, requests: int | None, tokens: int, concurrent: Sequence[int], as_json: bool
) -> None:
    """Measures how many rollbacks to expect of the fast path, under each load, and prints it."""
    with err.status("Loading the model") as status:
        report = measure_affinity(settings, requests, tokens, concurrent, status.update)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    table = Table("load", "at a time", "requests", "rollbacks per 1,000 tokens", "equal log-probabilities")
    for load, found in report.loads:
        rollbacks = f"{found.mismatches_per_1000:.2f} ({found.mismatches} of {found.tokens})"
        row = load.kind, str(load.concurrent), str(load.requests), rollbacks, f"{found.equal_share:.1%}"
        table.add_row(*row)
    out.print(table)
    out.print("decode: requests that start together. mixed: each starts as another ends.")
    out.print(f"Fast path {report.engine}. Fingerprint {report.fingerprint}.", markup=False)
    first = report.operator
    if first is not None:
        where = f"{first.operator} ({first.place}), token {first.position}"
        out.print(f"First operator that differs: {where}: {first.differing} of {first.of} elements.")
    else:
        out.print(f"No operator is named: {report.note}.", markup=False)
