"""Receipts and audits through the whole service: answers kept by an OpenAI client, replayed by a verifier of
the pool, and by one in another process."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

import llm42.cli.main as cli
from llm42.config import Settings
from llm42.fingerprint import fingerprint
from llm42.receipt import Receipt
from llm42_serve.launch import Service
from tests.service.conftest import WAIT_S
from tests.service.served import on_the_tiny_model_only

pytestmark = pytest.mark.service
COUNT, TOKENS = 16, 8
Lines = list[dict[str, Any]]


async def stored(client: openai.AsyncOpenAI, model: str) -> Lines:
    """Exchanges as a client may keep them: chat and completions, whole and streamed; ids, hashes, text."""

    async def completion(i: int) -> dict[str, Any]:
        receipt: Any = {"prompt": "tokens", "output": "tokens" if i % 2 else "hash"}
        body: dict[str, Any] = {"model": model, "prompt": f"{i}. Once upon a time", "max_tokens": TOKENS}
        body |= {"temperature": i % 3 / 2, "seed": i}
        extra = {"deterministic": True, "receipt": receipt, "return_token_ids": i % 2 == 1}
        reply = await client.completions.create(**body, extra_body=extra)
        return {"request": body | extra, "response": reply.model_dump()}

    async def chat(i: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": TOKENS}
        body["messages"] = [{"role": "user", "content": f"Count to {i}."}]
        extra: dict[str, Any] = {"deterministic": True}
        if i % 2:
            reply = await client.chat.completions.create(**body, extra_body=extra)
            return {"request": body | extra, "response": reply.model_dump()}
        stream = await client.chat.completions.create(
            **body, stream=True, extra_body=extra | {"receipt": True}
        )
        last: Any = None
        async for chunk in stream:
            last = chunk
        receipt: dict[str, Any] = last.model_extra["llm42"]["receipt"]
        return receipt

    made = [completion(i) if i < COUNT // 2 else chat(i) for i in range(COUNT)]
    return list(await asyncio.gather(*made))


@pytest.fixture(scope="module")
def records(service: Service) -> Lines:
    """One set for all tests."""

    async def ask() -> Lines:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=WAIT_S) as client:
            return await stored(client, service.settings.model.name)

    return asyncio.run(ask())


def audited(path: Path, lines: Lines, *options: str) -> tuple[int, dict[str, Any]]:
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    result = CliRunner().invoke(cli.app, ["audit", str(path), "--json", *options])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


async def test_what_a_client_has_kept_is_confirmed_by_the_service_and_a_change_is_found(
    records: Lines, service: Service, tmp_path: Path
) -> None:
    url, records = ["--url", service.url], copy.deepcopy(records)
    code, found = await asyncio.to_thread(audited, tmp_path / "a.jsonl", records, *url)
    assert (code, found["confirmed"], found["findings"]) == (0, COUNT, [])
    ids = records[3]["response"]["choices"][0]["token_ids"]
    ids[5] = ids[5] + 1
    del records[3]["response"]["llm42"]["receipt"]  # it would contradict the reply at once
    records[9]["response"]["choices"][0]["message"]["content"] += "."
    code, found = await asyncio.to_thread(audited, tmp_path / "a.jsonl", records, *url)
    assert (code, found["confirmed"], found["differs"]) == (1, COUNT - 2, 2)
    token, text = found["findings"]
    assert (token["line"], token["difference"]["index"]) == (4, 5)
    assert token["difference"]["canonical_token"] == ids[5] - 1
    assert text["line"] == 10


async def test_another_process_confirms_them_with_a_verifier_of_its_own(
    records: Lines, settings: Settings, tmp_path: Path
) -> None:
    """No server is asked: the same machine and settings give the same fingerprint, and that the same bits."""
    config = tmp_path / "settings.yaml"
    config.write_text(settings.model_dump_json())
    options = ["--config", str(config)]
    replayed = [r for r in records if "token_ids" in json.dumps(r)]
    code, found = await asyncio.to_thread(audited, tmp_path / "a.jsonl", replayed, *options)
    assert (code, found["confirmed"]) == (0, len(replayed)), found["findings"]


async def test_the_fingerprint_is_served_with_the_manifest_that_it_hashes(
    service: Service, records: Lines
) -> None:
    async with httpx.AsyncClient(timeout=300) as http:
        reply = (await http.get(f"{service.url}/v1/fingerprint")).json()
    assert reply["fingerprint"] == fingerprint(reply["manifest"]) == service.health()["fingerprint"]
    assert Receipt.from_json(records[-2]).fingerprint == reply["fingerprint"]


@on_the_tiny_model_only
async def test_replies_say_who_answered(service: Service, settings: Settings) -> None:
    body = {"model": settings.model.name, "prompt": "Hi", "max_tokens": 3, "deterministic": True}
    async with httpx.AsyncClient(timeout=300) as http:
        whole = await http.post(f"{service.url}/v1/completions", json=body)
        async with http.stream("POST", f"{service.url}/v1/completions", json=body | {"stream": True}) as s:
            streamed, text = s.headers, (await s.aread()).decode()
        plain = await http.post(f"{service.url}/v1/completions", json=body | {"deterministic": False})
    evidence = whole.json()["llm42"]
    assert whole.headers["X-LLM42-Replica"] == evidence["replica"] != ""
    assert whole.headers["X-LLM42-Verifier"] == evidence["verifier"] != ""
    assert streamed["X-LLM42-Replica"]
    assert streamed["X-LLM42-Verifier"] == evidence["verifier"]
    assert streamed["X-LLM42-Request"] in text
    assert "X-LLM42-Verifier" not in plain.headers
    assert plain.json()["llm42"]["verifier"] is None
