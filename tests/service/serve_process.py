"""`llm42 serve` as a process of its own, with the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import free_port
from tests.support import write_model

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
READY_S = 240.0


class ServeProcess:
    """The command while it runs; what it prints is kept."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        """directory: gets the model and the settings; the model need not be there."""
        self.port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.marker = f"started-by-test-{os.getpid()}-{self.port}"
        config = directory / "tiny.yaml"
        config.write_text(yaml.safe_dump(tiny_tree(directory)))
        command = [sys.executable, "-m", "llm42", "serve", "--config", str(config), "--port", str(self.port)]
        command += ["--metrics-port", str(self.metrics_port)]
        env = dict(os.environ if environment is None else environment) | {"LLM42_TEST_MARKER": self.marker}
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))

    def wait_ready(self, seconds: float = READY_S) -> bool:
        """Whether it says that it is ready, in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            if any(line.startswith("Ready") for line in self.lines):
                return True
            time.sleep(0.1)
        return False

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, str, bytes]:
        """HTTP status (0: no connection), content type and body of one reply."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        try:
            with DIRECT.open(urllib.request.Request(self.url + path, data, headers), timeout=300) as reply:
                return reply.status, reply.headers.get_content_type(), reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get_content_type(), error.read()
        except OSError:
            return 0, "", b""

    def complete(self, **fields: Any) -> tuple[int, str, bytes]:
        """One completion."""
        return self.ask("/v1/completions", {"model": "tiny", "prompt": "a b", "max_tokens": 4, **fields})

    def metrics(self) -> str:
        """The metrics page."""
        with DIRECT.open(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=300) as reply:
            return str(reply.read().decode())

    def stop(self) -> int:
        """Ends it as Ctrl-C does; its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        code = self._process.wait(90)
        self._reader.join(10)
        return code


def tiny_tree(directory: Path) -> dict[str, Any]:
    """Settings of a service that starts as quickly as one can."""
    return {
        "model": {"path": str(directory / "tiny"), "name": "tiny", "max_model_len": 512},
        "engine": {"threads": 1, "kv_tokens": 4096},
        "verifier": {"kv_tokens": 4096, "buckets": [8, 16], "certificate_dir": str(directory)},
    }


@contextmanager
def serve_process(directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[ServeProcess]:
    """The command for the length of a block."""
    write_model(directory / "tiny")
    running = ServeProcess(directory, environment)
    try:
        yield running
    finally:
        running.stop()
