"""The `certify` command."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from llm42.checkpoint.load import load_model
from llm42.config import Settings
from llm42.verifier.build import certify, plants_of
from llm42.verifier.certify.certificate import Certificate, CertificationFailed

out, err = Console(), Console(stderr=True)


def run_certify(settings: Settings, plants: list[str], as_json: bool) -> int:
    """Certifies afresh and prints the outcome. Returns the exit code: 0 passed, 1 failed, 2 unknown plant."""
    m = settings.model
    known = plants_of(m.device)
    if unknown := [name for name in plants if name not in known]:
        there = f"model.device {m.device} has: {', '.join(known)}"
        err.print(f"[bold red]Error:[/] unknown plant {unknown[0]!r}; {there}", soft_wrap=True)
        return 2
    try:
        with err.status("Loading the model") as status:
            model = load_model(m.path, m.dtype, m.device, m.max_model_len)
            certificate = certify(settings, model, plants, lambda what: status.update(f"Certifying {what}"))
    except CertificationFailed as failure:
        _print_failure(failure, plants, as_json)
        return 1
    if as_json:
        print(json.dumps({"passed": True, **certificate.to_json()}))
        return 0
    out.print(_table(certificate))
    out.print(
        f"[bold green]Passed[/]: {certificate.compared_rows} rows compared in {certificate.seconds:g} s, "
        f"step sizes {', '.join(map(str, certificate.buckets))}."
    )
    return 0


def _print_failure(failure: CertificationFailed, plants: list[str], as_json: bool) -> None:
    if as_json:
        found: dict[str, Any] = {"operator": failure.operator, "violations": failure.violations}
        print(json.dumps({"passed": False, **found, "plants": plants}))
        return
    out.print(f"[bold red]Failed[/]: operator [bold]{failure.operator}[/] is not row-invariant here.")
    for violation in failure.violations:
        out.print(f"  {violation}", markup=False)


def _table(certificate: Certificate) -> Table:
    table = Table("operator", "provider", "passed", "step sizes", "what was found")
    for report in certificate.reports:
        sizes = ", ".join(map(str, report.buckets))
        table.add_row(
            report.operator, report.provider, "yes" if report.passed else "no", sizes, report.violation or ""
        )
    return table
