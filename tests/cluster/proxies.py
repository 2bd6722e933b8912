"""Run by test_cluster.py in a process of its own: which nodes of a cluster answer over HTTP, with a proxy on
every node that has a replica, and each role on a node of its own.

    python -m tests.cluster.proxies MODEL_DIRECTORY

Prints one JSON object: what each node's port has answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llm42_serve.launch import prepare_environment

prepare_environment()

import ray  # noqa: E402

from llm42.config import Settings  # noqa: E402
from tests.chaos.support import App, best_effort, deterministic  # noqa: E402
from tests.cluster.nodes import RESOURCES, Nodes, application  # noqa: E402
from tests.cluster.parts import WAIT_S, app_of, state_of, tree, until  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.support import Lab  # noqa: E402

NAME = "apart"


async def asked(port: int, settings: dict[str, Any], lab: Lab) -> dict[str, Any]:
    """What a node's own proxy answers."""
    node: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}")
    app = App(node, NAME, Settings.load(settings))
    exact, plain = deterministic(1, 24), best_effort(1, 24)
    answer, other = await app.stream(exact), await app.stream(plain)
    return {
        "health": (await app.health()).get("status", "no answer"),
        "best_effort": other.finish,
        "deterministic": (answer.tokens, answer.logprobs) == lab.oracle(exact).sent,
    }


async def run(nodes: Nodes, lab: Lab) -> dict[str, Any]:
    """One node a role. Each node's proxy, if it gets one, has a port of its own."""
    ports = {role: free_port() for role in RESOURCES}
    for role, port in ports.items():
        nodes.start_worker(role, proxy_port=port)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    settings = tree(lab)
    nodes.deploy([application(NAME, settings)], "EveryNode")
    app = app_of(nodes, NAME, settings)
    await until(lambda: state_of(NAME) == "RUNNING", f"{NAME} runs")
    await app.until(lambda h: bool(h["deterministic"]), WAIT_S)
    return {role: await asked(port, settings, lab) for role, port in ports.items()}


def main() -> None:
    """Starts the cluster."""
    lab = Lab.make(Path(sys.argv[1]))
    with Nodes() as nodes:
        try:
            found = asyncio.run(run(nodes, lab))
        finally:
            ray.shutdown()
    lab.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
