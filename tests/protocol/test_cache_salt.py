"""Cached prompts are shared under one salt only, in the fast path and in the verifier, and no salt changes a
bit of an output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llm42.cache import BlockPool
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.machine import Session
from llm42.session.verify_call import VerifierClient
from tests.support import ENGINES, Lab, Wrapped, check_pool, collect, differences, request_of, verified


async def told(lab: Lab, request: Request, verifier: object, engine: object) -> tuple[int, int]:
    """(what the engine had cached, what the verifier had cached) of a request's prompt."""
    generator = lab.generator(engine, verifier)  # type: ignore[arg-type]
    found: list[Delta] = [d async for d in generator.generate(request)]
    cached = next(d.cached_tokens for d in found if d.cached_tokens is not None)
    stats = found[-1].stats
    return cached, stats.cached_prompt_tokens if stats is not None else 0


@pytest.mark.parametrize("lab", [*ENGINES, "direct"], indirect=True)  # who is asked first has it cached
def test_what_is_cached_under_another_salt_is_not_found(lab: Lab) -> None:
    """The same prompt again: found under its own salt only, whether it has one or not."""
    engine, verifier = lab.engine(), lab.verifier().start()
    salts = ("", "a", "b", "ab")
    request = request_of("r", 21, 80, 8)

    async def ask(name: str, salt: str, deterministic: bool) -> tuple[int, int]:
        asked = replace(request, request_id=name, cache_salt=salt, deterministic=deterministic)
        return await told(lab, asked, verifier, engine)

    for round_ in ("first", "second"):
        for salt in salts:
            engine_had, verifier_had = asyncio.run(ask(f"{round_}{salt}", salt, True))
            again, _ = asyncio.run(ask(f"{round_}{salt}!", salt, False))
            if lab.mode == "direct":  # no engine has seen it
                assert engine_had == verifier_had
            else:
                assert again >= 64, "a request of the same salt finds it"
            if round_ == "first":
                assert (engine_had, verifier_had) == (0, 0)
            else:
                assert min(engine_had, verifier_had) >= 64


def changed_by_salts(lab: Lab, verifier: VerifierClient) -> list[str]:
    """How outputs and log-probabilities differ from the oracle's over caches with blocks of other salts."""
    generator = lab.generator(lab.engine(corrupt_share=0.2), verifier)
    requests = [
        request_of(f"r{i}", i % 2, 60, 24, cache_salt=salt, prompt_logprobs=1)
        for i, salt in enumerate(("", "a", "a", "b", "", "b"))
    ]

    async def together() -> list[object]:
        return list(await asyncio.gather(*(collect(generator, r) for r in requests)))

    found: list[str] = []
    for _ in range(2):
        for request, got in zip(requests, asyncio.run(together()), strict=True):
            want = lab.oracle(replace(request, cache_salt="", prompt_logprobs=None))
            found += differences(got, want)  # type: ignore[arg-type]
    return found


def test_the_salt_changes_nothing_else(lab: Lab) -> None:
    assert changed_by_salts(lab, lab.verifier(1024).start()) == []


class SaltInTheSeed(Wrapped):
    """Draws with a seed that the salt has a part in."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        salted = [
            replace(w, sampling=replace(w.sampling, seed=w.sampling.seed + len(w.cache_salt)))
            for w in windows
        ]
        return await super().verify(salted)


def test_control_a_salt_that_changes_the_noise_is_noticed(lab: Lab) -> None:
    assert changed_by_salts(lab, SaltInTheSeed(lab.verifier(1024).start()))


def test_every_window_carries_the_salt(lab: Lab) -> None:
    session = Session(request_of("r", 1, cache_salt="s"), lab.settings.session, 0.0)
    session.candidates(0, 0, (5, 6, 7))
    window = session.due(10.0)
    assert window is not None
    assert window.cache_salt == "s"


def test_a_request_under_anothers_id_gets_nothing_of_its_sequence(lab: Lab) -> None:
    """Between windows KV is kept by request id: not for one that comes with another salt."""
    verifier = lab.verifier().start()
    request = request_of("same", 22, 80, 8)
    session = Session(request, lab.settings.session, 0.0)
    session.candidates(0, 0, (5,))
    window = session.due(10.0)
    assert window is not None
    assert verified(verifier, window)[0].timings.cached_rows == 0  # type: ignore[union-attr]
    other = replace(window, cache_salt="other")
    assert verified(verifier, other)[0].timings.cached_rows == 0  # type: ignore[union-attr]
    assert verified(verifier, other)[0].timings.cached_rows >= 64, "control: its own"  # type: ignore[union-attr]


@pytest.mark.parametrize("salts", [("", "a"), ("a", "b"), ("a", "aa")])
def test_keys_of_blocks(salts: tuple[str, str]) -> None:
    pool = BlockPool(4, 2, root=b"root")
    for salt in salts:
        assert pool.match([1, 2, 3], salt)[0] == []
        block, keys = pool.acquire(1), list[bytes]()
        pool.publish_prefix([1, 2], block, keys, 2, salt)
        pool.release(block)
        found, _ = pool.match([1, 2, 3], salt)
        assert found == block
        pool.release(found)
    check_pool(pool)
