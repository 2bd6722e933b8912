"""Prometheus beside the session's service, a second application whose fast path is wrong in 10 % of its
candidates, and mixed traffic to both, sent once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.prometheus import Prometheus, tool
from llm42.config import Settings
from llm42.config.serve_file import APP_NAME
from llm42_serve.launch import Service

PLANTED = "planted"
CORRUPT_SHARE = 0.1
TOKENS = 64
REQUESTS = {APP_NAME: 6, PLANTED: 14}
CANARY = "The zebra Quibblewick hid the password 8141 in the lighthouse."
TRACE = "0af7651916cd43dd8448eb211c80319c"
COUNTS = ("rollbacks", "rolled_back_tokens", "verified_tokens", "candidate_tokens", "windows")


def require_prometheus() -> None:
    """Skips, with a line that says why, where Prometheus cannot be had."""
    if tool("prometheus") is None or tool("promtool") is None:
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")


@pytest.fixture(scope="session")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes the service."""
    require_prometheus()
    target = service.metrics_url.removeprefix("http://").removesuffix("/metrics")
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [target]) as running:
        yield running


@pytest.fixture(scope="session")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the planted application writes its spans."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def planted(
    service: Service, prometheus: Prometheus, cluster_settings: Settings, trace_dir: Path
) -> Iterator[str]:
    """The second application, on the same verifiers; with traces, and with prompts in its JSON log."""
    from ray import serve

    from llm42_serve.app import build

    tree: Any = cluster_settings.model_dump(mode="json")
    tree["engine"]["corrupt_share"] = CORRUPT_SHARE
    tree["server"]["fastpath_replicas"] = 1
    tree["telemetry"] |= {
        "log_format": "json",
        "log_prompts": True,
        "traces": "file",
        "trace_dir": str(trace_dir),
    }
    target = serve.RunTarget(target=build(tree), name=PLANTED, route_prefix=f"/{PLANTED}")
    serve.run_many([target], wait_for_applications_running=True)
    yield f"{service.url}/{PLANTED}"
    serve.delete(PLANTED)


@dataclass
class Traffic:
    """What the replies of the deterministic requests said, summed by application."""

    before: dict[str, dict[str, float]]
    began: float
    replies: dict[str, dict[str, int]] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)


async def _deterministic(
    http: httpx.AsyncClient, url: str, model: str, index: int, trace: str = TRACE
) -> Any:
    body = {
        "model": model,
        "prompt": f"{CANARY} Number {index}:",
        "max_tokens": TOKENS,
        "deterministic": True,
        "ignore_eos": True,
        "temperature": 0.7,
        "seed": index,
    }
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    reply = await http.post(f"{url}/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def _first(urls: dict[str, str], model: str) -> None:
    """One request of each kind to each application."""
    async with httpx.AsyncClient(timeout=300) as http:
        for url in urls.values():
            await _deterministic(http, url, model, 999, TRACE[::-1])
            for stream in (False, True):  # a whole reply has no gaps
                plain = {"model": model, "prompt": "Once", "max_tokens": 24, "stream": stream}
                (await http.post(f"{url}/v1/completions", json=plain)).raise_for_status()


async def _mixed(urls: dict[str, str], model: str) -> dict[str, list[Any]]:
    """Deterministic requests to both applications beside best-effort ones and wrong ones."""
    plain = {"model": model, "prompt": "Once", "max_tokens": 24, "temperature": 1.0}
    async with httpx.AsyncClient(timeout=300) as http:
        asked = {
            name: [_deterministic(http, url, model, i) for i in range(REQUESTS[name])]
            for name, url in urls.items()
        }
        others = [
            http.post(f"{url}/v1/completions", json=plain | {"stream": stream})
            for url in urls.values()
            for stream in (False, False, True)
        ]
        wrong = [
            http.post(f"{url}/v1/completions", json=plain | change)
            for url in urls.values()
            for change in ({"model": "another"}, {"max_tokens": -1})
        ]
        done = await asyncio.gather(*(asyncio.gather(*a) for a in asked.values()), *others, *wrong)
    assert [r.status_code for r in done[-len(wrong) :]] == [404, 400] * 2
    assert all(r.status_code == 200 for r in done[len(asked) : -len(wrong)])
    return dict(zip(asked, done, strict=False))


def counted(prometheus: Prometheus) -> dict[str, dict[str, float]]:
    """The counters of the replicas by application, under the names that replies use."""
    names = {"verified_tokens": "committed_tokens"}
    found: dict[str, dict[str, float]] = {}
    for name in COUNTS:
        series = f"ray_llm42_{names.get(name, name)}_total"
        for sample in prometheus.query(f"sum by (application) ({series})"):
            found.setdefault(sample.labels["application"], {})[name] = sample.value
    return found


@pytest.fixture(scope="session")
def traffic(service: Service, prometheus: Prometheus, planted: str, cluster_settings: Settings) -> Traffic:
    """Sends it and waits for nothing: the tests do."""
    urls = {APP_NAME: service.url, PLANTED: planted}
    # Prometheus sees no increase in a series that it meets with its final value: each is there beforehand
    asyncio.run(_first(urls, cluster_settings.model.name))
    made = Traffic(settled(prometheus), time.monotonic())
    for name, replies in asyncio.run(_mixed(urls, cluster_settings.model.name)).items():
        made.replies[name] = {c: sum(r["llm42"][c] for r in replies) for c in COUNTS}
        made.ids[name] = [r["id"] for r in replies]
    return made


def settled(prometheus: Prometheus, quiet_s: float = 15.0) -> dict[str, dict[str, float]]:
    """The counters once they have not changed for longer than they take to arrive."""
    before: dict[str, dict[str, float]] = {}
    since = end = time.monotonic()
    while time.monotonic() - since < quiet_s or PLANTED not in before:
        assert time.monotonic() - end < 180, f"the counters do not come to rest: {before}"
        if (now := counted(prometheus)) != before:
            before, since = now, time.monotonic()
        time.sleep(0.5)
    return before
