"""The `audit` command."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from llm42.audit.compare import Finding, Verdict, summary
from llm42.audit.file import AuditFileError, Records, read_records
from llm42.audit.records import manifest_of
from llm42.audit.remote import RemoteAudit
from llm42.cli.progress import progress_bar
from llm42.config import Settings
from llm42.receipt import InvalidReceipt, Keyring, Signature

if TYPE_CHECKING:
    from llm42.local.assembly import Local

out = Console()
SHOWN = 20
"""Findings that are printed; --json has all of them."""
NO_RECORDS = (InvalidReceipt, AuditFileError)
"""What run_audit raises when there is nothing to audit in what it was given."""


def run_audit(
    file: Path, where: Settings | RemoteAudit, manifests: Sequence[Path], signed: bool, as_json: bool
) -> int:
    """Audits a file and prints what was found. where: the settings of an audit in this process, or a server
    that does it. signed: what has no valid signature is not confirmed. Returns the exit code: 0 when all is
    confirmed, 1 when something is not, 2 when all that could be read is confirmed but some lines could not.
    Raises LLM42Error."""
    records = read_records(file)
    for manifest in manifests:
        _add_manifest(records, manifest)
    findings = [Finding(b.line, 0, f"line {b.line}", Verdict.BAD_RECORD, b.message) for b in records.bad]
    with progress_bar() as progress:
        bar = progress.add_task("starting", total=len(records.claims))

        def found(finding: Finding) -> None:
            findings.append(finding)
            done = len(findings) - len(records.bad)
            speed = f"{done / max(1e-9, time.monotonic() - began):.1f} records/s"
            progress.update(bar, description=speed, completed=done)

        def step(what: str) -> None:
            progress.update(bar, description=what)

        if isinstance(where, RemoteAudit):
            began = time.monotonic()
            where.audit(records, found)
        else:
            from llm42.local.assembly import Local  # PyTorch, which a server's client does without

            keyring, again = Keyring.load(where.audit), any(c.output is None for c in records.claims)
            with Local(where, engine=again, progress=step) as local:
                began = time.monotonic()
                asyncio.run(_replayed(local, keyring, records, found))
    if signed:
        findings = [_signed(f) for f in findings]
    findings.sort(key=lambda f: (f.line, f.choice))
    return _print_report(findings, summary(findings, began), as_json)


async def _replayed(
    local: Local, keyring: Keyring, records: Records, found: Callable[[Finding], None]
) -> None:
    from llm42.api.audit_routes import request_maker
    from llm42.audit.replayer import Replayer, windows_per_call

    settings, make = local.settings, request_maker(local.settings, local.tokenizer)
    most = windows_per_call(settings.verifier.max_waiting, settings.audit.concurrency)
    parts = (settings.audit, keyring, local.tokenizer, make, records.manifests, most)
    await Replayer(local, *parts).audit(records.claims, found)


def _add_manifest(records: Records, file: Path) -> None:
    """Adds a stored reply of GET /v1/fingerprint. Raises InvalidReceipt."""
    try:
        value = json.loads(file.read_text())
        known = manifest_of(value) if isinstance(value, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidReceipt(f"{file}: {error}") from error
    if known is None:
        raise InvalidReceipt(f"{file}: it must be a reply of GET /v1/fingerprint")
    records.manifests[known[0]] = known[1]


def _signed(finding: Finding) -> Finding:
    """With --require-signature an answer without a signature that can be checked is not confirmed."""
    if finding.verdict != Verdict.CONFIRMED or finding.signature == Signature.VALID:
        return finding
    reason = f"the answer is canonical, but its receipt's signature is: {finding.signature.value}"
    return replace(finding, verdict=Verdict.BAD_SIGNATURE, reason=reason)


def exit_code(findings: Sequence[Finding]) -> int:
    """A difference weighs more than a line that cannot be read."""
    verdicts = {f.verdict for f in findings} - {Verdict.CONFIRMED}
    if verdicts - {Verdict.BAD_RECORD}:
        return 1
    return 2 if verdicts else 0


def _print_report(findings: Sequence[Finding], counted: dict[str, Any], as_json: bool) -> int:
    code, odd = exit_code(findings), [f for f in findings if f.verdict != Verdict.CONFIRMED]
    if as_json:
        print(json.dumps({"exit_code": code, **counted, "findings": [f.to_json() for f in odd]}))
        return code
    for finding in odd[:SHOWN]:
        out.print(_line(finding), markup=False, soft_wrap=True)
    if len(odd) > SHOWN:
        out.print(f"... and {len(odd) - SHOWN} more; --json lists all of them.")
    table = Table("", "answers", title="Audit")
    for verdict in Verdict:
        if counted[verdict.value] or verdict == Verdict.CONFIRMED:
            table.add_row(verdict.value.replace("_", " "), str(counted[verdict.value]))
    out.print(table)
    signatures = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counted["signatures"].items() if n)
    out.print(f"Signatures: {signatures}.", markup=False)
    out.print(
        f"{counted['records_s']:g} answers/s, {counted['tokens_s']:g} output tokens/s,"
        f" {counted['seconds']:.1f} s.",
        markup=False,
    )
    return code


def _line(finding: Finding) -> str:
    """One finding in words."""
    parts = [f"line {finding.line}"]
    if finding.choice:
        parts.append(f"choice {finding.choice}")
    if finding.id and not finding.id.startswith("line "):
        parts.append(_printable(finding.id))
    text = f"{', '.join(parts)}: {finding.verdict.value.replace('_', ' ')}: {_printable(finding.reason)}"
    if (d := finding.difference) is not None:
        text += f"\n    recorded: token {d.recorded_token}, log-probability {_number(d.recorded_logprob)}"
        if d.recorded_token != d.canonical_token:
            text += f" (the verifier's for it: {_number(d.recorded_token_canonical_logprob)})"
        text += f"\n    canonical: token {d.canonical_token}, log-probability {_number(d.canonical_logprob)}"
    for name, (theirs, ours) in finding.fields.items():
        values = f"{theirs!r} in the answer's manifest, {ours!r} in the verifier's"
        text += f"\n    {_printable(name)}: {_printable(values)}"
    return text


def _printable(text: str) -> str:
    """What a record or a server says, in one line that any terminal takes: control characters, and what the
    terminal's encoding lacks, are spelled out."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return plain.encode(out.encoding, "backslashreplace").decode(out.encoding)


def _number(value: float | None) -> str:
    return "not recorded" if value is None else repr(value)
