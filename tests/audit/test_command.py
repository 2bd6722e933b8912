"""`llm42 audit` in this process: exit codes, what is printed, and that no line is lost."""

from __future__ import annotations

import asyncio
import http.server
import json
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import llm42.cli.main as cli
from llm42.local.assembly import Local
from llm42.receipt import Answered, Keyring, make_receipt, sampling_to_json
from tests.audit.support import SECRET
from tests.support import Lab, collect, request_of

COUNT = 24
KEYS = Keyring({"k1": SECRET}, "k1")
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stored(tiny: Lab) -> Lines:
    """Answers with signed receipts and token ids, and the server's manifest."""

    async def answers(whole: Local) -> Lines:
        lines = []
        for i in range(COUNT):
            request = request_of(f"r{i}", i, 8 + i, 6)
            answer = await collect(whole.generator, request)
            parts = (request.prompt, request.sampling, answer.tokens, answer.logprobs, answer.finish)
            answered = Answered(f"r{i}", "tiny", 0, whole.verifier.fingerprint, *parts)
            receipt = KEYS.sign(make_receipt(answered, True, True)).to_json()
            lines.append({"receipt": receipt, "logprobs": [p.logprob for p in answer.logprobs]})
        lines.append({"fingerprint": whole.verifier.fingerprint, "manifest": whole.verifier.manifest})
        return lines

    with Local(tiny.settings) as whole:
        return asyncio.run(answers(whole))


def run(path: Path, lines: list[Any], config: Path, *options: str) -> Result:
    text = [x if isinstance(x, str) else json.dumps(x) for x in lines]
    path.write_text("\n".join(text) + "\n")
    return CliRunner().invoke(cli.app, ["audit", str(path), "--config", str(config), *options])


def told(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def test_stored_answers_are_confirmed(tmp_path: Path, stored: Lines, config: Path) -> None:
    result = run(tmp_path / "a.jsonl", stored, config)
    assert result.exit_code == 0, result.output
    assert "confirmed" in result.stdout
    assert f"Signatures: {COUNT} valid." in result.stdout
    assert "answers/s" in result.stdout


def test_a_changed_answer_is_named_by_its_line(tmp_path: Path, stored: Lines, config: Path) -> None:
    lines = json.loads(json.dumps(stored))
    receipt = lines[5]["receipt"]
    for name in ("hmac", "key"):
        del receipt[name]
    receipt["output"][2] = (receipt["output"][2] + 1) % 512
    lines[9]["receipt"]["hmac"] = "0" * 64
    result = run(tmp_path / "a.jsonl", lines, config)
    assert result.exit_code == 1
    assert "line 6, r5: differs: token 2 of the output" in result.stdout
    assert "line 10, r9: bad signature" in result.stdout
    found = told(run(tmp_path / "a.jsonl", lines, config, "--json"))
    assert (found["exit_code"], found["confirmed"], found["differs"]) == (1, COUNT - 2, 1)
    assert [f["line"] for f in found["findings"]] == [6, 10]
    assert found["findings"][0]["difference"]["index"] == 2


def test_bad_lines_are_reported_and_the_others_audited(tmp_path: Path, stored: Lines, config: Path) -> None:
    lines: list[Any] = [stored[0], "{nonsense", stored[1], {"receipt": 7}, "", stored[2]]
    found = told(run(tmp_path / "a.jsonl", lines, config, "--json"))
    assert (found["exit_code"], found["confirmed"], found["bad_record"]) == (2, 3, 2)
    assert [f["line"] for f in found["findings"]] == [2, 4]
    assert "not JSON" in found["findings"][0]["reason"]


def test_what_cannot_be_audited_at_all_has_exit_codes_of_its_own(tmp_path: Path, config: Path) -> None:
    missing = CliRunner().invoke(cli.app, ["audit", str(tmp_path / "none"), "--config", str(config)])
    assert missing.exit_code == 2
    line = {"fingerprint": "llm42-0", "prompt": [1], "output": [2], "sampling": {}}
    gone = run(tmp_path / "a.jsonl", [line], config, "--url", "http://127.0.0.1:9")
    assert gone.exit_code == 3
    (tmp_path / "m.json").write_text("{}")
    assert run(tmp_path / "a.jsonl", [line], config, "--manifest", str(tmp_path / "m.json")).exit_code == 2


def test_another_fingerprint_is_explained_field_by_field(tmp_path: Path, stored: Lines, config: Path) -> None:
    from llm42.fingerprint import fingerprint

    manifest = json.loads(json.dumps(stored[-1]["manifest"]))
    here, manifest["device"]["threads"] = manifest["device"]["threads"], 64
    (tmp_path / "m.json").write_text(json.dumps({"fingerprint": fingerprint(manifest), "manifest": manifest}))
    line = {"fingerprint": fingerprint(manifest), "prompt": [1], "output": [2], "sampling": {}}
    result = run(tmp_path / "a.jsonl", [line], config, "--manifest", str(tmp_path / "m.json"))
    assert result.exit_code == 1
    assert f"device.threads: 64 in the answer's manifest, {here} in the verifier's" in result.stdout


def test_a_signature_may_be_required(tmp_path: Path, stored: Lines, config: Path) -> None:
    receipt = stored[0]["receipt"]
    flat = {"fingerprint": receipt["fingerprint"], "prompt": receipt["prompt"], "output": receipt["output"]}
    lines = [stored[0], flat | {"sampling": receipt["sampling"]}]
    assert run(tmp_path / "a.jsonl", lines, config).exit_code == 0
    assert run(tmp_path / "a.jsonl", lines, config, "--require-signature").exit_code == 1
    assert run(tmp_path / "a.jsonl", lines[:1], config, "--require-signature").exit_code == 0


def test_a_text_and_a_hash_are_generated_again_here(tmp_path: Path, stored: Lines, config: Path) -> None:
    bare = {k: v for k, v in stored[3]["receipt"].items() if k != "output"}
    wrong = {k: v for k, v in bare.items() if k not in ("hmac", "key")} | {"output_sha256": "0" * 64}
    body = {"model": "tiny", "prompt": bare["prompt"], "max_tokens": 6, "seed": 1}
    text = {"fingerprint": bare["fingerprint"], "request": body, "text": "no model says this"}
    found = told(run(tmp_path / "a.jsonl", [bare, wrong, text], config, "--json"))
    assert (found["confirmed"], found["differs"]) == (1, 2)
    assert all(f["regenerated"] for f in found["findings"])


def test_sampling_is_written_as_it_is_read() -> None:
    sampling = request_of("x", 1).sampling
    assert sampling_to_json(sampling) == {"temperature": 1.0, "top_p": 0.95, "seed": "11"}


class Stranger(socketserver.StreamRequestHandler):
    """Something that is no LLM-42 server."""

    answer = b""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(self.answer)


def audited_by(server: socketserver.BaseServer, folder: Path, config: Path) -> Result:
    """One record, audited by what answers there."""
    line = {"fingerprint": "llm42-0", "prompt": [1], "output": [2], "sampling": {}}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        return run(
            folder / "a.jsonl", [line], config, "--url", f"http://127.0.0.1:{server.server_address[1]}"
        )
    finally:
        server.shutdown()
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "answer", [HEAD + b"<html>", HEAD + b"[1]", HEAD + b"{}", HEAD + b"\xff", b"-ERR unknown command\r\n"]
)
def test_what_is_no_llm42_server_is_said(tmp_path: Path, config: Path, answer: bytes) -> None:
    handler = type("Answering", (Stranger,), {"answer": answer})
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        result = audited_by(server, tmp_path, config)
    assert result.exit_code == 3, result.output
    assert "not an LLM-42 server" in " ".join(result.output.split())


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that tells its fingerprint and audits nothing for this key."""

    def do_GET(self) -> None:
        """The fingerprint."""
        self._say(200, {"fingerprint": "llm42-0", "manifest": {}})

    def do_POST(self) -> None:
        """The audit."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(403, {"error": {"message": "The key 'be' may not use the verifiers."}})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_a_key_that_may_not_audit_is_no_finding(tmp_path: Path, config: Path) -> None:
    """Nothing was looked at: neither answers nor signatures."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        result = audited_by(server, tmp_path, config)
    assert result.exit_code == 3, result.output
    assert "may not use the verifiers" in " ".join(result.output.split())
