"""The `demo` command."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from llm42.cli.progress import progress_bar
from llm42.config import Settings
from llm42.local.demo import DemoResult, run_demo

out = Console()


def run_demonstration(
    settings: Settings, requests: int, load: int, tokens: int, temperature: float, as_json: bool
) -> int:
    """Runs the demonstration with a progress bar. Returns the exit code: 1 if a deterministic output
    changed."""
    with progress_bar() as progress:
        bar = progress.add_task("starting", total=4 * requests)

        def tell(what: str, done: int) -> None:
            progress.update(bar, description=what, advance=done)

        result = run_demo(settings, requests, load, tokens, temperature, tell)
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        _print_demo(result)
    return 1 if result.deterministic.diverged or result.deterministic.logprobs_diverged else 0


def _print_demo(result: DemoResult) -> None:
    title = f"{result.requests} prompts alone, then together among noise"
    table = Table("", "best-effort", "deterministic", title=title)
    best, det = result.best_effort, result.deterministic
    for label, name in (
        ("outputs that changed under load", "diverged"),
        ("outputs whose log-probabilities changed", "logprobs_diverged"),
        ("tokens/s alone", "tokens_s_alone"),
        ("tokens/s under load", "tokens_s_loaded"),
        ("rollbacks", "rollbacks"),
        ("tokens rolled back", "rolled_back_tokens"),
        ("tokens verified", "verified_tokens"),
    ):
        table.add_row(label, str(getattr(best, name)), str(getattr(det, name)))
    out.print(table)
    for d in best.first_differences[:5]:
        out.print(f"  best-effort differs from token {d.token} on: {d.prompt}", style="dim", markup=False)
    out.print(f"Numerics: {result.numerics}; fast path: {result.fast_path_products}.", markup=False)
    out.print(f"Fingerprint {result.fingerprint}.", markup=False)
    if best.diverged == 0:
        out.print("Best-effort did not diverge in this run: try more tokens or a larger --load.")
