"""The `affinity` command."""

from __future__ import annotations

import json

from rich.console import Console

from llm42.config import Settings
from llm42.local.affinity import measure_affinity

out, err = Console(), Console(stderr=True)


def run_affinity(settings: Settings, requests: int, tokens: int, concurrent: int, as_json: bool) -> None:
    """Measures how near the fast path's bits are to the verifier's, and prints it."""
    with err.status("Loading the model") as status:
        report = measure_affinity(settings, requests, tokens, concurrent, status.update)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    found = report.comparison
    out.print(
        f"[bold]{found.mismatches_per_1000:.2f}[/] mismatches per 1,000 tokens ({found.mismatches} of "
        f"{found.tokens}); {found.equal_share:.1%} of the log-probabilities are equal."
    )
    out.print(
        f"Fast path {report.engine}: {requests} prompts, {concurrent} at a time. Fingerprint "
        f"{report.fingerprint}.",
        markup=False,
    )
    first = report.operator
    if first is not None:
        where = f"{first.operator} ({first.place}), token {first.position}"
        out.print(f"First operator that differs: {where}: {first.differing} of {first.of} elements.")
    else:
        out.print(f"No operator is named: {report.note}.", markup=False)
