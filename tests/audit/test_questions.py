"""Which question an answer belongs to: choices, seeds that a request left out, and questions that no server
can have been asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from llm42.api.requests import CompletionBody
from llm42.audit.question import RANGES, require_ranges
from llm42.config import Settings
from llm42.errors import RequestRejected
from llm42.protocol import SamplingParams
from tests.audit.support import ASK, FINGERPRINT, audit, client, post
from tests.support import Lab


def with_default_seed(settings: Settings, seed: int) -> Settings:
    server = settings.server.model_copy(update={"default_seed": seed})
    return settings.model_copy(update={"server": server})


SEVERAL: list[dict[str, Any]] = [
    {"n": 3, "temperature": 1.3, "seed": 5},
    {"n": 2, "temperature": 1.3},
    {"prompt": [[5, 6, 7], [8, 9]]},
    {"prompt": ["hello", "there"], "n": 2, "seed": -3},
]


@pytest.mark.parametrize("more", SEVERAL)
@pytest.mark.parametrize("output", ["tokens", "hash"])
async def test_a_receipt_of_any_choice_is_confirmed_beside_its_request(
    lab: Lab, settings: Settings, more: dict[str, Any], output: str
) -> None:
    """The request has several answers, and the receipt says which one it is for."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"output": output}} | more
        reply = await post(http, "/v1/completions", body)
        receipts = reply["llm42"]["receipts"]
        assert len({r["output_sha256"] for r in receipts}) == len(receipts), "the answers differ"
        texts = [c["text"] for c in reply["choices"]]
        pairs = list(zip(receipts, texts, strict=True))
        right = [{"receipt": r, "request": body, "text": t} for r, t in pairs]
        hashed = [r | {"id": "renamed"} for r in receipts]
        for receipt in hashed:
            receipt.pop("hmac"), receipt.pop("key")
        renamed = [{"receipt": r, "request": body} for r in hashed]
        swapped = [{"receipt": receipts[1], "request": body, "text": texts[0]}]
        found = await audit(http, [*right, *renamed, *swapped])
    assert [r["verdict"] for r in found] == ["confirmed"] * 2 * len(receipts) + ["differs"], found


async def test_a_receipt_beside_another_request_differs(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "n": 2, "seed": 5}
        receipts = (await post(http, "/v1/completions", body))["llm42"]["receipts"]
        others = [body | {"seed": 6}, body | {"prompt": "hello"}, body | {"n": 1}]
        found = await audit(http, [{"receipt": receipts[1], "request": other} for other in others])
    assert [r["verdict"] for r in found] == ["differs"] * 3


async def test_a_seed_that_a_request_left_out_is_the_receipts(lab: Lab, settings: Settings) -> None:
    """The server's default was another one when the answer was given."""
    async with client(lab, with_default_seed(settings, 3)) as (http, _):
        one, two = ASK | {"receipt": True}, ASK | {"receipt": {"output": "tokens"}, "n": 2}
        first = await post(http, "/v1/completions", one)
        second = await post(http, "/v1/completions", two)
    receipts = second["llm42"]["receipts"]
    records: list[dict[str, Any]] = [
        {"receipt": first["llm42"]["receipt"], "request": one},
        {"request": one, "response": first},
        {"receipt": receipts[0], "request": two},
        {"receipt": receipts[1], "request": two},
        {"request": two, "response": second},
        {"receipt": receipts[1], "request": two | {"seed": 4}},
    ]
    bare = {**second, "llm42": {"receipts": receipts}}
    records.append({"request": two, "response": bare})
    async with client(lab, with_default_seed(settings, 4)) as (http, _):
        found = await audit(http, records)
    assert [r["verdict"] for r in found] == [*["confirmed"] * 6, "differs", *["confirmed"] * 2], found


def flat(**more: Any) -> dict[str, Any]:
    made = {"fingerprint": FINGERPRINT, "prompt": [5, 6], "output": [7], "sampling": {"seed": "1"}}
    return made | more


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "prompt": flat(prompt=[5, 512]),
    "output": flat(output=[7, 600]),
    "logit_bias": flat(sampling={"logit_bias": [[512, 1.0]]}),
    "logit_bias: token id -1": flat(sampling={"logit_bias": [[-1, 1.0]]}),
    "logit_bias: 101.0": flat(sampling={"logit_bias": [[4, 101.0]]}),
    "logit_bias names": flat(sampling={"logit_bias": [[4, 1.0], [4, 2.0]]}),
    "min_tokens_banned": flat(sampling={"min_tokens": 1, "min_tokens_banned": [2**31]}),
    "min_tokens_banned: token id -5": flat(sampling={"min_tokens": 1, "min_tokens_banned": [-5]}),
    "temperature": flat(sampling={"temperature": -1.0}),
    "top_p": flat(sampling={"top_p": 0.0}),
    "top_k": flat(sampling={"top_k": -1}),
    "min_p": flat(sampling={"min_p": 1.5}),
    "repetition_penalty": flat(sampling={"repetition_penalty": 0.0}),
    "presence_penalty": flat(sampling={"presence_penalty": 2.5}),
    "frequency_penalty": flat(sampling={"frequency_penalty": -2.5}),
    "min_tokens:": flat(sampling={"min_tokens": -1}),
}


async def test_a_question_that_no_server_can_have_been_asked_is_never_computed(
    lab: Lab, settings: Settings
) -> None:
    """As a plain record, which would go to the verifier, and as a receipt of hashes, which would go to the
    engine."""
    async with client(lab, settings) as (http, backend):
        receipt = (await post(http, "/v1/completions", ASK | {"receipt": True}))["llm42"]["receipt"]
        for name in ("key", "hmac"):
            receipt.pop(name)
        bare = [
            receipt | {k: v for k, v in record.items() if k in ("prompt", "sampling")}
            for record in IMPOSSIBLE.values()
            if record["output"] == [7]
        ]
        before = backend.verifier.stats().windows
        found = await audit(http, [*IMPOSSIBLE.values(), *bare])
        assert backend.verifier.stats().windows == before
    assert {r["verdict"] for r in found} == {"failed"}
    for said, result in zip(IMPOSSIBLE, found, strict=False):
        assert said in result["reason"], result
    assert "outside the vocabulary (0 to 511)" in found[0]["reason"]


GRID = (-1e9, -2.01, -2, -1, 0, 1e-300, 0.005, 0.01, 0.5, 1, 1.5, 2, 2.01, 99.5, 100, 100.5, 2**31, 2**40)


@pytest.mark.parametrize("name", RANGES)
def test_the_ranges_of_audits_are_those_of_requests(name: str) -> None:
    """Neither narrower, which would refuse a right answer, nor wider."""
    whole = name in ("top_k", "min_tokens")
    for value in GRID:
        if (whole and value != int(value)) or (name, value) == ("top_k", -1):
            continue  # -1 is a request's other way to write 0
        number = int(value) if whole else float(value)
        assert asked(name, number) == audited(name, number), (name, number)


def asked(name: str, value: float) -> bool:
    try:
        CompletionBody.model_validate({"model": "tiny", "prompt": "x", name: value})
    except ValidationError:
        return False
    return True


def audited(name: str, value: float) -> bool:
    try:
        require_ranges(SamplingParams(**{name: value}))  # type: ignore[arg-type]
    except RequestRejected:
        return False
    return True


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(RequestRejected, match="temperature"):
        require_ranges(SamplingParams(temperature=math.nan))
