"""A Ray cluster as people start one by hand: `ray start` for each node, `serve deploy` for the applications.
All nodes are on this machine, at 127.0.0.1; their GPUs are pretended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from tests.conftest import free_port

BIN = Path(sys.executable).parent
RESOURCES = ("llm42_fast_path", "llm42_verifier", "llm42_ingress")
"""What the nodes of a cluster may announce, one of each."""
START_S = 180.0
END_S = 60.0
DRAIN_S = 90.0
"""For a node whose verifier goes before that, and for one whose verifier stays."""


class Node:
    """One `ray start --block`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def wait_started(self) -> Node:
        """Returns once it is part of the cluster."""
        deadline = time.monotonic() + START_S
        while "This command will now block" not in self.log():
            if not self.running or time.monotonic() > deadline:
                raise RuntimeError(f"the node has not started: {self.log()}")
            time.sleep(0.1)
        return self

    def wait_ended(self, seconds: float) -> float:
        """Waits for its end; the seconds it took. Raises TimeoutExpired."""
        began = time.monotonic()
        self._process.wait(seconds)
        return time.monotonic() - began

    def terminate(self) -> None:
        """SIGTERM, as the end of a pod sends it: Ray drains the node."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL for all of its processes: the machine is lost."""
        for pid in family(self._process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(END_S)


class Nodes:
    """The cluster. Use as a context manager; nothing is left of it."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """env: for all nodes, beside this process's."""
        self.directory = Path(tempfile.mkdtemp(prefix="l42-"))  # short: Ray has sockets in it
        self.port, self.http, self.dashboard = free_port(), free_port(), free_port()
        self._env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_metrics_report_interval_ms": "60000",
            "RAY_ADDRESS": self.address,
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            **(env or {}),
        }
        self.head: Node | None = None
        self._nodes: list[Node] = []

    @property
    def address(self) -> str:
        """For `ray.init`."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Of Serve's proxy."""
        return f"http://127.0.0.1:{self.http}"

    def __enter__(self) -> Self:
        self.start_head()
        return self

    def start_head(self) -> Node:
        """The head, with room for Serve's controller only."""
        # Ray would take the workers of this machine, which name the same address, for a head that runs
        (self.directory / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self.head = self._start(
            ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}", "--num-cpus=0"],
            ["--include-dashboard=true", "--dashboard-host=127.0.0.1", "--num-gpus=0"],
        )
        return self.head.wait_started()

    def start_worker(
        self, *resources: str, gpus: int = 0, cpus: int = 4, drain_s: float = 300.0, proxy_port: int = 0
    ) -> Node:
        """A node that announces one of each of these resources, and one of its own name. drain_s: how long
        SIGTERM waits for it to be idle. proxy_port: of Serve's proxy there, instead of the cluster's."""
        own = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(proxy_port)} if proxy_port else {}
        announced = json.dumps(dict.fromkeys((*resources, f"node-{len(self._nodes)}"), 1))
        return self._start(
            [f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"],
            [f"--resources={announced}"],
            RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(drain_s),
            **own,
        ).wait_started()

    def _start(self, options: list[str], more: list[str], **env: str) -> Node:
        name = f"node-{len(self._nodes)}"
        log = self.directory / f"{name}.log"
        command = [str(BIN / "ray"), "start", "--block", "--node-ip-address=127.0.0.1", *options, *more]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        if "--head" in options:
            command.append(f"--temp-dir={self.directory}/ray")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=self._env | env,
                cwd=self.directory,  # Ray's workers import from there first: there shall be nothing
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(name, process, log)
        self._nodes.append(node)
        return node

    def deploy(self, applications: list[dict[str, Any]], proxies: str = "HeadOnly") -> str:
        """`serve deploy` of a file such as serve_config.yaml, with these applications; what it prints.
        proxies: EveryNode: all listen on the same port of this machine, and the kernel chooses."""
        file = self.directory / "serve_config.yaml"
        options = {"host": "127.0.0.1", "port": self.http}
        tree = {"proxy_location": proxies, "http_options": options, "applications": applications}
        file.write_text(yaml.safe_dump(tree))
        done = subprocess.run(
            [str(BIN / "serve"), "deploy", str(file)],
            env=self._env,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        )
        return done.stdout

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._nodes):
            if node.running:
                node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def application(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """An application of a file that `serve deploy` reads."""
    return {"name": name, "route_prefix": f"/{name}", "import_path": "llm42_serve.app:build", "args": tree}


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
