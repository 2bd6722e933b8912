"""Large bodies are read in turns: nobody waits behind another's huge ones, and huge ones end early."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from llm42.api.audit_routes import AuditBody
from llm42.api.json_bodies import LARGE_BYTES, LONG_BYTES, MAX_AUDIT_PARTS, BodyReader, Turns, load
from llm42.api.requests import MAX_PROMPTS, CompletionBody
from llm42.errors import RequestRejected
from tests.service.scripted import MODEL, SETTINGS
from tests.support import PATIENCE_S

IDS = MAX_PROMPTS * SETTINGS.model.max_model_len


def completion_of(prompt: object) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 1, "prompt": prompt}).encode()


@pytest.mark.parametrize(("name", "param"), [("prompt", "prompt"), ("tokens", "tokens"), ("stop", None)])
def test_reading_ends_at_the_limit(name: str, param: str | None) -> None:
    """What stands behind it is not even looked at: it would be no JSON."""
    for inner in ("7," * 300_000, "[" + "7," * 300_000):
        with pytest.raises(RequestRejected, match="200000") as found:
            load(f'{{"a":[1],"{name}": [{inner} oops'.encode(), values=200_000)
        assert found.value.param == param
    for many in ("[" + "{}," * 100_000, "{" + '"k":0,' * 100_000, "[" + "[]," * 100_000):
        with pytest.raises(RequestRejected, match="65536"):
            load(f"{many} oops".encode())


async def test_the_largest_batches_are_read() -> None:
    reader, context = BodyReader(SETTINGS), SETTINGS.model.max_model_len
    for prompt in ([[token] * (context - 1)] * MAX_PROMPTS for token in (7, 49_000)):
        made = await reader.read(completion_of(prompt), CompletionBody)
        assert isinstance(made, CompletionBody) and made.prompt == prompt


async def test_an_audit_may_have_the_ids_of_many_answers() -> None:
    raw = json.dumps({"records": [{"output": [7] * 50_000}] * 9}).encode()
    made = await BodyReader(SETTINGS).read(raw, AuditBody, MAX_AUDIT_PARTS)
    assert isinstance(made, AuditBody) and len(made.records) == 9


@pytest.mark.parametrize("key", ["large", "small"])
async def test_a_body_does_not_wait_for_huge_ones(key: str) -> None:
    """Whoever sent them. The control: another huge one does."""
    reader, ended = BodyReader(SETTINGS), list[str]()

    async def read(name: str, raw: bytes, key: str) -> None:
        with suppress(RequestRejected):
            await reader.read(raw, CompletionBody, key=key)
        ended.append(name)

    huge = completion_of([7] * (IDS + 10_000))
    small, other = completion_of([7] * (LARGE_BYTES // 3)), completion_of("a " * (LONG_BYTES // 2))
    sent = [asyncio.create_task(read(f"huge {i}", huge, "large")) for i in range(4)]
    await asyncio.sleep(0)
    sent += [
        asyncio.create_task(read("small", small, key)),
        asyncio.create_task(read("long", other, key)),
    ]
    await asyncio.gather(*sent)
    assert ended.index("small") < ended.index("huge 1")
    assert (ended.index("long") < ended.index("huge 2")) is (key == "small"), ended


async def test_keys_take_turns() -> None:
    turns, had = Turns(), list[str]()

    async def work(name: str) -> None:
        async with turns.turn(name[0]):
            had.append(name)
            await asyncio.sleep(0)

    sent = {name: asyncio.create_task(work(name)) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")}
    await asyncio.sleep(0)
    sent["a2"].cancel()
    await asyncio.gather(*sent.values(), return_exceptions=True)
    assert had == ["a1", "b1", "c1", "a3", "b2", "a4"]
    await asyncio.wait_for(work("d1"), PATIENCE_S)


async def test_a_turn_given_to_who_has_left_goes_on() -> None:
    turns, free = Turns(), asyncio.Event()

    async def first() -> None:
        async with turns.turn("a"):
            await free.wait()
        waiting.cancel()

    async def second() -> None:
        async with turns.turn("b"):
            raise AssertionError("it was cancelled")

    holding, waiting = asyncio.create_task(first()), asyncio.create_task(second())
    await asyncio.sleep(0)
    free.set()
    await holding
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(PATIENCE_S), turns.turn("c"):
        pass
