"""256 streams that two verifiers decode by themselves, one of which is killed: every stream ends with the
oracle's tokens. How long each one waits is measured by benchmarks/direct/killed.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llm42_serve.launch import Service
from llm42_serve.verifiers.names import get_actor
from tests.chaos.conftest import application, in_mode, with_server
from tests.chaos.support import deterministic, kill
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]
STREAMS, TOKENS = 256, 48


def tree_of_many(tree: dict[str, Any]) -> dict[str, Any]:
    """Room for all of them at once, in either verifier."""
    many = in_mode(tree, "direct")
    engine, verifier = tree["engine"] | {"max_batch": STREAMS}, tree["verifier"] | {"kv_tokens": 65536}
    many = many | {"engine": engine, "verifier": verifier}
    return with_server(many, fastpath_replicas=1, ingress_replicas=1)


async def test_one_of_two_verifiers_dies_under_256_streams(
    service: Service, lab: Lab, tree: dict[str, Any]
) -> None:
    async with application(service, "many", tree_of_many(tree)) as app:
        await app.until(lambda h: h["verifiers_ready"] == 2, 240.0)
        requests = [deterministic(i, TOKENS) for i in range(STREAMS)]
        begun = [asyncio.Event() for _ in requests]
        streams = [asyncio.create_task(app.stream(r, b)) for r, b in zip(requests, begun, strict=True)]
        async with asyncio.timeout(600):
            while sum(b.is_set() for b in begun) < STREAMS // 2:
                await asyncio.sleep(0.05)
        both = [await get_actor(name).stats.remote() for name in app.verifier_names()]
        assert all(s["following"] > 0 for s in both), "one of them had nothing to lose"
        kill((await app.verifier_pids())[:1])
        found = await asyncio.gather(*streams)
        for request, got in zip(requests, found, strict=True):
            assert (got.tokens, got.logprobs, got.finish) == (*lab.oracle(request).sent, "length"), got.error
