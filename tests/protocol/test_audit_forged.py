"""Records in which something was put, taken away or left beside: nothing of it is passed over. Each change is
one that replaying the tokens alone would not notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm42.config import Settings
from tests.audit_support import ASK, CHAT, audit, client, post, signing_settings
from tests.support import Lab

Exchange = dict[str, Any]
Change = Callable[[Exchange], Any]
Outcome = tuple[str, str]


@pytest.fixture
def settings(lab: Lab, tmp_path: Path) -> Settings:
    """The lab's, with a key and a chat template."""
    return signing_settings(lab, tmp_path)


def changed(kept: Exchange, change: Change) -> Exchange:
    copy: Exchange = json.loads(json.dumps(kept))
    change(copy)
    return copy


def choice(record: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = record["response"]["choices"][0]
    return found


def message(record: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = choice(record)["message"]
    return found


def spelled(record: Exchange) -> dict[str, Any]:
    """The third token among a chat reply's log-probabilities."""
    found: dict[str, Any] = choice(record)["logprobs"]["content"][2]
    return found


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


async def test_what_the_form_of_a_record_does_not_know_is_no_record(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True}
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}
        receipt = kept["response"]["llm42"]["receipt"]
        beside: list[dict[str, Any]] = [
            {"output": [2]}, {"logprobs": [0.0]}, {"text": "zzz"}, {"fingerprint": "llm42-ffff"}, {"foo": 1},
        ]  # fmt: skip
        records = [kept | more for more in beside]
        records += [{"receipt": receipt, "foo": 1}, receipt | {"text": "zzz"}]
        found = await audit(http, records)
    assert {r["verdict"] for r in found} == {"bad_record"}
    assert all("unknown field" in r["reason"] for r in found)


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


@pytest.mark.parametrize(
    "more", [{"n": 3}, {"prompt": ["hello", "there"]}, {"prompt": [[5, 6], [7]], "n": 2}]
)
async def test_a_reply_has_as_many_choices_as_its_request_asks_for(
    lab: Lab, settings: Settings, more: dict[str, Any]
) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"seed": 7, "temperature": 1.3} | more
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}
        count = len(kept["response"]["choices"])
        extra = choice(kept) | {"index": count}
        fewer = changed(kept, lambda r: r["response"]["choices"].pop())
        others = changed(kept, lambda r: r["response"]["choices"].append(extra))
        far = changed(kept, lambda r: choice(r).update(index=count + 3))
        found = await audit(http, [kept, fewer, others])
        found_far = await audit(http, [far])
    assert [r["verdict"] for r in found] == ["confirmed"] * count + ["differs"] * 2 * count
    assert f"{count - 1} choices; the request asks for {count}" in found[count]["reason"]
    assert f"{count + 1} choices; the request asks for {count}" in found[-1]["reason"]
    assert [r["verdict"] for r in found_far].count("differs") == 1


CHAT_CHANGES: dict[str, tuple[Change, str]] = {
    "tool calls": (lambda r: message(r).update(tool_calls=[{"type": "function"}]), "message.tool_calls"),
    "refusal": (lambda r: message(r).update(refusal="no"), "message.refusal"),
    "reasoning": (lambda r: message(r).update(reasoning_content="hm"), "message.reasoning_content"),
    "role": (lambda r: message(r).update(role="user"), "message.role"),
    "no role": (lambda r: message(r).update(role=None), "message.role"),
    "token": (lambda r: spelled(r).update(token="!?"), "texts beside the log-probabilities"),
    "bytes": (lambda r: spelled(r).update(bytes=[33]), "bytes beside the log-probabilities"),
    "a field of a token": (lambda r: spelled(r).update(rank=1), "logprobs.content.rank"),
    "logprobs.refusal": (lambda r: choice(r)["logprobs"].update(refusal=[1]), "logprobs.refusal"),
    "no finish": (lambda r: choice(r).update(finish_reason=None), "finish_reason"),
    "finish gone": (lambda r: choice(r).pop("finish_reason"), "finish_reason"),
    "stop reason": (lambda r: choice(r).update(stop_reason="x"), "stop_reason"),
    "a text too": (lambda r: choice(r).update(text="x"), "response.choices.text"),
    "filter": (lambda r: r["response"].update(prompt_filter_results=[1]), "prompt_filter_results"),
    "kind": (lambda r: r.update(request=ASK), "kind"),
    "prompt ids": (lambda r: choice(r).update(prompt_token_ids=[1]), "prompt_token_ids"),
}


@pytest.mark.parametrize("name", CHAT_CHANGES)
@pytest.mark.parametrize("ids", [False, True])
async def test_a_chat_reply_is_compared_beyond_its_tokens(
    lab: Lab, settings: Settings, name: str, ids: bool
) -> None:
    """Replayed, and generated again."""
    change, said = CHAT_CHANGES[name]
    async with client(lab, settings) as (http, _):
        body = CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": ids}
        kept = {"request": body, "response": await post(http, "/v1/chat/completions", body)}
        if not ids:
            kept["response"]["prompt_token_ids"] = (await prompt_ids(http))["prompt_token_ids"]
        good, odd = await audit(http, [kept, changed(kept, change)])
    assert good["verdict"] == "confirmed", good
    assert odd["verdict"] == "differs", odd
    assert said in odd["reason"]


async def prompt_ids(http: Any) -> Any:
    return await post(http, "/v1/chat/completions", CHAT | {"return_token_ids": True, "max_tokens": 1})


COMPLETION_CHANGES: dict[str, tuple[Change, str]] = {
    "tokens": (lambda r: choice(r)["logprobs"]["tokens"].__setitem__(3, "!?"), "texts"),
    "a token less": (lambda r: choice(r)["logprobs"]["tokens"].pop(), "11 texts"),
    "offsets": (lambda r: choice(r)["logprobs"]["text_offset"].__setitem__(3, 99), "offsets"),
    "a field": (lambda r: choice(r)["logprobs"].update(content=[1]), "logprobs.content"),
}


@pytest.mark.parametrize("name", COMPLETION_CHANGES)
@pytest.mark.parametrize("ids", [False, True])
async def test_a_completions_token_texts_and_offsets_are_compared(
    lab: Lab, settings: Settings, name: str, ids: bool
) -> None:
    change, said = COMPLETION_CHANGES[name]
    async with client(lab, settings) as (http, _):
        body = ASK | {"logprobs": 2, "return_token_ids": ids}
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}
        good, odd = await audit(http, [kept, changed(kept, change)])
    assert good["verdict"] == "confirmed", good
    assert odd["verdict"] == "differs", odd
    assert said in odd["reason"]


async def test_what_clients_libraries_add_to_a_reply_is_no_change(lab: Lab, settings: Settings) -> None:
    """They write every field that they know, empty."""
    async with client(lab, settings) as (http, _):
        kept = {"request": CHAT, "response": await post(http, "/v1/chat/completions", CHAT)}
        message(kept).update(refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None)
        kept["response"].update(service_tier=None)
        (found,) = await audit(http, [kept])
    assert found["verdict"] == "confirmed"


@pytest.mark.parametrize("name", ["deterministic", "is_deterministic"])
async def test_what_says_it_is_best_effort_is_not_audited(lab: Lab, settings: Settings, name: str) -> None:
    async with client(lab, settings) as (http, _):
        asked = {k: v for k, v in ASK.items() if k != "deterministic"} | {name: True, "receipt": True}
        kept = {"request": asked, "response": await post(http, "/v1/completions", asked)}
        lies = [
            changed(kept, lambda r: r["request"].update({name: False})),
            changed(kept, lambda r: r["response"]["llm42"].update(deterministic=False)),
            {"receipt": kept["response"]["llm42"]["receipt"], "request": asked | {name: False}},
        ]
        good, *odd = await audit(http, [kept, *lies])
    assert good["verdict"] == "confirmed"
    assert [r["verdict"] for r in odd] == ["bad_record"] * 3
    assert all("only answers of deterministic requests" in r["reason"] for r in odd)


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


async def test_what_is_no_object_is_the_bad_record_of_its_place(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": {"output": "tokens"}}
        good = (await post(http, "/v1/completions", body))["llm42"]["receipt"]
        found = await audit(http, [good, None, 4, "x", [good], good])
    assert [r["record"] for r in found] == [0, 1, 2, 3, 4, 5]
    assert [r["verdict"] for r in found] == ["confirmed", *["bad_record"] * 4, "confirmed"]


async def test_a_reason_says_whose_fault_it_is(lab: Lab, settings: Settings) -> None:
    """Only a stored request is called one, and the field is named."""
    async with client(lab, settings) as (http, _):
        kept = {"request": CHAT, "response": await post(http, "/v1/chat/completions", CHAT)}
        kept["request"] = CHAT | {"top_logprobs": 2}
        flat = {"fingerprint": kept["response"]["system_fingerprint"], "prompt": [5], "output": [600]}
        asked, plain = await audit(http, [kept, flat | {"sampling": {}}])
    assert (asked["verdict"], plain["verdict"]) == ("failed", "failed")
    assert asked["reason"] == "the stored request: top_logprobs: needs logprobs: true"
    assert plain["reason"].startswith("output: token id 600")
