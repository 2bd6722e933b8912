"""Two requests with one id at a time: both end with an error that says so, nothing is left behind, and others
are not concerned."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from llm42.engine.base import SAME_ID
from llm42.session.outputs import EngineFailed
from tests.support import (
    PATIENCE_S,
    Answer,
    Lab,
    check_blocks,
    collect,
    differences,
    pinned_ways,
    request_of,
    sweep,
    wait_until,
)


@pinned_ways
@pytest.mark.parametrize("deterministic", sweep([True, False], quick=[True]))
def test_not_both_are_answered_and_nothing_is_held(lab: Lab, deterministic: bool) -> None:
    engine, verifier = lab.engine(), lab.verifier().start()
    generator = lab.generator(engine, verifier)
    same = [
        request_of("same", seed, 40, 600, deterministic=deterministic, stop_token_ids=()) for seed in (1, 2)
    ]
    other = request_of("other", 3, 40, 24)

    async def both() -> list[Answer | BaseException]:
        asked = [collect(generator, r) for r in (*same, other)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)

    for _ in range(2):  # the id is free again
        *failed, right = asyncio.run(both())
        if lab.mode != "verify":  # the first one is known here, and goes on
            first = failed.pop(0)
            assert isinstance(first, Answer) and len(first.tokens) == 600
            assert not deterministic or differences(first, lab.oracle(same[0])) == []
        assert all(isinstance(f, EngineFailed) and SAME_ID in str(f) for f in failed), failed
        assert isinstance(right, Answer)
        assert differences(right, lab.oracle(other)) == []
        assert wait_until(lambda: engine.load().running == engine.load().waiting == 0)
        assert wait_until(lambda: engine.load().kv_used == 0)
    alone = replace(other, request_id="same")
    assert differences(asyncio.run(collect(generator, alone)), lab.oracle(other)) == []
    engine.close() if lab.vllm is None else None
    check_blocks(engine)


def test_in_the_verifier_an_id_is_only_a_place_in_the_cache(lab: Lab) -> None:
    """Two requests' windows under one id: each gets the answer to its own tokens."""
    verifier = lab.verifier().start()
    engines = [lab.engine(), lab.engine()]
    requests = [request_of("same", seed, 40, 40) for seed in (4, 5)]

    async def both() -> list[Answer]:
        generators = [lab.generator(e, verifier) for e in engines]
        return list(await asyncio.gather(*map(collect, generators, requests)))

    for request, got in zip(requests, asyncio.run(both()), strict=True):
        assert differences(got, lab.oracle(request)) == []
