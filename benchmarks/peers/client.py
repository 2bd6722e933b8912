"""One client for all servers: streams of completions as token ids, one event loop."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.direct.http import Server
from benchmarks.peers.cells import rate_of
from benchmarks.peers.latency import Latencies
from benchmarks.verify_mode.loads import Load, Meter, Wanted, wanted

STATS = ("windows", "rollbacks", "rolled_back_tokens", "direct_tokens")
PLAIN = ("vllm", "invariant")
"""They know no deterministic requests."""


@dataclass
class Run:
    """One load at one server."""

    meter: Meter
    waits: Latencies
    committed: int = 0
    stats: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATS, 0))
    requests: int = 0
    events: int = 0

    def found(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.meter.found() | {
            "waits": self.waits.found(), "stats": self.stats, "committed": self.committed,
            "requests": self.requests, "events": self.events,
        }  # fmt: skip


class Client:
    """Reads token ids from each event: both servers send them where return_token_ids asks for it."""

    def __init__(self, http: aiohttp.ClientSession, vocab: int) -> None:
        self.http, self.vocab = http, vocab

    async def flow(self, server: Server, load: Load, seed: str, tok_s: float | None = None) -> dict[str, Any]:
        """Requests enter as others end; with tok_s they come at random, at a share of that rate. Raises
        RuntimeError for a reply that is not whole."""
        run = Run(Meter(load), Latencies(load.ramp_s, load.seconds))
        source, spent = wanted(load, seed, self.vocab), time.process_time()
        if tok_s is None:
            readers = [asyncio.create_task(self._again(server, source, run)) for _ in range(load.in_flight)]
        else:
            readers = [asyncio.create_task(self._arrive(server, source, run, rate_of(load, tok_s), seed))]
        try:
            done, _ = await asyncio.wait(readers, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
            for reader in done:
                reader.result()  # raises what it raised
            spent = time.process_time() - spent
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return run.found() | {"client_cpu": spent / load.seconds}

    async def _again(self, server: Server, source: Iterator[Wanted], run: Run) -> None:
        while not run.meter.over:
            await self._one(server, next(source), run, 0.0)

    async def _arrive(
        self, server: Server, source: Iterator[Wanted], run: Run, rate: float, seed: str
    ) -> None:
        rng, at = random.Random(f"arrivals {seed}"), 0.0
        async with asyncio.TaskGroup() as group:
            while not run.meter.over:
                late_s = time.perf_counter() - run.meter.began - at
                if late_s < 0:
                    await asyncio.sleep(-late_s)
                    late_s = 0.0
                group.create_task(self._one(server, next(source), run, late_s))
                at += rng.expovariate(rate)

    async def _one(self, server: Server, one: Wanted, run: Run, late_s: float) -> None:
        body = {
            "model": "m", "prompt": list(one.prompt), "max_tokens": one.tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        } | server.extra  # fmt: skip
        if one.deterministic and server.kind not in PLAIN:
            body["deterministic"] = True
        run.waits.started(one.number, one.deterministic, late_s)
        url, got = f"http://127.0.0.1:{server.port}/v1/completions", 0
        async with self.http.post(url, json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{server.kind}: {reply.status}: {(await reply.text())[:500]}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                run.events += 1
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{server.kind}: {str(event['error'])[:500]}")
                tokens = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
                got += tokens
                run.waits.came(one.number, tokens)
                run.meter.add(tokens, one.deterministic)
                self._cost(run, event.get("llm42"), one)
        if got != one.tokens:
            raise RuntimeError(f"{server.kind}: {got} tokens of {one.tokens}")
        run.waits.ended(one.number)
        run.requests += 1

    @staticmethod
    def _cost(run: Run, told: dict[str, Any] | None, one: Wanted) -> None:
        """What a deterministic request cost, in its last event."""
        if one.deterministic and told and "rollbacks" in told:
            run.committed += one.tokens
            for key in STATS:
                run.stats[key] += int(told.get(key, 0))
