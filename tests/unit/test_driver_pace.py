"""How often a best-effort request's tokens are passed on: seldom, but the first, the last and a stop string
at once."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from llm42.config import Settings
from llm42.engine.base import EngineOutput, Sink
from llm42.protocol import Delta, FinishReason, Request, TokenLogprob
from llm42.session import best_effort
from llm42.session.driver import KEEP_ALIVE_S, Generator
from llm42.session.inbox import Inbox
from llm42.session.outputs import EngineFailed
from tests.support import PATIENCE_S, until

STEP_S = 0.002
LONG_S = 600.0
"""An interval that no test waits for."""
REQUEST = Request("r", (1, 2), 60, num_logprobs=0)


class Words:
    """Stands for a tokenizer: token 5 is "<5>"."""

    class Pieces(dict[int, tuple[bytes, bool]]):
        strip, byte_fallback = 0, False

        def get(self, token: int, default: Any = None) -> tuple[bytes, bool]:
            return f"<{token}>".encode(), False

    identity, pieces, special_ids = "words", Pieces(), frozenset[int]()

    def token_text(self, token: int) -> str:
        return f"<{token}>"


class Metronome:
    """Token n is n, one every STEP_S, from a thread of its own; `error` after `fails_at` tokens."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.decoded, self.aborted = fails_at, 0, threading.Event()

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        threading.Thread(target=self._run, args=(request, sink), daemon=True).start()

    def wait(self) -> bool:
        """Until the next token; True: nobody wants it any more."""
        return self.aborted.wait(STEP_S)

    def _run(self, request: Request, sink: Sink) -> None:
        for n in range(request.max_tokens):
            if self.wait():
                return
            if n == self.fails_at:
                sink(EngineOutput("r", 0, n, error="broken"))
                return
            self.decoded += 1
            finish = FinishReason.LENGTH if n == request.max_tokens - 1 else None
            cached = 0 if n == 0 else None
            sink(EngineOutput("r", 0, n, (n,), (TokenLogprob(n, -1.0),), finish, cached_tokens=cached))

    def abort(self, request_id: str) -> None:
        self.aborted.set()


class Asked(Metronome):
    """Each token when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore()

    def wait(self) -> bool:
        return not self.asked.acquire(timeout=PATIENCE_S)


def generator(engine: Metronome, interval_s: float) -> Generator:
    settings = Settings.load({"server": {"stream_interval_s": interval_s}})
    return Generator(engine, Words(), settings)  # type: ignore[arg-type]


async def run(
    request: Request, interval_s: float, engine: Metronome | None = None, into: list[Delta] | None = None
) -> list[Delta]:
    deltas = [] if into is None else into
    async with aclosing(generator(engine or Metronome(), interval_s).generate(request)) as stream:
        async for delta in stream:
            deltas.append(delta)
    return deltas


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_are_passed_on_joined_and_none_is_lost(stream: bool) -> None:
    began = time.monotonic()
    deltas = await run(replace(REQUEST, stream=stream), 0.03)
    seconds = time.monotonic() - began
    assert [t for d in deltas for t in d.token_ids] == [*range(60)]
    assert [p.token for d in deltas for p in d.logprobs] == [*range(60)]
    assert "".join(d.text for d in deltas) == "".join(f"<{n}>" for n in range(60))
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[0].cached_tokens == 0
    assert len(deltas) <= 3 + seconds / (0.03 if stream else KEEP_ALIVE_S)


async def test_control_without_an_interval_each_token_is_passed_on() -> None:
    engine, count = Asked(), 0
    async with aclosing(generator(engine, 0.0).generate(REQUEST)) as deltas:
        async for _ in deltas:
            count += 1
            engine.asked.release()
    assert count == 60


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_token_does_not_wait(stream: bool) -> None:
    engine, request = Asked(), replace(REQUEST, stream=stream)
    async with aclosing(generator(engine, LONG_S).generate(request)) as deltas:
        first = await asyncio.wait_for(anext(deltas), PATIENCE_S)
    assert first.token_ids == (0,)


async def test_many_streams_are_passed_on_less_often() -> None:
    made = generator(Metronome(), 0.01)
    alone = made.pause_s(REQUEST)
    made._streams = 500
    assert alone == 0.01
    assert made.pause_s(REQUEST) == pytest.approx(0.2)
    assert made.text_delay_s(replace(REQUEST, stop=("x",))) == 0.0


class EndsEarly(Inbox):
    """What was to wake an earlier wait ends the next one."""

    async def wait(self, wake_at: float, timeout_s: float | None = None) -> None:
        self._wake_at = wake_at
        if self._answers or any(self._wakes(output) for output in list(self._outputs)):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()


async def _gaps_of_a_slow_client(stream: bool) -> list[float]:
    """Seconds between the deltas of 200 tokens that a client gets that takes 6 ms for each; the interval is
    50 ms."""
    came = list[float]()
    request = replace(REQUEST, max_tokens=200, stream=stream)
    async with aclosing(generator(Metronome(), 0.05).generate(request)) as deltas:
        async for _ in deltas:
            came.append(time.monotonic())
            await asyncio.sleep(3 * STEP_S)
    return [now - last for last, now in pairwise(came)]


async def test_tokens_that_come_while_a_delta_is_on_its_way_end_no_pause() -> None:
    *gaps, _ = await _gaps_of_a_slow_client(True)
    assert min(gaps) > 0.045
    gaps = await _gaps_of_a_slow_client(False)
    assert len(gaps) <= 2 + sum(gaps) / KEEP_ALIVE_S


async def test_control_with_waits_that_end_early_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_effort, "Inbox", EndsEarly)
    gaps = await _gaps_of_a_slow_client(True)
    assert sum(gap < 0.025 for gap in gaps) > 10


async def test_a_client_that_leaves_in_a_pause_is_heard_at_once() -> None:
    engine, got = Metronome(), list[Delta]()
    request = replace(REQUEST, max_tokens=100_000, stream=False)
    running = asyncio.create_task(run(request, LONG_S, engine, got))
    await until(lambda: bool(got))
    running.cancel()
    await asyncio.wait([running], timeout=PATIENCE_S)
    assert running.cancelled()
    assert engine.aborted.is_set()


async def test_the_end_is_not_held_back() -> None:
    await asyncio.wait_for(run(replace(REQUEST, max_tokens=3, stream=False), LONG_S), PATIENCE_S)


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    got: list[Delta] = []
    with pytest.raises(EngineFailed, match="broken"):
        await run(REQUEST, 5.0, Metronome(fails_at=20), got)
    assert [t for d in got for t in d.token_ids] == [*range(20)]


async def _decoded_past_a_stop(most: int) -> int:
    """How many tokens the engine has decoded of `most` when the request has ended at its eighth."""
    engine = Metronome()
    deltas = await run(replace(REQUEST, max_tokens=most, stop=("<7>",)), LONG_S, engine)
    assert "".join(d.text for d in deltas) == "".join(f"<{n}>" for n in range(7))
    assert deltas[-1].finish_reason is FinishReason.STOP
    return engine.decoded


async def test_a_stop_string_is_seen_at_once() -> None:
    assert await asyncio.wait_for(_decoded_past_a_stop(100_000), PATIENCE_S) < 100_000


async def test_control_held_back_the_engine_decodes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generator, "text_delay_s", lambda _self, _request: LONG_S)
    assert await _decoded_past_a_stop(400) == 400
