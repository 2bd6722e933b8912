"""The readiness script as a pod runs it, against answers of /health."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm42.api.backend import Status
from tests.chart import helm

SCRIPT = helm.CHART / "files" / "readiness.py"
READY = {"deterministic": True, "status": "ok"}
BEST_EFFORT = {"deterministic": False, "status": "best_effort_only", "detail": "certifying attention"}
DOWN = {"deterministic": False, "status": "unavailable"}


class Health(ThreadingHTTPServer):
    """Answers /health with `status` and `body`."""

    status = 200
    body: dict[str, Any] | str = READY


@pytest.fixture
def health() -> Iterator[Health]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, Health)
            body = self.server.body if self.path == "/health" else "not found"
            self.send_response(self.server.status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *_: object) -> None:
            """Silent."""

    with Health(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def probe(health: Health, tmp_path: Path) -> Any:
    def run(status: int, body: dict[str, Any] | str, require: str = "certified") -> tuple[bool, str]:
        health.status, health.body = status, body
        options = [f"--port={health.server_port}", f"--require={require}", f"--latch={tmp_path / 'latch'}"]
        command = [sys.executable, "-I", str(SCRIPT), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.returncode == 0, done.stdout

    return run


def test_a_worker_waits_for_the_first_certificate_and_not_for_later_ones(probe: Any) -> None:
    ready, why = probe(200, BEST_EFFORT)
    assert not ready
    assert "certifying attention" in why
    assert probe(200, READY)[0]
    assert probe(200, BEST_EFFORT)[0], "a verifier that dies takes no best-effort traffic down"
    ready, why = probe(503, DOWN)
    assert not ready
    assert "503" in why


def test_serving_is_enough_where_that_is_asked(probe: Any) -> None:
    assert probe(200, BEST_EFFORT, "serving")[0]
    assert not probe(503, DOWN, "serving")[0]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(404, "", "404"), (200, "not JSON", "not the"), (200, "[1]", "not the"), (200, "{}", "not the")],
)
def test_anything_else_on_the_port_is_not_ready(probe: Any, status: int, body: str, said: str) -> None:
    ready, why = probe(status, body, "serving")
    assert not ready
    assert said in why


def test_no_proxy_is_not_ready(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(SCRIPT), "--port=1", "--require=serving"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "no proxy" in done.stdout) == (1, True)


def test_another_container_of_the_pod_starts_anew(probe: Any, tmp_path: Path) -> None:
    assert probe(200, READY)[0]
    assert (tmp_path / "latch").exists()
    (tmp_path / "latch").write_text("the start of another first process")
    assert not probe(200, BEST_EFFORT)[0]


def test_health_has_the_fields_that_the_script_reads() -> None:
    source = (helm.ROOT / "llm42" / "api" / "app.py").read_text()
    assert '"deterministic": ready' in source
    assert "detail" in Status.__dataclass_fields__
