"""What an audit does not compare is not sent: the alternatives of an answer's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm42.api.json_bodies import MAX_AUDIT_PARTS, load
from llm42.audit.remote import without_alternatives
from llm42.config import Settings
from llm42.errors import RequestRejected
from tests.audit.support import ASK, CHAT, audit, client, post
from tests.support import Lab

ENTRY: dict[str, Any] = {"token": "ab", "logprob": -1.5, "bytes": [97, 98]}


def record(tokens: int) -> dict[str, Any]:
    """A stored chat answer with 20 alternatives a token, as the service gives it."""
    content = [ENTRY | {"top_logprobs": [ENTRY] * 20}] * tokens
    choice = {"index": 0, "message": {"content": "x"}, "logprobs": {"content": content}}
    return {"request": CHAT | {"logprobs": True, "top_logprobs": 20}, "response": {"choices": [choice]}}


def test_a_long_answer_with_alternatives_fits() -> None:
    whole, lean = ({"records": [r]} for r in (record(4000), without_alternatives(record(4000))))
    assert load(json.dumps(lean).encode(), MAX_AUDIT_PARTS)["records"][0]["request"]["top_logprobs"] == 20
    with pytest.raises(RequestRejected):  # the control
        load(json.dumps(whole).encode(), MAX_AUDIT_PARTS)


@pytest.mark.parametrize("odd", [{"x": 1}, {"response": 3}, {"response": {"choices": [1, {"logprobs": 2}]}}])
def test_what_is_no_answer_is_left_as_it_is(odd: dict[str, Any]) -> None:
    assert without_alternatives(odd) == odd


async def test_the_verdict_stays_and_a_change_is_found(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        records = []
        for path, body in (
            ("/v1/completions", ASK | {"return_token_ids": True, "logprobs": 2}),
            ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        ):
            records.append({"request": body, "response": await post(http, path, body)})
        lean = [without_alternatives(r) for r in records]
        assert all(json.dumps(a) != json.dumps(b) for a, b in zip(records, lean, strict=True))
        changed = json.loads(json.dumps(lean[1]))
        changed["response"]["choices"][0]["logprobs"]["content"][3]["logprob"] -= 0.5
        found = await audit(http, [*lean, changed])
    assert [r["verdict"] for r in found] == ["confirmed", "confirmed", "differs"]
