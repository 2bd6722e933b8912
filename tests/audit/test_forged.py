"""Records in which something was put, taken away or left beside: nothing of it is passed over. Each change is
one that replaying the tokens alone would not notice."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

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


def message(record: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = choice(record)["message"]
    return found


def spelled(record: Exchange) -> dict[str, Any]:
    """The third token among a chat reply's log-probabilities."""
    found: dict[str, Any] = choice(record)["logprobs"]["content"][2]
    return found


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
        chat, ask = (
            CHAT | {"logprobs": True},
            ASK | {"logprobs": 0, "receipt": True, "return_token_ids": True},
        )
        replies = await post(http, "/v1/chat/completions", chat), await post(http, "/v1/completions", ask)
        dumped = [
            ChatCompletion.model_validate(replies[0]).model_dump(),
            Completion.model_validate(replies[1]).model_dump(),
        ]
        filled = changed(
            {"request": CHAT, "response": replies[0]}, lambda r: message(r).update(annotations=[])
        )
        exchanges = [{"request": q, "response": r} for q, r in zip((chat, ask), dumped, strict=True)]
        found = await audit(http, [*exchanges, filled])
    assert "refusal" in dumped[0]["choices"][0]["message"]
    assert [r["verdict"] for r in found] == ["confirmed"] * 3, found


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
