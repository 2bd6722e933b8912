"""Receipts and audits over HTTP, with the tiny model behind the application instead of Ray."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from llm42.config import Settings
from llm42.fingerprint import fingerprint
from llm42.receipt import Keyring, Receipt, Signature, logprob_hash, token_hash
from tests.audit.support import (
    ASK,
    CHAT,
    FINGERPRINT,
    MANIFEST,
    SECRET,
    audit,
    client,
    post,
)
from tests.support import Lab


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    reply = await http.post(path, json=body | {"stream": True})
    lines = [x[6:] for x in reply.text.split("\n\n") if x]
    assert lines.pop() == "[DONE]"
    return reply, [json.loads(x) for x in lines]


async def test_the_fingerprint_comes_with_its_manifest(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, backend):
        reply = (await http.get("/v1/fingerprint")).json()
        assert reply == {"object": "fingerprint", "fingerprint": FINGERPRINT, "manifest": MANIFEST}
        backend.up = False
        refused = await http.get("/v1/fingerprint")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]


async def test_a_receipt_says_what_the_reply_holds(lab: Lab, settings: Settings) -> None:
    more = {"receipt": {"prompt": "tokens", "output": "tokens"}, "return_token_ids": True, "logprobs": 0}
    async with client(lab, settings) as (http, _):
        reply = await post(http, "/v1/completions", ASK | more | {"seed": 7})
    choice, evidence = reply["choices"][0], reply["llm42"]
    receipt = Receipt.from_json(evidence["receipt"])
    assert list(receipt.output or ()) == choice["token_ids"]
    assert list(receipt.prompt or ()) == choice["prompt_token_ids"]
    assert receipt.output_sha256 == token_hash(choice["token_ids"])
    assert receipt.logprobs_sha256 == logprob_hash(choice["logprobs"]["token_logprobs"])
    assert (receipt.fingerprint, receipt.sampling.seed) == (reply["system_fingerprint"], 7)
    assert receipt.finish == choice["finish_reason"]
    assert Keyring({"k1": SECRET}).check(receipt) == Signature.VALID
    assert (evidence["replica"], evidence["verifier"]) == ("replica-a", "verifier-b")


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_a_streams_last_chunk_has_the_receipt_of_the_whole_reply(
    lab: Lab, settings: Settings, path: str, body: dict[str, Any]
) -> None:
    async with client(lab, settings) as (http, _):
        whole = await post(http, path, body | {"receipt": True})
        reply, chunks = await events(http, path, body | {"receipt": True})
    assert [("llm42" in c) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    made, streamed = (Receipt.from_json(x["llm42"]["receipt"]) for x in (whole, chunks[-1]))
    assert replace(made, id="", created=0, hmac=None) == replace(streamed, id="", created=0, hmac=None)
    assert "logprobs" not in whole["choices"][0] or whole["choices"][0]["logprobs"] is None
    assert set(whole["llm42"]) == set(chunks[-1]["llm42"])
    assert reply.headers["X-LLM42-Request"] == chunks[-1]["id"]
    assert (reply.headers["X-LLM42-Replica"], reply.headers["X-LLM42-Verifier"]) == (
        "replica-a",
        "verifier-b",
    )


async def test_receipts_are_for_verified_answers_only(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "deterministic": False}
        refused = await post(http, "/v1/completions", body, 400)
        assert refused["error"]["param"] == "receipt"
        await post(http, "/v1/completions", ASK | {"receipt": {"prompt": "all"}}, 400)
        none = await post(http, "/v1/completions", ASK | {"receipt": False})
        assert "receipt" not in none["llm42"]
        plain = await http.post("/v1/completions", json=ASK | {"deterministic": False})
        assert "X-LLM42-Verifier" not in plain.headers
        assert plain.headers["X-LLM42-Request"] == plain.json()["id"]


async def test_every_way_of_storing_an_answer_is_confirmed(lab: Lab, settings: Settings) -> None:
    """Exchanges with receipts, with ids, with text alone, of several choices; receipts alone."""
    async with client(lab, settings) as (http, _):
        records: list[Any] = []
        for body in (
            ASK | {"receipt": True, "seed": 1},
            ASK | {"receipt": {"prompt": "hash"}},
            ASK | {"return_token_ids": True, "logprobs": 2},
            ASK | {"n": 3, "receipt": {"output": "tokens"}, "temperature": 1.3},
            ASK | {"stop": ["e", "th"], "max_tokens": 40},
            ASK | {"prompt": [[5, 6, 7], [8, 9]], "min_tokens": 4, "logit_bias": {"40": 3}},
        ):
            records.append({"request": body, "response": await post(http, "/v1/completions", body)})
        chat = CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
        records.append({"request": chat, "response": await post(http, "/v1/chat/completions", chat)})
        records.append(records[0]["response"]["llm42"]["receipt"])
        found = await audit(http, records)
        assert [r["record"] for r in found] == [0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7]
        assert {r["verdict"] for r in found} == {"confirmed"}, found
        again = [bool(r.get("regenerated")) for r in found]
        assert again == [True, True, False, False, False, False, True, True, True, False, True]


async def test_what_was_changed_is_found_and_what_is_no_record_is_said(lab: Lab, settings: Settings) -> None:
    async with client(lab, settings) as (http, _):
        body = ASK | {"receipt": True, "return_token_ids": True, "logprobs": 0}
        kept = {"request": body, "response": await post(http, "/v1/completions", body)}

        def changed(change: Any) -> Any:
            copy = json.loads(json.dumps(kept))
            change(copy["response"]["choices"][0], copy["response"]["llm42"]["receipt"])
            return copy

        token = changed(lambda c, r: c["token_ids"].__setitem__(4, (c["token_ids"][4] + 1) % 512))
        text = changed(lambda c, r: c.update(text=c["text"] + "!"))
        forged = changed(lambda c, r: r.update(created=1))
        theirs = {"device": {"threads": 8}}
        flat = {"prompt": [1], "output": [2], "sampling": {}, "fingerprint": fingerprint(theirs)}
        manifests = [{"fingerprint": fingerprint(theirs), "manifest": theirs}]
        records = [kept, token, text, forged, {"x": 1}, flat]
        found = await audit(http, records, manifests=manifests)
        assert [r["verdict"] for r in found[:3]] == ["confirmed", "differs", "differs"]
        assert [r["verdict"] for r in found[3:]] == ["bad_signature", "bad_record", "other_fingerprint"]
        assert found[1]["difference"]["index"] == 4
        assert found[5]["fields"] == {"device.threads": [8, 1]}


async def test_an_audit_is_bounded_and_needs_a_verifier(lab: Lab, settings: Settings) -> None:
    few = settings.model_copy(update={"audit": settings.audit.model_copy(update={"max_records": 2})})
    async with client(lab, few) as (http, backend):
        flat = {"prompt": [1], "output": [2], "sampling": {}, "fingerprint": FINGERPRINT}
        assert (
            "audit.max_records"
            in (await post(http, "/v1/audit", {"records": [flat] * 3}, 400))["error"]["message"]
        )
        await post(http, "/v1/audit", {"records": []}, 400)
        await post(http, "/v1/audit", {"records": {}}, 400)
        backend.up = False
        await post(http, "/v1/audit", {"records": [flat]}, 503)
        backend.up = True
        calls = [http.post("/v1/audit", json={"records": [flat]}) for _ in range(40)]
        statuses = {r.status_code for r in await asyncio.gather(*calls)}
        assert statuses == {200, 429}


async def test_a_key_without_determinism_may_not_use_the_verifiers(lab: Lab, settings: Settings) -> None:
    shares = {"none": 0.0, "all": 1.0}
    keys = [
        {"name": k, "sha256": hashlib.sha256(k.encode()).hexdigest(), "deterministic_share": share}
        for k, share in shares.items()
    ]
    tree = settings.model_dump(mode="json")
    tree["server"]["api_keys"] = keys
    flat = {"prompt": [1], "output": [2], "sampling": {}, "fingerprint": FINGERPRINT}
    async with client(lab, Settings.load(tree)) as (http, _):
        statuses = []
        for key in (None, "none", "all"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            reply = await http.post("/v1/audit", json={"records": [flat]}, headers=headers)
            statuses.append(reply.status_code)
        assert statuses == [401, 403, 200]
