"""Run by test_cluster.py in a process of its own: a Ray cluster of several nodes, started by hand.

    python -m tests.cluster.parts MODEL_DIRECTORY

Prints one JSON object: what was found in each part.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from llm42_serve.launch import prepare_environment

prepare_environment()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402

from llm42.checkpoint.load import sampled_identity  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42_serve.verifiers.names import (  # noqa: E402
    existing_verifiers,
    get_actor,
    get_or_create_verifier,
    supervisor_name,
    verifier_names,
)
from tests.chaos.support import App, best_effort, deterministic  # noqa: E402
from tests.cluster.nodes import DRAIN_S, RESOURCES, Node, Nodes, application  # noqa: E402
from tests.cluster.traffic import Traffic  # noqa: E402
from tests.support import Lab  # noqa: E402

FAST, VERIFY, INGRESS = RESOURCES
ELSEWHERE = "elsewhere"
WAIT_S = 300.0


def tree(lab: Lab, watch: dict[str, Any] | None = None, **server: Any) -> dict[str, Any]:
    """Settings as the chart makes them where each node has one of each role."""
    path = lab.settings.model.path
    return {
        "model": {"path": path, "name": "tiny", "max_model_len": 768},
        "engine": {"threads": 1, "kv_tokens": 8192, "resources": {FAST: 1}, "corrupt_share": 0.02},
        "verifier": {
            "certificate_dir": str(Path(path).parent),
            "kv_tokens": 8192,
            "resources": {VERIFY: 1},
            "audit_share": 0.0,
        },
        "session": {"mode": "verify", "commit_deadline_s": 0.2},
        "watch": watch or {},
        "server": {"ingress_resources": {INGRESS: 1}, "drain_s": 120.0, "failover_s": 180.0, **server},
    }


def app_of(nodes: Nodes, name: str, settings: dict[str, Any]) -> App:
    """The application as a client reaches it."""
    return App(nodes, name, Settings.load(settings))  # type: ignore[arg-type]


def node_ids() -> dict[str, str]:
    """Ray's ids of the nodes that are there, by their names in nodes.py."""
    found = {}
    for node in ray.nodes():
        names = [r for r in node["Resources"] if r.startswith("node-")]
        if node["Alive"] and names:
            found[names[0]] = node["NodeID"]
    return found


def state_of(name: str) -> str:
    """What Serve says of an application."""
    app = serve.status().applications.get(name)
    return app.status.value if app else "MISSING"


async def until(condition: Any, what: str, seconds: float = WAIT_S) -> None:
    """Waits for it. Raises AssertionError."""
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        await asyncio.sleep(0.3)


async def verifier_nodes(app: App) -> dict[str, str]:
    """The node of each verifier of the application's pool, by its name."""
    found = {}
    for number in existing_verifiers(app.settings, app.identity):
        name = app.verifier_names(number + 1)[-1]
        try:
            async with asyncio.timeout(10):
                found[name] = (await get_actor(name).status.remote()).node
        except (RayError, ValueError, TimeoutError):
            continue
    return found


async def without_a_verifiers_node(nodes: Nodes, lab: Lab, workers: list[Node]) -> dict[str, Any]:
    """Two applications in one cluster, deployed together. The ingress of the one is where fast paths are,
    that of the other is on the verifiers' node, which there is not yet."""
    early = tree(lab)
    held = tree(lab, ingress_resources={ELSEWHERE: 1})
    held["engine"]["resources"] = {}
    nodes.deploy([application("early", early), application("held", held)])
    app = app_of(nodes, "early", early)
    await until(lambda: state_of("early") == "RUNNING", "early runs")
    plain, exact = best_effort(1, 24), deterministic(1, 24)
    found: dict[str, Any] = {"other_ingress": state_of("held")}
    found["best_effort"] = (await app.stream(plain)).finish
    refused = await app.stream(exact)
    found["deterministic"] = [refused.status, bool(refused.retry_after)]
    workers.append(nodes.start_worker(*RESOURCES, ELSEWHERE, gpus=1, drain_s=DRAIN_S))
    await app.until(lambda h: bool(h["deterministic"]), WAIT_S)
    await until(lambda: state_of("held") == "RUNNING", "held runs")
    answers = [await app_of(nodes, name, early).stream(exact) for name in ("early", "held")]
    found["then"] = [(a.tokens, a.logprobs) == lab.oracle(exact).sent for a in answers]
    return found


async def one_verifier_a_node(lab: Lab) -> dict[str, Any]:
    """Two verifiers of a tenth of a GPU on nodes with one each, with the resource and without."""
    found = {}
    for kind, resources in (("with", {VERIFY: 1}), ("without", {})):
        settings = tree(lab) | {"model": {"path": lab.settings.model.path, "device": "cuda"}}
        settings["verifier"] = {"resources": resources, "certificate_dir": None}
        wanted = Settings.load(settings)
        identity = sampled_identity(wanted.model.path)
        handles = [get_or_create_verifier(n, wanted, identity) for n in verifier_names(wanted, identity, 2)]
        found[kind] = [s.node for s in await asyncio.gather(*(handle.status.remote() for handle in handles))]
        for handle in handles:
            ray.kill(handle, no_restart=True)
    return found


async def drained(nodes: Nodes, lab: Lab, workers: list[Node], looks: bool) -> dict[str, Any]:
    """SIGTERM for the node with the only verifier, under streams. looks: whether the supervisor looks for
    drains."""
    name = "drained" if looks else "control"
    watch = {} if looks else {"drain_check_s": 0.0}
    settings = tree(lab, watch, fastpath_replicas=2, ingress_replicas=2)
    nodes.deploy([application(name, settings)])
    app = app_of(nodes, name, settings)
    await until(lambda: state_of(name) == "RUNNING", f"{name} runs")
    await app.until(lambda h: bool(h["deterministic"]), WAIT_S)
    ids, where = node_ids(), await verifier_nodes(app)
    leaving = next(w for w in workers if w.running and ids[w.name] in where.values())
    async with Traffic(app, lab) as traffic:
        await traffic.answered()
        leaving.terminate()
        took = await asyncio.to_thread(leaving.wait_ended, WAIT_S)
        await traffic.answered()
    workers.remove(leaving)
    there = set((await verifier_nodes(app)).values())
    await remove(app)
    return {
        "idle": "finished draining" in leaving.log(),
        "seconds": round(took, 1),
        "seen": traffic.seen(),
        "verifiers_on": len(there & set(node_ids().values())),
    }


async def remove(app: App) -> None:
    """Deletes the application, and its verifiers at once: the next ones need their places."""
    await asyncio.to_thread(serve.delete, app.name)
    numbers = existing_verifiers(app.settings, app.identity)
    names = [app.verifier_names(number + 1)[-1] for number in numbers]
    for name in [supervisor_name(app.settings, app.identity), *names]:
        with suppress(ValueError):
            ray.kill(get_actor(name), no_restart=True)


async def run(nodes: Nodes, lab: Lab) -> dict[str, Any]:
    """All parts, on one cluster that grows."""
    found: dict[str, Any] = {}
    workers = [nodes.start_worker(FAST, INGRESS, gpus=1)]
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    found["without_a_verifiers_node"] = await without_a_verifiers_node(nodes, lab, workers)
    workers += [nodes.start_worker(*RESOURCES, gpus=1, drain_s=DRAIN_S) for _ in range(2)]
    found["one_verifier_a_node"] = await one_verifier_a_node(lab)
    found["drained"] = await drained(nodes, lab, workers, looks=True)
    workers.append(nodes.start_worker(*RESOURCES, gpus=1, drain_s=DRAIN_S))
    found["control"] = await drained(nodes, lab, workers, looks=False)
    return found


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
