"""Run by test_nodes.py in a process of its own: a Ray cluster of several simulated nodes, who is where.

    python -m tests.chaos.several_nodes MODEL_DIRECTORY

Prints one JSON object: the nodes of the roles, the answers before and after a node is lost.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from llm42_serve.launch import prepare_environment

prepare_environment()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402

from llm42.checkpoint.load import sampled_identity  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42_serve.app import build  # noqa: E402
from llm42_serve.verifiers.names import get_actor, verifier_names  # noqa: E402
from tests.chaos.support import App, deterministic  # noqa: E402
from tests.conftest import free_port  # noqa: E402

TOKENS = 24


class Url:
    """What App needs to know of a service."""

    def __init__(self, url: str) -> None:
        self.url = url


async def ask(app: App, seconds: float = 120.0) -> list[Any]:
    """Four deterministic answers, asked for as clients do: one that is refused for now, or whose connection
    is cut (the node that is lost may have the ingress, too), is asked for again."""

    async def one(number: int) -> list[Any]:
        deadline = time.monotonic() + seconds
        while True:
            got = await app.stream(deterministic(number, TOKENS))
            if got.finish or time.monotonic() > deadline:
                return [got.tokens, got.logprobs, got.finish or repr(got)]
            await asyncio.sleep(1.0)

    return list(await asyncio.gather(*map(one, range(4))))


async def run(directory: Path, cluster: Cluster, verify_node: Any) -> dict[str, Any]:
    """Deploys with one role per kind of node, asks, loses the verifier's node, asks again."""
    port = free_port()
    tree = {
        "model": {"path": str(directory), "name": "tiny", "max_model_len": 768},
        "engine": {"threads": 1, "kv_tokens": 8192, "resources": {"fast": 0.01}},
        "verifier": {"kv_tokens": 8192, "certificate_dir": str(directory), "resources": {"verify": 0.01}},
        "server": {"fastpath_replicas": 2, "verifiers": 1},
    }
    settings = Settings.load(tree)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(tree), name="nodes", route_prefix="/nodes")
    app = App(Url(f"http://127.0.0.1:{port}"), "nodes", settings)  # type: ignore[arg-type]
    await app.until(lambda h: bool(h["deterministic"]), 300)
    name = verifier_names(settings, sampled_identity(str(directory)), 1)[0]
    found: dict[str, Any] = {
        "verifier": (await get_actor(name).status.remote()).node,
        "replicas": sorted({(await app.health())["node"] for _ in range(20)}),
        "nodes": {n["NodeID"]: sorted(n["Resources"]) for n in ray.nodes() if n["Alive"]},
        "before": await ask(app),
    }
    spare = cluster.add_node(num_cpus=1, resources={"verify": 1})
    began = time.monotonic()
    cluster.remove_node(verify_node, allow_graceful=False)
    found["after"] = await ask(app)
    found["lost_for_s"] = time.monotonic() - began
    # A worker outlives its raylet by a moment, and may have given the answers just read.
    found["moved_to_spare"] = await moved(name, spare.node_id)
    found["afterwards"] = await ask(app)
    return found


async def moved(name: str, node: str, seconds: float = 120.0) -> bool:
    """Whether the actor of this name comes to be on that node."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if (await get_actor(name).status.remote()).node == node:
                return True
        except (RayActorError, ValueError):  # it has died, or its name is free at the moment
            pass
        await asyncio.sleep(0.5)
    return False


def main() -> None:
    """Starts the cluster; the head has neither role's resource."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"fast": 1})
    verify_node = cluster.add_node(num_cpus=1, resources={"verify": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        found = asyncio.run(run(Path(sys.argv[1]), cluster, verify_node))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
