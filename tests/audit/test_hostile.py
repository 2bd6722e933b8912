"""Records that are no records: each is told, the others are audited all the same, and nothing falls over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import llm42.api.audit_routes as audit_api
import llm42.cli.audit as audit_command
import llm42.cli.main as cli
from llm42.audit.compare import Finding, Verdict
from llm42.audit.records import claims_of
from llm42.audit.remote import FINDING
from llm42.audit.replayer import Replayer
from llm42.config import Settings
from llm42.errors import VerifierUnavailable
from llm42.receipt import Signature
from tests.audit.support import ASK, FINGERPRINT, audit, client, post
from tests.support import Lab

FLAT: dict[str, Any] = {"fingerprint": FINGERPRINT, "prompt": [5], "output": [7], "sampling": {"seed": "1"}}
LONE = "\ud800"
HUGE = float("inf")
"""What 1e999 becomes when it is read."""


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


EXCHANGE = {
    "request": {"model": "tiny", "prompt": "x"},
    "response": {"system_fingerprint": FINGERPRINT, "choices": [{"text": "y"}]},
}
HOSTILE: dict[str, dict[str, Any]] = {
    "surrogate in the id": FLAT | {"id": LONE},
    "surrogate in a name": FLAT | {LONE: 1},
    "surrogate in the fingerprint": FLAT | {"fingerprint": LONE},
    "surrogate in the text": FLAT | {"text": LONE},
    "surrogate in the reply's id": {**EXCHANGE, "response": {**EXCHANGE["response"], "id": LONE}},
    "huge in a manifest": FLAT | {"fingerprint": "llm42-0", "manifest": {"a": HUGE}},
    "huge in logprobs": FLAT | {"logprobs": [HUGE]},
    "not a number": FLAT | {"logprobs": [float("nan")]},
    "nested manifest": FLAT | {"fingerprint": "llm42-0", "manifest": nested(400)},
    "list for a manifest": FLAT | {"fingerprint": "llm42-0", "manifest": [1]},
    "list beside an exchange": {**EXCHANGE, "manifest": [1]},
    "text for evidence": {**EXCHANGE, "response": {**EXCHANGE["response"], "llm42": "x"}},
    "text for a seed": {**EXCHANGE, "response": {**EXCHANGE["response"], "llm42": {"seed": "1"}}},
    "a choice twice": {
        **EXCHANGE,
        "response": {**EXCHANGE["response"], "choices": [{"index": 1, "text": "y"}] * 2},
    },
}


async def send(http: httpx.AsyncClient, body: Any) -> httpx.Response:
    """httpx's own writer refuses what these tests send."""
    text = json.dumps(body).replace("Infinity", "1e999").encode()
    return await http.post("/v1/audit", content=text, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("name", HOSTILE)
async def test_one_hostile_record_does_not_spoil_the_others(lab: Lab, settings: Settings, name: str) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"output": "tokens"}}
        good = (await post(http, "/v1/completions", body))["llm42"]["receipt"]
        reply = await send(http, {"records": [good, HOSTILE[name], good]})
    assert reply.status_code == 200, reply.text
    assert reply.content.isascii()
    assert [r["verdict"] for r in reply.json()["results"]] == ["confirmed", "bad_record", "confirmed"]


@pytest.mark.parametrize("manifest", [{"a": HUGE}, {"a": LONE}, nested(400), [1], 4, None])
async def test_a_hostile_manifest_explains_nothing(lab: Lab, settings: Settings, manifest: Any) -> None:
    record = FLAT | {"fingerprint": "llm42-0"}
    async with client(lab, settings) as (http, _):
        manifests = [{"fingerprint": name, "manifest": manifest} for name in ("llm42-0", 7, [2], LONE)]
        reply = await send(http, {"records": [record], "manifests": manifests})
    assert reply.status_code == 200, reply.text
    (found,) = reply.json()["results"]
    assert found["verdict"] == "other_fingerprint"
    assert "no manifest" in found["reason"]


async def test_a_bug_that_one_record_meets_is_that_records_finding(
    lab: Lab, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is read, while its question is made, and while its answers are compared."""

    def reads(value: Mapping[str, Any], line: int) -> Any:
        if value.get("id") == "reading":
            raise ZeroDivisionError("a bug")
        return claims_of(value, line)

    asked, judged = Replayer._asked, Replayer._judge

    def asks(self: Replayer, claim: Any, signature: Signature) -> Any:
        if claim.id == "asking":
            raise ZeroDivisionError("a bug")
        return asked(self, claim, signature)

    async def judges(self: Replayer, case: Any, answers: Any) -> Finding:
        if case.claim.id == "judging":
            raise ZeroDivisionError("a bug")
        return await judged(self, case, answers)

    monkeypatch.setattr(audit_api, "claims_of", reads)
    monkeypatch.setattr(Replayer, "_asked", asks)
    monkeypatch.setattr(Replayer, "_judge", judges)
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"output": "tokens"}}
        good = (await post(http, "/v1/completions", body))["llm42"]["receipt"]
        bad = [FLAT | {"id": name} for name in ("reading", "asking", "judging")]
        found = await audit(http, [good, *bad, good])
    assert [r["verdict"] for r in found] == ["confirmed", "failed", "failed", "failed", "confirmed"]
    assert all("ZeroDivisionError" in r["reason"] for r in found[1:4])
    assert sum(r.exc_info is not None for r in caplog.records) == 3, "a bug is in the log with its cause"


@pytest.mark.parametrize("name", HOSTILE)
def test_the_command_names_the_line(tmp_path: Path, config: Path, name: str) -> None:
    """The line that can be read is of another fingerprint, so nothing is computed."""
    lines = [FLAT | {"fingerprint": "llm42-é\x1b[2J", "id": "ü\nline 9: confirmed"}, HOSTILE[name]]
    text = "\n".join(json.dumps(x).replace("Infinity", "1e999") for x in lines)
    (tmp_path / "a.jsonl").write_text(text)
    arguments = ["audit", str(tmp_path / "a.jsonl"), "--config", str(config)]
    result = CliRunner(charset="latin-1").invoke(cli.app, arguments)
    assert result.exit_code == 1, result.output
    assert "line 2: bad record: " in result.output
    as_json = CliRunner().invoke(cli.app, [*arguments, "--json"])
    verdicts = [f["verdict"] for f in json.loads(as_json.stdout.splitlines()[-1])["findings"]]
    assert verdicts == ["other_fingerprint", "bad_record"]


def test_a_finding_is_one_line_that_any_terminal_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a server says, which is beyond the reach of checks here."""
    fields = {f"a{LONE}": ("\x1b[2J", "é")}
    finding = Finding(
        3, 0, f"é{LONE}\nline 9: confirmed", Verdict.FAILED, "\x1b[2J\r", Signature.UNSIGNED, fields=fields
    )

    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(audit_command, "out", Ascii())
    shown = audit_command._line(finding)
    assert shown.isascii()
    assert all(c.isprintable() for c in shown.replace("\n    ", ""))
    assert shown.count("\n") == 1
    assert "line 3, \\xe9\\ud800\\nline 9: confirmed: failed: \\x1b[2J\\r" in shown


def test_a_finding_of_a_record_without_a_name_can_be_read_again() -> None:
    """Else one such record would spoil the findings of a whole call."""
    nameless = Finding(0, 0, "", Verdict.CONFIRMED, "", Signature.UNSIGNED)
    assert FINDING.validate_python(nameless.to_json()) == nameless


async def test_no_verifier_is_no_records_fault(lab: Lab, settings: Settings) -> None:
    """What holds for the whole audit stays an error of the call."""
    async with client(lab, settings) as (http, backend):
        backend.up = False
        reply = await send(http, {"records": [FLAT]})
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == VerifierUnavailable.code
