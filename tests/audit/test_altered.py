"""Replies that somebody has changed: whatever part of a record was altered, and however little was kept of
the answer, it is not confirmed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llm42.config import Settings
from tests.audit.support import (
    ASK,
    CHAT,
    Change,
    Exchange,
    audit,
    changed,
    choice,
    client,
    post,
)
from tests.support import Lab


def nudged(values: list[Any]) -> list[Any]:
    """The last one is its neighbour among the doubles."""
    return [*values[:-1], math.nextafter(values[-1], 0)]


def unsigned(record: Exchange, **more: Any) -> None:
    receipt = record["response"]["llm42"]["receipt"]
    for name in ("key", "hmac"):
        receipt.pop(name)
    receipt.update(more)


REPLY_CHANGES: dict[str, tuple[Change, str]] = {
    "text": (lambda r: choice(r).update(text=choice(r)["text"][:-1] + "?"), "text"),
    "text cut": (lambda r: choice(r).update(text=choice(r)["text"][:-1]), "text"),
    "logprob": (
        lambda r: choice(r)["logprobs"].update(
            token_logprobs=nudged(choice(r)["logprobs"]["token_logprobs"])
        ),
        "log-probabilities",
    ),
    "logprobs cut": (
        lambda r: choice(r)["logprobs"].update(token_logprobs=[-1.0]),
        "1 log-probabilities are stored",
    ),
    "finish": (lambda r: choice(r).update(finish_reason="stop"), "finish"),
    "fingerprint": (lambda r: r["response"].update(system_fingerprint="llm42-0"), "system_fingerprint"),
    "model": (lambda r: r["response"].update(model="large"), "model"),
    "seed": (lambda r: r["response"]["llm42"].update(seed=8), "seed"),
    "receipt's finish": (lambda r: unsigned(r, finish="stop"), "finish_reason"),
    "receipt's model": (lambda r: unsigned(r, model="large"), "model"),
    "request's seed": (lambda r: r["request"].update(seed=8), "seed"),
    "request's max_tokens": (lambda r: r["request"].update(max_tokens=13), "does not end"),
    "fewer max_tokens": (lambda r: r["request"].update(max_tokens=11), "the request allows 11"),
    "request's prompt": (lambda r: r["request"].update(prompt="hello here"), "prompt"),
    "request's stop": (lambda r: r["request"].update(stop=choice(r)["text"][:2]), "text"),
}


@pytest.mark.parametrize("name", REPLY_CHANGES)
async def test_a_reply_with_a_receipt_of_hashes_is_compared_in_every_part(
    lab: Lab, settings: Settings, name: str
) -> None:
    """`receipt: true` keeps no output ids: the answer is generated again."""
    change, said = REPLY_CHANGES[name]
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "logprobs": 0, "seed": 7}
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}
        good, odd = await audit(http, [kept, changed(kept, change)])
    assert (good["verdict"], good["signature"]) == ("confirmed", "valid")
    assert good["regenerated"]
    assert odd["verdict"] == "differs", odd
    assert said in odd["reason"]


ID_CHANGES: dict[str, tuple[Change, str]] = {
    "finish": (lambda r: choice(r).update(finish_reason="stop"), "finish reason"),
    "model": (lambda r: r["response"].update(model="large"), "model"),
    "fewer max_tokens": (lambda r: r["request"].update(max_tokens=11), "the request allows 11"),
    "seed": (lambda r: r["response"]["llm42"].update(seed=8), "seed"),
    "text": (lambda r: choice(r).update(text=choice(r)["text"] + " "), "text"),
}


@pytest.mark.parametrize("name", ID_CHANGES)
async def test_a_reply_with_token_ids_too(lab: Lab, settings: Settings, name: str) -> None:
    change, said = ID_CHANGES[name]
    async with client(lab, settings) as (http, _):
        body = ASK | {"return_token_ids": True, "seed": 7}
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}
        good, odd = await audit(http, [kept, changed(kept, change)])
    assert good["verdict"] == "confirmed"
    assert not good.get("regenerated")
    assert odd["verdict"] == "differs", odd
    assert said in odd["reason"]


async def test_a_text_alone_has_its_end_compared_too(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        kept = {"request": CHAT, "response": await post(http, "/v1/chat/completions", CHAT)}
        lies = changed(kept, lambda r: choice(r).update(finish_reason="stop"))
        good, odd = await audit(http, [kept, lies])
    assert (good["verdict"], odd["verdict"]) == ("confirmed", "differs")
    assert "'stop'; the output ends with 'length'" in odd["reason"]


async def test_what_stands_beside_a_receipt_of_hashes_is_compared(lab: Lab, settings: Settings) -> None:
    """A valid signature covers the receipt, not its neighbours."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "logprobs": 0}
        reply = await post(http, "/v1/completions", body)
        receipt, said = reply["llm42"]["receipt"], reply["choices"][0]
        values = said["logprobs"]["token_logprobs"]
        beside: list[dict[str, Any]] = [
            {"text": said["text"], "logprobs": values},
            {"text": said["text"][:3]},  # it ended by its length, so no stop string has cut it
            {"text": "LIES", "logprobs": [1.0, 2.0]},
            {"text": "LIES"},
            {"logprobs": nudged(values)},
            {"logprobs": [*values, -1.0]},
            {"fingerprint": "llm42-0"},
            {"sampling": receipt["sampling"] | {"top_k": 3}},
            {"prompt": [9, 9]},
            {"request": body | {"model": "large"}},
        ]
        found = await audit(http, [{"receipt": receipt, **more} for more in beside])
    assert [r["verdict"] for r in found] == ["confirmed"] + ["differs"] * 9
    assert {r["signature"] for r in found} == {"valid"}


async def test_a_stop_string_that_nobody_kept_may_have_cut_a_text(lab: Lab, settings: Settings) -> None:
    """Then a beginning of the tokens' text is all that can be asked for."""
    async with client(lab, settings) as (http, _):
        text = (await post(http, "/v1/completions", ASK))["choices"][0]["text"]
        reply = await post(http, "/v1/completions", ASK | {"receipt": True, "stop": [text[3:5]]})
        receipt, said = reply["llm42"]["receipt"], reply["choices"][0]["text"]
        found = await audit(http, [{"receipt": receipt, "text": t} for t in (said, text[4:])])
    assert receipt["finish"] == "stop"
    assert len(said) <= 3
    assert [r["verdict"] for r in found] == ["confirmed", "differs"]


async def test_ids_in_a_receipt_and_other_ids_beside_it(lab: Lab, settings: Settings) -> None:
    """No signature covers the ids in a receipt: the hash does, whichever of two lists is looked at."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"prompt": "tokens", "output": "tokens"}}
        receipt = (await post(http, "/v1/completions", body))["llm42"]["receipt"]
        lies = receipt | {"output": [5] * len(receipt["output"])}
        records = [
            {"receipt": receipt, "output": receipt["output"]},
            {"receipt": lies, "output": receipt["output"]},
            {"receipt": receipt | {"prompt": [5]}, "prompt": receipt["prompt"]},
            {"receipt": receipt, "output": [*receipt["output"][:-1], 5]},
        ]
        found = await audit(http, records)
    assert [r["verdict"] for r in found] == ["confirmed", *["differs"] * 3]
    assert found[3]["difference"]["index"] == len(receipt["output"]) - 1, "and the first that differs is told"


async def test_an_answer_longer_than_max_tokens_differs_though_it_ends_well(
    lab: Lab, settings: Settings
) -> None:
    """Its last token ends any output; the request would have ended it before."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"return_token_ids": True, "ignore_eos": True, "temperature": 0}
        ids = (await post(http, "/v1/completions", body))["choices"][0]["token_ids"]
        at = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
        stopping = body | {"stop_token_ids": [ids[at]]}
        reply = await post(http, "/v1/completions", stopping)
        assert reply["choices"][0]["token_ids"] == ids[: at + 1]
        assert reply["choices"][0]["finish_reason"] == "stop"
        short = stopping | {"max_tokens": at}
        records = [{"request": stopping, "response": reply}, {"request": short, "response": reply}]
        good, odd = await audit(http, records)
    assert (good["verdict"], odd["verdict"]) == ("confirmed", "differs")
    assert f"the request allows {at}" in odd["reason"]


async def test_a_plain_records_sampling_must_be_its_requests(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "return_token_ids": True, "seed": 4}
        reply = await post(http, "/v1/completions", body)
        sampling = reply["llm42"]["receipt"]["sampling"]
        flat = {
            "fingerprint": reply["system_fingerprint"],
            "request": body,
            "output": reply["choices"][0]["token_ids"],
        }
        said = [sampling, sampling | {"temperature": 0.5}, sampling | {"seed": "5"}]
        found = await audit(http, [flat, *({**flat, "sampling": s} for s in said)])
    assert [r["verdict"] for r in found] == ["confirmed", "confirmed", "differs", "differs"]
    assert "sampling" in found[2]["reason"]
