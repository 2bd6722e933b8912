"""What a network does to the running service: half a request, a reader that pauses, sizes without measure."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from llm42.config import Settings
from llm42_serve.launch import Service
from tests.service.serve_process import DIRECT
from tests.service.served import on_the_tiny_model_only

pytestmark = [pytest.mark.service, on_the_tiny_model_only]


async def connect(service: Service) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(service.url)
    return await asyncio.open_connection(place.hostname, place.port, limit=1 << 24)


def request_of(service: Service, body: dict[str, Any], announced: int | None = None) -> bytes:
    text = json.dumps(body).encode()
    head = (
        f"POST {urlsplit(service.url).path}/v1/completions HTTP/1.1\r\n"
        "Host: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {announced or len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


async def test_half_sent_bodies_hold_nothing(
    service: Service, settings: Settings, aclient: openai.AsyncOpenAI
) -> None:
    """Twenty clients announce more than they send and leave: others are served meanwhile and afterwards."""
    body = {"model": settings.model.name, "prompt": "x", "max_tokens": 4}
    links = [await connect(service) for _ in range(20)]
    for _, writer in links:
        writer.write(request_of(service, body, announced=100_000))
        await writer.drain()
    ask: Any = {"model": settings.model.name, "prompt": "x", "max_tokens": 2}
    await asyncio.wait_for(aclient.completions.create(**ask), 60)
    for _, writer in links:
        writer.close()
    await asyncio.wait_for(aclient.completions.create(**ask), 60)
    state = await asyncio.to_thread(service.health)
    assert (state["waiting"], state["queued"]) == (0, 0)


async def test_a_reader_that_pauses_gets_all_of_it(
    service: Service, settings: Settings, aclient: openai.AsyncOpenAI
) -> None:
    """Nothing is read for seconds, then everything: the joined stream is the whole answer, and it has ended
    with [DONE]; meanwhile others are served."""
    body = {
        "model": settings.model.name, "prompt": "The sea", "max_tokens": 60, "ignore_eos": True,
        "temperature": 0, "deterministic": True,
    }  # fmt: skip
    reader, writer = await connect(service)
    writer.write(request_of(service, body | {"stream": True, "logprobs": 20, "return_token_ids": True}))
    await asyncio.sleep(3)
    extra = {"deterministic": True, "ignore_eos": True}
    whole = await aclient.completions.create(
        model=settings.model.name, prompt="The sea", max_tokens=60, temperature=0, extra_body=extra
    )
    received = (await asyncio.wait_for(reader.read(), 120)).decode()
    writer.close()
    lines = [line[6:] for line in received.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    joined = "".join(c["text"] for line in lines[:-1] for c in json.loads(line)["choices"])
    assert joined == whole.choices[0].text


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": "word " * (1 << 17)}, "prompt"), ({"stop": [f"s{i}" for i in range(10_000)]}, "stop")],
    ids=["0.6 MiB prompt", "10,000 stop strings"],
)
async def test_sizes_without_measure(
    aclient: openai.AsyncOpenAI, settings: Settings, fields: dict[str, Any], param: str
) -> None:
    ask: Any = {"model": settings.model.name, "prompt": "x", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await aclient.completions.create(**ask)
    assert caught.value.param == param


def test_who_sends_too_much_reads_the_refusal(service: Service, settings: Settings) -> None:
    """Through Serve's proxy, again and again: urllib sends all of its body before it reads. Others are served
    afterwards. The control is in test_lingering.py."""
    url = f"{service.url}/v1/completions"
    for length in (5 << 20, 20 << 20, 20 << 20, 20 << 20):
        body = b'{"model": "' + b"x" * length
        with pytest.raises(urllib.error.HTTPError) as caught:
            DIRECT.open(urllib.request.Request(url, body), timeout=300)
        with caught.value as refusal:
            error = json.loads(refusal.read())["error"]
        assert (refusal.code, error["code"]) == (413, "body_too_large")
    good = json.dumps({"model": settings.model.name, "prompt": "x", "max_tokens": 2}).encode()
    asked = urllib.request.Request(url, good, {"Content-Type": "application/json"})
    with DIRECT.open(asked, timeout=300) as reply:
        assert reply.status == 200
