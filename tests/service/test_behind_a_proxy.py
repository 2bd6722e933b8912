"""With a proxy in the environment, what the service says to itself goes direct."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm42.audit.remote import RemoteAudit, ServerProblem
from llm42.cli.top import NoMetrics, Page
from llm42.config import Settings
from llm42.host.direct import NO_GRPC_PROXY, go_direct, is_this_machine, open_url
from llm42_serve.launch import Service
from tests.service.recording_proxy import NAMES, RecordingProxy, recording_proxy
from tests.service.serve_process import serve_process

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.service
def test_the_service_answers_and_asks_no_proxy(tmp_path: Path) -> None:
    """Where nothing is excepted; what is excepted already stays so (below)."""
    with recording_proxy() as proxy:
        env = proxy.environment(no_proxy=None, NO_PROXY=None)
        # a home directory is long enough for that, and Ray's sockets have no room left
        (tmp_path / ("t" * 60)).mkdir()
        env["TMPDIR"] = str(tmp_path / ("t" * 60))
        seen = set()
        with serve_process(tmp_path, env) as running:
            poll = threading.Event()

            def watch() -> None:
                while not poll.wait(0.05):
                    seen.add(running.ask("/health")[:2])

            watcher = threading.Thread(target=watch)
            watcher.start()
            ready = running.wait_ready()
            poll.set()
            watcher.join()
            assert ready, running.lines[-5:] + proxy.asked[:5]
            status, _, body = running.complete(deterministic=True)
            assert status == 200, body
            assert json.loads(body)["choices"][0]["finish_reason"]
            # headers that Serve's proxy would act on, from any client
            control = {"x-request-timeout-seconds": "0.001"}
            ask = {"model": "tiny", "prompt": "a b", "max_tokens": 64, "ignore_eos": True, "stream": True}
            status, _, stream = running.ask("/v1/completions", ask, **control)
            assert status == 200
            assert stream.endswith(b"data: [DONE]\n\n")
            deadline = time.monotonic() + 30
            while "ray_llm42_requests_total" not in (page := running.metrics()):
                assert time.monotonic() < deadline, "no metrics"
                time.sleep(0.5)
            assert len([line for line in page.splitlines() if line.startswith("ray_llm42_")]) > 50
        assert proxy.asked == []
        # while the start runs: nobody there, or 503 in the error's shape, or the service itself
        assert seen <= {(0, ""), (503, "application/json"), (200, "application/json")}


GRPC = """
import sys, grpc
from llm42.host.direct import go_direct
import os
if sys.argv[1] == "direct":
    go_direct(os.environ)
for address in ("127.0.0.1:9", "192.0.2.2:37291", "[::1]:9", "localhost:9"):
    try:
        grpc.channel_ready_future(grpc.insecure_channel(address)).result(timeout=float(sys.argv[2]))
    except grpc.FutureTimeoutError:
        pass
"""


@pytest.mark.parametrize("how", ["direct", "as it is"])
@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_grpc_goes_direct(how: str, name: str) -> None:
    """To loopback, to the node's own address and by IPv6. The control: left as it is, it asks the proxy."""
    with recording_proxy() as proxy:
        env = proxy.environment(**dict.fromkeys((n for n in NAMES if n != name), None), no_proxy="localhost")
        patience = "0.3" if how == "direct" else "2"  # the control waits for what must come
        subprocess.run(
            [sys.executable, "-c", GRPC, how, patience], env=env, check=True, cwd=ROOT, timeout=300
        )
        connects = {line.split()[1] for line in proxy.asked}
    wanted = set() if how == "direct" else {"127.0.0.1:9", "192.0.2.2:37291"}
    assert connects == wanted or (wanted and connects >= wanted)


def test_what_else_is_excepted_stays() -> None:
    here: dict[str, str] = {"no_proxy": "localhost,127.0.0.1"}
    go_direct(here)
    assert here["no_proxy"] == here["NO_PROXY"] == "localhost,127.0.0.1,::1"
    env = {"no_proxy": "a.example", "NO_PROXY": "b.example, a.example", "no_grpc_proxy": "c.example"}
    go_direct(env)
    assert env["no_proxy"] == env["NO_PROXY"] == "a.example,b.example,localhost,127.0.0.1,::1"
    assert env["no_grpc_proxy"] == f"c.example,{NO_GRPC_PROXY}"
    before = dict(env)
    go_direct(env)
    assert env == before


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:8000/x", True),
        ("http://127.1.2.3/x", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://user@localhost./", True),
        ("https://llm.example:8000/127.0.0.1", False),
        ("http://localhost.example", False),
        ("http://192.0.2.2", False),
    ],
)
def test_which_urls_are_this_machines(url: str, here: bool) -> None:
    assert is_this_machine(url) is here


class _Answers(BaseHTTPRequestHandler):
    """/health, /metrics and /v1/fingerprint of a service."""

    def do_GET(self) -> None:
        text = '{"fingerprint": "f", "deterministic": true, "detail": ""}'
        if self.path == "/metrics":
            text = "# TYPE ray_llm42_windows_total counter\nray_llm42_windows_total 3\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Any:
    """A server on loopback that answers as the service does."""
    with HTTPServer(("127.0.0.1", 0), _Answers) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A proxy that this process's environment names."""
    with recording_proxy() as made:
        for name in [n for n in os.environ if "proxy" in n.lower()]:
            monkeypatch.delenv(name)
        for name, value in made.environment().items():
            if "proxy" in name.lower():
                monkeypatch.setenv(name, value)
        yield made


def test_commands_reach_this_machine(server: HTTPServer, proxy: RecordingProxy) -> None:
    """The start's own look, `llm42 top`, `llm42 audit` and the chart's readiness probe."""
    port = server.server_address[1]
    service = Service(Settings.load({"server": {"port": port}}))
    assert service.health()["deterministic"] is True
    assert Page.fetch(f"http://127.0.0.1:{port}/metrics").samples
    assert RemoteAudit(f"http://localhost:{port}").fingerprint() == "f"
    script = ROOT / "helm" / "llm42" / "files" / "readiness.py"
    command = [sys.executable, str(script), f"--port={port}", "--require=certified", "--latch=/dev/null"]
    subprocess.run(command, check=True, timeout=300)
    assert proxy.asked == []


def test_a_remote_server_is_asked_by_way_of_the_proxy(proxy: RecordingProxy) -> None:
    with pytest.raises(ServerProblem, match="403"):
        RemoteAudit("http://llm.example:8000").fingerprint()
    with pytest.raises(NoMetrics, match="Forbidden"):
        Page.fetch("http://llm.example:8090/metrics")
    assert proxy.asked == [
        "GET http://llm.example:8000/v1/fingerprint HTTP/1.1",
        "GET http://llm.example:8090/metrics HTTP/1.1",
    ]
    with pytest.raises(urllib.error.URLError):
        open_url("http://llm.invalid/", 5, direct=True)
    assert len(proxy.asked) == 2
