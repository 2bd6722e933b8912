"""Seeds as clients write them: over a scripted backend."""

from __future__ import annotations

import hashlib

from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import client, completion


async def test_a_seed_may_be_signed_or_unsigned(tokenizer: Tokenizer) -> None:
    """-1 and 2**64 - 1 are one seed, for all choices; the echo is what was sent."""
    async with client(tokenizer) as (http, backend):
        for seed in (-1, 2**64 - 1):
            body = completion(seed=seed, n=3, deterministic=True)
            assert (await http.post("/v1/completions", json=body)).json()["llm42"]["seed"] == seed
        signed, unsigned = backend.requests[:3], backend.requests[3:]
        assert [r.sampling for r in signed] == [r.sampling for r in unsigned]
        # what earlier releases derived of a negative seed stays
        derived = hashlib.sha256(b"llm42:-1:1").digest()[:8]
        assert signed[1].sampling.seed == int.from_bytes(derived, "little")


async def test_a_receipts_seed_gives_its_choice_again(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, backend):
        body = completion(seed=11, n=16, deterministic=True, receipt=True, temperature=0.7)
        receipts = (await http.post("/v1/completions", json=body)).json()["llm42"]["receipts"]
        first = list(backend.requests)
        assert any(r.sampling.seed >= 2**63 for r in first), "the test needs such a seed"
        for request, receipt in zip(first, receipts, strict=True):
            again = body | {"seed": int(receipt["sampling"]["seed"]), "n": 1}
            reply = await http.post("/v1/completions", json=again)
            assert reply.status_code == 200, reply.text
            assert backend.requests[-1].sampling == request.sampling
