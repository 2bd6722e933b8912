"""What clients see while something is done to a Ray cluster of several nodes.

    python -m tests.cluster.story [PART ...]

Prints a table. All nodes are on this machine, with the tiny model. The part `head_restarted` needs a Redis
server: the program that LLM42_REDIS_SERVER names, or redis-server on PATH.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm42_serve.launch import prepare_environment

prepare_environment()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.util import list_named_actors  # noqa: E402

from llm42_serve.verifiers.names import existing_verifiers  # noqa: E402
from tests.chaos.support import App  # noqa: E402
from tests.cluster.nodes import RESOURCES, Node, Nodes, application  # noqa: E402
from tests.cluster.parts import WAIT_S, app_of, node_ids, state_of, tree, until, verifier_nodes  # noqa: E402
from tests.cluster.traffic import Traffic  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.support import Lab  # noqa: E402

NAME = "story"
ROOT = Path(__file__).parents[2]


class Story:
    """A cluster with one application on it."""

    def __init__(self, nodes: Nodes, lab: Lab) -> None:
        self.nodes, self.lab, self.notes = nodes, lab, list[str]()
        self.settings: dict[str, Any] = {}
        self.workers: list[Node] = []
        self.app: App | None = None
        self.mode = "verify"
        """session.mode"""

    async def begin(self, workers: int, proxies: str = "HeadOnly", **server: Any) -> App:
        """So many nodes, one of each role on each, and the application; returns once it is deterministic."""
        self.workers += [self.nodes.start_worker(*RESOURCES, gpus=1) for _ in range(workers)]
        self.connect()
        self.settings = tree(self.lab, **server)
        self.settings["session"]["mode"] = self.mode
        self.nodes.deploy([application(NAME, self.settings)], proxies)
        self.app = app_of(self.nodes, NAME, self.settings)
        await until(lambda: state_of(NAME) == "RUNNING", "it runs")
        count = self.settings["server"].get("verifiers", 1)
        await self.app.until(lambda h: h["deterministic"] and h["verifiers_ready"] == count, WAIT_S)
        return self.app

    def connect(self) -> None:
        """As a driver, which sees where the actors are."""
        ray.shutdown()
        ray.init(address=self.nodes.address, log_to_driver=False, logging_level="ERROR")

    async def verifiers_node(self) -> Node:
        """A node with a verifier."""
        assert self.app is not None
        where, ids = await verifier_nodes(self.app), node_ids()
        return next(w for w in self.workers if w.running and ids[w.name] in where.values())


async def worker_lost(story: Story) -> dict[str, Any]:
    """a worker lost (SIGKILL) with its verifier, its replica and its ingress; another added after it"""
    app = await story.begin(2, fastpath_replicas=2, ingress_replicas=2, verifiers=2)
    lost = await story.verifiers_node()
    async with Traffic(app, story.lab) as traffic:
        await traffic.answered()
        began = time.monotonic()
        lost.kill()
        story.workers.append(await asyncio.to_thread(story.nodes.start_worker, *RESOURCES))
        await app.until(lambda h: h["deterministic"] and h["verifiers_ready"] == 2, WAIT_S)
        story.notes.append(f"all roles are there again after {time.monotonic() - began:.0f} s")
        await traffic.answered()
    return traffic.seen()


async def worker_drained(story: Story) -> dict[str, Any]:
    """a worker drained (SIGTERM for `ray start --block`) with the only verifier, room elsewhere"""
    return await _drained(story)


async def worker_drained_direct(story: Story) -> dict[str, Any]:
    """the same with streams of 600 tokens that the verifier decodes by itself"""
    story.mode = "direct"
    return await _drained(story, tokens=600)


async def _drained(story: Story, **streams: int) -> dict[str, Any]:
    app = await story.begin(3, fastpath_replicas=2, ingress_replicas=2)
    leaving = await story.verifiers_node()
    async with Traffic(app, story.lab, **streams) as traffic:
        await traffic.answered()
        leaving.terminate()
        took = await asyncio.to_thread(leaving.wait_ended, 400.0)
        story.notes.append(f"the node was idle, and ended, after {took:.0f} of 300 s")
        await traffic.answered()
    return traffic.seen()


async def settings_changed(story: Story) -> dict[str, Any]:
    """`serve deploy` with other settings of server (max_queued): replica by replica"""
    return await _updated(story, {"max_queued": 99}, {})


async def release_changed(story: Story) -> dict[str, Any]:
    """`serve deploy` of another release: other code"""
    release = story.nodes.directory / "release"
    for folder in ("llm42", "kernels/llm42_kernels", "deployments/llm42_serve"):
        away = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, release / folder, ignore=away)
    with (release / "llm42" / "errors.py").open("a") as file:
        file.write("NEXT_RELEASE = True\n")
    paths = os.pathsep.join(str(release / folder) for folder in ("", "kernels", "deployments"))
    environment = {"PYTHONPATH": f"{paths}{os.pathsep}{ROOT}"}
    return await _updated(story, {}, {"runtime_env": {"env_vars": environment}})


async def _updated(story: Story, server: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    app = await story.begin(4, fastpath_replicas=2, ingress_replicas=2)
    fingerprint, verifiers = (await app.health())["fingerprint"], _verifiers()
    changed = story.settings | {"server": story.settings["server"] | server}
    async with Traffic(app, story.lab) as traffic:
        await traffic.answered()
        began, before = time.monotonic(), _replicas()
        deployed = application(NAME, changed) | options
        await asyncio.to_thread(story.nodes.deploy, [deployed])
        await until(lambda: state_of(NAME) == "RUNNING" and not _replicas() & before, "all are replaced")
        story.notes.append(f"replaced after {time.monotonic() - began:.0f} s")
        await app.until(lambda h: bool(h["deterministic"]), WAIT_S)
        await traffic.answered()
    same = (await app.health())["fingerprint"] == fingerprint
    names = "other verifiers" if _verifiers() - verifiers else "the same verifiers"
    story.notes.append(f"{names}, {'the same fingerprint' if same else 'another fingerprint'}")
    return traffic.seen()


def _verifiers() -> set[str]:
    """Names of all verifiers in the cluster: those of another release have other ones."""
    found = {actor["name"] for actor in list_named_actors(all_namespaces=True)}
    return {name for name in found if name.startswith("verifier-")}


def _replicas() -> set[str]:
    """Ids of the replicas and ingresses that there are."""
    from ray.serve.context import _get_global_client

    found = _get_global_client().get_serve_details()["applications"][NAME]["deployments"].values()
    return {replica["replica_id"] for deployment in found for replica in deployment["replicas"]}


async def scaled_by_load(story: Story) -> dict[str, Any]:
    """load comes and goes: one replica to three, and back to one"""
    app = await story.begin(
        3,
        max_fastpath_replicas=3,
        target_ongoing_requests=2,
        upscale_delay_s=2,
        downscale_delay_s=10,
    )

    def count() -> int:
        return sum(_running("FastPath"))

    def _running(name: str) -> list[int]:
        states = serve.status().applications[NAME].deployments[name].replica_states
        return [number for state, number in states.items() if state == "RUNNING"]

    async with Traffic(app, story.lab, clients=8, others=4) as traffic:
        began = time.monotonic()
        await until(lambda: count() == 3, "three replicas")
        story.notes.append(f"three replicas after {time.monotonic() - began:.0f} s of load")
        await traffic.answered()
    began = time.monotonic()
    async with Traffic(app, story.lab, clients=1, others=0) as quiet:
        await until(lambda: count() == 1, "one replica")
        story.notes.append(f"one again after {time.monotonic() - began:.0f} s of one client")
        await quiet.answered()
    traffic.found += quiet.found
    return traffic.seen()


async def two_applications(story: Story) -> dict[str, Any]:
    """two applications; one is deleted, with its replicas and verifiers, under the streams of the other"""
    app = await story.begin(4, fastpath_replicas=1)
    other = tree(story.lab) | {"session": {"mode": "direct"}}
    other["verifier"]["kv_tokens"] = 4096  # other settings, hence verifiers of its own
    both = [application(NAME, story.settings), application("other", other)]
    async with Traffic(app, story.lab) as traffic:
        await asyncio.to_thread(story.nodes.deploy, both)
        second = app_of(story.nodes, "other", other)
        await until(lambda: state_of("other") == "RUNNING", "the other runs")
        await second.until(lambda h: bool(h["deterministic"]), WAIT_S)
        async with Traffic(second, story.lab) as beside:
            await beside.answered()
            await traffic.answered()
        await asyncio.to_thread(story.nodes.deploy, both[:1])
        await until(lambda: state_of("other") == "MISSING", "the other is gone")
        began, its = time.monotonic(), (second.settings, second.identity)
        await until(lambda: not existing_verifiers(*its), "its verifier ends")
        story.notes.append(f"its verifier ended {time.monotonic() - began:.0f} s after it")
        await traffic.answered()
    seen = {f"{name}, of the other": count for name, count in beside.seen().items()}
    return traffic.seen() | seen


async def head_restarted(story: Story) -> dict[str, Any]:
    """the head killed (SIGKILL) and started again 5 s later, with Redis as its store; proxies on all nodes"""
    app = await story.begin(2, "EveryNode", fastpath_replicas=2, ingress_replicas=2, verifiers=2)
    before, head = _replicas(), story.nodes.head
    assert head is not None
    ray.shutdown()
    async with Traffic(app, story.lab) as traffic:
        await traffic.answered()
        head.kill()
        await asyncio.sleep(5.0)
        began = time.monotonic()
        await asyncio.to_thread(story.nodes.start_head)
        story.notes.append(f"the head is there again after {time.monotonic() - began:.0f} s more")
        await asyncio.to_thread(story.connect)
        await traffic.answered(3)
        await until(lambda: state_of(NAME) == "RUNNING", "it runs")
        await traffic.answered()
    kept = len(before & _replicas())
    story.notes.append(f"{kept} of {len(before)} replicas and ingresses are the same")
    return traffic.seen()


PARTS: dict[str, Callable[[Story], Awaitable[dict[str, Any]]]] = {
    f.__name__: f
    for f in (
        worker_lost,
        worker_drained,
        worker_drained_direct,
        settings_changed,
        release_changed,
        scaled_by_load,
        two_applications,
        head_restarted,
    )
}


@contextmanager
def redis() -> Iterator[str | None]:
    """The address of a Redis server of its own; None where there is no such program."""
    program = os.environ.get("LLM42_REDIS_SERVER") or shutil.which("redis-server")
    if program is None:
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", directory]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def told(name: str, lab: Lab, env: dict[str, str]) -> None:
    """Runs one part on a cluster of its own, and prints its rows. env: of the nodes."""
    if name == "head_restarted" and not env:
        print(f"| {head_restarted.__doc__} | | not tried: there is no redis-server |")
        return
    with Nodes(env) as nodes:
        story = Story(nodes, lab)
        try:
            seen = asyncio.run(PARTS[name](story))  # type: ignore[arg-type]
        finally:
            ray.shutdown()
    notes = "; ".join(story.notes)
    for number, (kind, count) in enumerate(seen.items()):
        what = f"{PARTS[name].__doc__}: {notes}" if number == 0 else ""
        words = ", ".join(f"{n} {end}" for end, n in count.items())
        print(f"| {what} | {kind} | {words} |", flush=True)


def main() -> None:
    """All parts, or those that are named. Each has a process of its own: Serve's client is one for ever."""
    with tempfile.TemporaryDirectory() as directory:
        if sys.argv[1:2] == ["--only"]:
            lab = Lab.make(Path(directory))
            with redis() as store:
                told(sys.argv[2], lab, {"RAY_REDIS_ADDRESS": store} if store else {})
            lab.close()
            return
        print("| what happens | streams | what their clients saw |\n|---|---|---|", flush=True)
        for name in sys.argv[1:] or PARTS:
            command = [sys.executable, "-m", "tests.cluster.story", "--only", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
            print("\n".join(rows) or f"| {PARTS[name].__doc__} | | {done.stderr[-2000:]} |", flush=True)


if __name__ == "__main__":
    main()
