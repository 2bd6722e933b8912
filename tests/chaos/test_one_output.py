"""One request, one output: over replicas, cold starts, numbers of verifiers, caches; and none is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import ray
from torch import Tensor

from llm42.checkpoint.load import sampled_identity
from llm42.config import Settings
from llm42.verifier.scheduler import Verifier
from llm42_serve.launch import Service
from llm42_serve.verifiers.actor import VerifierActor
from llm42_serve.verifiers.names import NAMESPACE, get_actor, supervisor_name, verifier_names
from tests.chaos.conftest import application, in_mode, with_server
from tests.chaos.support import App, Outcome, best_effort, deterministic
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]


LOAD_S = 8.0
"""How long the service is overloaded."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(service: Service, tree: dict[str, Any]) -> AsyncIterator[App]:
    """One replica that holds little: 4 requests run, 6 wait."""
    changed = with_server(tree, fastpath_replicas=1, ingress_replicas=1, verifiers=1, max_queued=6)
    changed = changed | {"engine": tree["engine"] | {"max_batch": 4}}
    async with application(service, "small", changed) as app:
        yield app


async def test_cold_starts_numbers_of_verifiers_and_caches(
    service: Service, lab: Lab, tree: dict[str, Any], tmp_path: Path
) -> None:
    """Three cold starts, with 1, 3 and 1 verifiers, the last one without a kept certificate; in each, the
    same six requests cold, warm, and together on two replicas."""
    requests = [deterministic(i) for i in range(6)]
    want = [lab.oracle(r).sent for r in requests]
    fingerprints = set()
    for start, verifiers in enumerate((1, 3, 1)):
        changed = with_server(tree, verifiers=verifiers, ingress_replicas=1)
        if start == 2:
            changed = changed | {"verifier": tree["verifier"] | {"certificate_dir": str(tmp_path)}}
        async with application(service, f"cold{start}", changed) as app:
            fingerprints.add((await app.health())["fingerprint"])
            cold = [await app.stream(r) for r in requests]
            warm = [await app.stream(r) for r in requests]
            together = await asyncio.gather(*(app.stream(r) for r in requests * 3))
            for got in (cold, warm, together[:6], together[6:12], together[12:]):
                assert [(o.tokens, o.logprobs) for o in got] == want
    assert len(fingerprints) == 1


def resident_mib(pid: int) -> float:
    """A process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024


class OffByOneUlp(VerifierActor):
    """A verifier whose norm gives another last bit from some moment after its start on."""

    def _build(self) -> Verifier:
        import torch

        verifier = super()._build()
        runner: Any = verifier._runner
        right = runner.ops.rms_norm

        def wrong(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            y, r = right(x, residual, weight, eps)
            y[..., 0] = torch.nextafter(y[..., 0], torch.tensor(float("inf"), dtype=y.dtype))
            return y, r

        runner.ops = replace(runner.ops, rms_norm=wrong)
        return verifier


@pytest.mark.parametrize(("verifiers", "mode"), [(2, "verify"), (3, "direct")])
async def test_a_verifier_off_by_one_ulp_is_found_and_removed(
    service: Service, lab: Lab, tree: dict[str, Any], verifiers: int, mode: str
) -> None:
    """Its fingerprint is the pool's, for it was right when it started: only the audit can tell."""
    audited = with_server(in_mode(tree, mode), verifiers=verifiers, fastpath_replicas=1, ingress_replicas=1)
    waiting = 250 + verifiers + len(mode)  # each case has verifiers of its own
    audited = audited | {"verifier": tree["verifier"] | {"audit_share": 1.0, "max_waiting": waiting}}
    # nobody asks for the planted one until there is a replica
    audited = audited | {"watch": {"lease_s": 600.0}}
    settings = Settings.load(audited)
    identity = sampled_identity(settings.model.path)
    name = verifier_names(settings, identity, verifiers)[0]
    wrong = ray.remote(OffByOneUlp).options(
        name=name, namespace=NAMESPACE, lifetime="detached", max_concurrency=100, num_cpus=0.1
    )
    handle: Any = wrong.remote(settings.model_dump(mode="json"), model_identity=identity)
    while (await handle.status.remote()).state == "starting":
        await asyncio.sleep(0.1)
    async with application(service, f"audit{verifiers}-{mode}", audited) as app:
        await app.until(lambda h: h["verifiers_ready"] == verifiers, 240)
        supervisor = get_actor(supervisor_name(settings, identity))
        assert (await handle.status.remote()).fingerprint == (await app.health())["fingerprint"]
        for _ in range(20):
            await asyncio.gather(*(app.stream(deterministic(i, 32)) for i in range(8)))
            if (await supervisor.membership.remote()).condemned:
                break
        else:
            pytest.fail("not found in 20 rounds")
        await app.until(lambda h: h["verifiers_ready"] == verifiers, 240)
        with pytest.raises(ray.exceptions.RayActorError):
            await handle.status.remote()
        requests = [deterministic(i, 32) for i in range(8)]
        got = await asyncio.gather(*(app.stream(r) for r in requests))
        assert [(o.tokens, o.logprobs) for o in got] == [lab.oracle(r).sent for r in requests]
        assert (await supervisor.membership.remote()).condemned == 1, "nobody else was condemned"


@pytest.mark.asyncio(loop_scope="module")
async def test_bursts_with_refusals_and_departures_leave_nothing(small: App) -> None:
    """Clients that leave while they wait, while they stream and before their answer: all counters come to
    zero, behind the router too."""

    async def leave(app: App, number: int) -> None:
        body = {
            "model": "tiny", "prompt": [1, 2, 3 + number], "max_tokens": 600, "stream": number % 2 == 0,
            "deterministic": number % 3 == 0, "ignore_eos": True,
        }  # fmt: skip
        async with httpx.AsyncClient(timeout=1.0 + number % 3) as http:
            try:
                async with http.stream("POST", f"{app.url}/v1/completions", json=body) as reply:
                    async for _ in reply.aiter_lines():
                        if number % 4 == 0:
                            return
            except httpx.HTTPError:
                return

    began = time.monotonic()
    await small.stream(best_effort(1, 600))
    whole = time.monotonic() - began  # here and now; those that leave would take several times as long
    for _ in range(2):
        await asyncio.gather(*(leave(small, i) for i in range(40)))
        took = await small.until(
            lambda h: h["running"] == h["waiting"] == h["queued"] == h["kv_used"] == 0, 60.0
        )
        assert took < max(2.0, whole)
    stats = await get_actor(small.verifier_names()[0]).stats.remote()
    assert stats["active"] == stats["waiting"] == 0, json.dumps(stats)


@pytest.mark.asyncio(loop_scope="module")
async def test_overload_is_refused_and_over_quickly(small: App, lab: Lab) -> None:
    """Ten times what can run and wait: 429 with Retry-After, bounded memory, admitted ones right."""
    outcomes: list[tuple[Any, Outcome]] = []
    stop = asyncio.Event()

    async def client(app: App, number: int) -> None:
        while not stop.is_set():
            request = deterministic(number, 32) if number % 2 else best_effort(number, 32)
            got = await app.stream(request)
            outcomes.append((request, got))
            if got.status == 429:
                await asyncio.sleep(1.0)  # what Retry-After says

    (replica,) = small.pids("ray::ServeReplica:{name}:FastPath")
    await small.stream(best_effort(1))
    before = resident_mib(replica)
    clients = [asyncio.create_task(client(small, i)) for i in range(120)]
    await asyncio.sleep(LOAD_S)
    grown = resident_mib(replica) - before
    stop.set()
    await asyncio.gather(*clients)
    began = time.monotonic()
    request = deterministic(3, 32)
    assert (await small.stream(request)).finish == "length"
    recovered = time.monotonic() - began
    refused = [o for _, o in outcomes if o.status != 200]
    admitted = [(r, o) for r, o in outcomes if o.status == 200]
    assert refused
    assert {o.status for o in refused} == {429}
    assert all(o.retry_after and int(o.retry_after) > 0 for o in refused)
    assert {r.deterministic for r, _ in admitted} == {True, False}, "one class starved"
    for request, got in admitted:
        assert (got.error, got.cut, got.finish) == ("", False, "length")
        if request.deterministic:
            assert (got.tokens, got.logprobs) == lab.oracle(request).sent
    assert grown < 200 * LOAD_S / 60
    assert recovered < 60.0


@pytest.mark.asyncio(loop_scope="module")
async def test_scaling_and_a_redeploy_lose_no_request(small: App, lab: Lab, tree: dict[str, Any]) -> None:
    """1 to 3 to 1 replicas, then other settings, while streams of both classes come and go."""
    ended: list[tuple[Any, Outcome]] = []
    stop = asyncio.Event()

    async def client(app: App, number: int) -> None:
        while not stop.is_set():
            make = deterministic if number % 2 else best_effort
            request = make(number, 64)
            ended.append((request, await app.stream(request)))
            await asyncio.sleep(0.2)  # else new processes wait for a core

    await small.deploy(Settings.load(with_server(tree, fastpath_replicas=1, verifiers=1)))
    clients = [asyncio.create_task(client(small, i)) for i in range(6)]
    await asyncio.sleep(2)
    for replicas in (3, 1):
        await small.deploy(Settings.load(with_server(tree, fastpath_replicas=replicas, verifiers=1)))
        await asyncio.sleep(3)
    other = with_server(tree, fastpath_replicas=1, verifiers=1) | {
        "engine": tree["engine"] | {"max_batch": 8}
    }
    await small.deploy(Settings.load(other))
    await asyncio.sleep(2)
    stop.set()
    await asyncio.gather(*clients)
    assert len(ended) > 30
    for request, got in ended:
        assert (got.status, got.error, got.cut, got.finish) == (200, "", False, "length"), got
        if request.deterministic:
            assert (got.tokens, got.logprobs) == lab.oracle(request).sent
