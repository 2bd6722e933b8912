"""Receipts beside what they are for: a reply, a stream that was joined, what else was kept of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm42.config import Settings
from tests.audit.support import ASK, CHAT, Exchange, audit, changed, choice, client, post
from tests.support import Lab

Outcome = tuple[str, str]


def outcomes(found: list[dict[str, Any]]) -> list[Outcome]:
    return [(r["verdict"], r["signature"]) for r in found]


async def test_a_receipt_beside_a_reply_is_checked_like_the_replys_own(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "seed": 7}
        reply = await post(http, "/v1/completions", body)
        other = await post(http, "/v1/completions", body | {"seed": 8})
        own, others = reply["llm42"]["receipt"], other["llm42"]["receipt"]
        bare = {**reply, "llm42": {k: v for k, v in reply["llm42"].items() if k != "receipt"}}
        forged = own | {"hmac": "0" * 64}
        records = [
            {"request": body, "response": response, "receipt": receipt}
            for response in (bare, reply)
            for receipt in (own, forged, others)
        ]
        records += [{"response": bare, "receipt": r} for r in (own, forged, others)]
        found = await audit(http, records)
    assert outcomes(found) == [("confirmed", "valid"), ("bad_signature", "invalid"), ("differs", "valid")] * 3


async def test_a_receipt_belongs_to_one_reply_even_if_another_said_the_same(
    lab: Lab, settings: Settings
) -> None:
    """It says which reply it was given with, and its signature would vouch for that."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "seed": 7}
        kept, again = [
            {"request": body, "response": await post(http, "/v1/completions", body)} for _ in range(2)
        ]
        receipt = again["response"]["llm42"]["receipt"]
        later = changed(kept, lambda r: r["response"].update(created=5))
        swapped = changed(kept, lambda r: r["response"]["llm42"].update(receipt=receipt))
        found = await audit(http, [kept, again, later, swapped, kept | {"receipt": receipt}])
    assert [r["verdict"] for r in found] == ["confirmed"] * 2 + ["differs"] * 3
    assert "created" in found[2]["reason"]
    assert "id" in found[3]["reason"]


def joined(chunks: list[dict[str, Any]]) -> Exchange:
    """The recipe of docs/audits.md."""
    texts, finish, receipts = dict[int, str](), dict[int, str](), dict[int, Any]()
    for chunk in chunks:
        for part in chunk["choices"]:
            index = part["index"]
            texts[index] = texts.get(index, "") + (part["delta"].get("content") or "")
            if part["finish_reason"]:
                finish[index] = part["finish_reason"]
                receipts[index] = chunk["llm42"].get("receipt")
    last = chunks[-1]
    return {
        "receipts": [receipts[i] for i in sorted(receipts)],
        "response": {
            **{name: last[name] for name in ("id", "created", "model", "system_fingerprint")},
            "choices": [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": texts[i]},
                    "finish_reason": finish[i],
                }
                for i in sorted(texts)
            ],
            "llm42": {"deterministic": True, "seed": last["llm42"]["seed"]},
        },
    }


@pytest.mark.parametrize("count", [1, 3])
async def test_a_stream_that_was_joined_is_a_whole_reply(lab: Lab, settings: Settings, count: int) -> None:
    async with client(lab, settings) as (http, _):
        body = CHAT | {"n": count, "temperature": 1.3, "receipt": True, "stream": True}
        events = (await http.post("/v1/chat/completions", json=body)).text.split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event not in ("", "data: [DONE]")]
        kept = {"request": body, **joined(chunks)}
        half = changed(kept, lambda r: choice(r).update(finish_reason=None))
        found = await audit(http, [kept, kept["receipts"][0], half])
    assert outcomes(found[: count + 1]) == [("confirmed", "valid")] * (count + 1)
    assert found[count + 1]["verdict"] == "differs"


async def test_two_receipts_of_one_answer_say_the_same(lab: Lab, settings: Settings) -> None:
    """One may have fewer ids, and another signature or none."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"output": "tokens"}}
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}
        own = kept["response"]["llm42"]["receipt"]
        bare = {name: own[name] for name in own if name not in ("prompt", "output")}
        plain = {name: own[name] for name in own if name not in ("key", "hmac")}
        second: list[dict[str, Any]] = [
            bare,
            plain,
            plain | {"output_sha256": "0" * 64},
            plain | {"logprobs_sha256": "0" * 64},
            own | {"output": [5]},
            own | {"prompt": [5]},
        ]
        found = await audit(http, [kept | {"receipt": receipt} for receipt in second])
    assert outcomes(found) == [("confirmed", "valid")] * 2 + [("differs", "valid")] * 4


async def test_receipts_beside_a_reply_are_one_for_each_choice(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"output": "tokens"}, "n": 2, "seed": 7, "temperature": 1.3}
        reply = await post(http, "/v1/completions", body)
        receipts = reply["llm42"].pop("receipts")
        record = {"request": body, "response": reply}
        right = await audit(http, [record | {"receipts": receipts}])
        swapped = await audit(http, [record | {"receipts": receipts[::-1]}])
        single = await audit(http, [record | {"receipt": receipts[0]}])
    assert outcomes(right) == [("confirmed", "valid")] * 2
    assert [r["verdict"] for r in swapped] == ["differs"] * 2
    assert [r["verdict"] for r in single] == ["bad_record"]


async def test_what_a_record_says_beside_its_receipt_is_compared(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        receipt = (await post(http, "/v1/completions", ASK | {"receipt": True}))["llm42"]["receipt"]
        said: list[dict[str, Any]] = [
            {"finish": receipt["finish"], "id": receipt["id"], "prompt_len": receipt["prompt_len"]},
            {"finish": "stop"},
            {"id": "cmpl-another"},
            {"manifest": {"device": {"threads": 8}}},
        ]
        found = await audit(http, [{"receipt": receipt, **more} for more in said])
    assert receipt["finish"] == "length"
    assert [r["verdict"] for r in found] == ["confirmed", *["differs"] * 3], found


async def test_seeds_are_the_same_signed_and_unsigned(lab: Lab, settings: Settings) -> None:
    """A receipt prints them as 64 bits without a sign, as text; a request takes that number, too."""
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "seed": -3}
        reply = await post(http, "/v1/completions", body)
        seed = reply["llm42"]["receipt"]["sampling"]["seed"]
        kept = {"request": body | {"seed": int(seed)}, "response": reply}
        again = await post(http, "/v1/completions", kept["request"])
        (found,) = await audit(http, [kept])
    assert seed == str(2**64 - 3)
    assert again["choices"] == reply["choices"]
    assert found["verdict"] == "confirmed"
