"""The `certify`, `demo` and `affinity` commands: what they print and how they exit."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from llm42.config import Settings
from llm42.telemetry.metrics import Metrics
from llm42_kernels.cublas import allow_workspace

out, err = Console(), Console(stderr=True)


def run_certify(settings: Settings, plants: list[str], as_json: bool) -> int:
    """Certifies afresh and prints the outcome. Returns the exit code: 0 passed, 1 failed, 2 unknown plant."""
    if "split-k" in plants and settings.model.device == "cuda":
        allow_workspace()  # the plant is the library as it comes
    from llm42.checkpoint.load import load_model, require_device
    from llm42.verifier.build import certify, plants_of
    from llm42.verifier.certify.cpu import Certificate, CertificationFailed

    m = settings.model
    known = plants_of(m.device)
    unknown = [name for name in plants if name not in known]
    if unknown:
        there = f"model.device {m.device} has: {', '.join(known)}"
        err.print(f"[bold red]Error:[/] unknown plant {unknown[0]!r}; {there}", soft_wrap=True)
        return 2
    require_device(m.device)
    failure: CertificationFailed | None = None
    certificate: Certificate | None = None
    with err.status("Loading the model") as status:
        model = load_model(m.path, m.dtype, m.device, m.max_model_len)
        try:
            certificate = certify(settings, model, plants, lambda what: status.update(f"Certifying {what}"))
        except CertificationFailed as error:
            failure = error
    if as_json:
        print(json.dumps(_certify_json(certificate, failure, plants)))
    elif certificate is not None:
        out.print(_certificate_table(certificate))
        out.print(
            f"[bold green]Passed[/]: {certificate.compared_rows} rows compared in {certificate.seconds:g} s, "
            f"step sizes {', '.join(map(str, certificate.buckets))}."
        )
    else:
        assert failure is not None
        out.print(f"[bold red]Failed[/]: operator [bold]{failure.operator}[/] is not row-invariant here.")
        for violation in failure.violations:
            out.print(f"  {violation}", markup=False)
    return 0 if certificate is not None else 1


def _certify_json(certificate: Any, failure: Any, plants: list[str]) -> dict[str, Any]:
    if certificate is not None:
        return {"passed": True, **certificate.to_json()}
    return {
        "passed": False,
        "operator": failure.operator,
        "violations": failure.violations,
        "plants": plants,
    }


def _certificate_table(certificate: Any) -> Table:
    table = Table("operator", "provider", "passed", "step sizes", "what was found")
    for report in certificate.reports:
        sizes = ", ".join(map(str, report.buckets)) or "none"
        table.add_row(
            report.operator, report.provider, "yes" if report.passed else "no", sizes, report.violation or ""
        )
    return table


def run_demonstration(
    settings: Settings,
    requests: int,
    load: int,
    tokens: int,
    temperature: float,
    as_json: bool,
    metrics: Metrics | None = None,
) -> int:
    """Runs the demonstration with a progress bar. Returns the exit code: 1 if a deterministic output
    changed."""
    from llm42.local.demo import run_demo

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=err) as progress:
        bar = progress.add_task("starting", total=4 * requests)
        result = run_demo(
            settings,
            requests,
            load,
            tokens,
            temperature,
            lambda what, done: progress.update(bar, description=what, advance=done),
            metrics,
        )
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        _print_demo(result)
    return 1 if result.deterministic.diverged or result.deterministic.logprobs_diverged else 0


def _print_demo(result: Any) -> None:
    table = Table(
        "",
        "best-effort",
        "deterministic",
        title=f"{result.requests} prompts alone, then together among noise",
    )
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


def run_affinity(settings: Settings, requests: int, tokens: int, concurrent: int, as_json: bool) -> int:
    """Measures how near the fast path's bits are to the verifier's, and prints it. Returns exit code 0."""
    from llm42.local.affinity import measure_affinity

    with err.status("Loading the model") as status:
        report = measure_affinity(settings, requests, tokens, concurrent, lambda what: status.update(what))
    if as_json:
        print(json.dumps(report.to_json()))
        return 0
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
    return 0
