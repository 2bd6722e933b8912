"""One of two verifiers is killed under live streams that they decode by themselves: how long does each stream
wait for its next token? On CPUs with a tiny model.

    python -m benchmarks.direct.killed [--streams 256] [--tokens 160] [--rounds 3]

Streams over HTTP, all at once; the kill (SIGKILL) comes when half of them have begun. A wait is the time from
the kill to the next token of a stream that had begun and not ended by then, whichever verifier it was on: the
others share theirs with the newcomers. Every stream must end whole, else there is no figure; its tokens are
compared with the oracle's in tests/chaos/test_many_streams.py.
Predicted: p50 1 s, p99 6 s (the lost ones wait for their prompts and outputs to be computed again beside the
streams that go on, on the same two cores as the successor's start).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx

from llm42_serve.launch import prepare_environment

prepare_environment()

from benchmarks.lib.report import Figure, arguments, report  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42_serve.launch import Service  # noqa: E402
from llm42_serve.verifiers.names import get_actor  # noqa: E402
from tests.chaos.support import App, kill  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.support import prompt_of, write_model  # noqa: E402


@dataclass
class Stream:
    """When its tokens came (time.monotonic), and how it ended."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None


def settings_for(directory: Path, streams: int) -> Settings:
    """One replica, two verifiers, room for all streams in either."""
    tree = {
        "model": {"path": str(directory), "name": "tiny", "max_model_len": 768},
        "engine": {"threads": 1, "kv_tokens": 1024, "max_batch": streams},
        "verifier": {"certificate_dir": str(directory), "kv_tokens": 131072, "audit_share": 0.0},
        "session": {"mode": "direct"},
        "server": {"port": free_port(), "verifiers": 2},
    }
    return Settings.load(tree)


async def read(app: App, http: httpx.AsyncClient, number: int, tokens: int, into: Stream) -> None:
    """One stream of `tokens` tokens."""
    body = {
        "model": "tiny", "prompt": list(prompt_of(number, 32)), "max_tokens": tokens, "stream": True,
        "temperature": 1.0, "seed": number, "deterministic": True, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    async with http.stream("POST", f"{app.url}/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", ()):
                if ids := choice.get("token_ids"):
                    into.times.append(time.monotonic())
                    into.tokens += len(ids)
                into.finish = choice.get("finish_reason") or into.finish


async def one_round(app: App, count: int, tokens: int) -> dict[str, Any]:
    """Waits of one kill, in seconds."""
    await app.until(lambda h: h["verifiers_ready"] == 2, 300.0)
    streams = [Stream() for _ in range(count)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        tasks = [asyncio.create_task(read(app, http, i, tokens, s)) for i, s in enumerate(streams)]
        while sum(bool(s.times) for s in streams) < count // 2:
            await asyncio.sleep(0.01)
        held = {name: (await get_actor(name).stats.remote())["following"] for name in app.verifier_names()}
        pids = await app.verifier_pids()
        killed = time.monotonic()
        kill(pids[:1])
        await asyncio.gather(*tasks)
    if not all(s.tokens == tokens and s.finish == "length" for s in streams):
        raise SystemExit("a stream did not end whole")
    waits = sorted(
        next(t for t in s.times if t > killed) - killed for s in streams if s.times[0] <= killed < s.times[-1]
    )
    return {"following": held, "waits_s": [round(w, 3) for w in waits]}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them is not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(app: App, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds."""
    return [await one_round(app, args.streams, args.tokens) for _ in range(args.rounds)]


def main() -> None:
    """Runs everything and writes results/cpu-direct-killed.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = settings_for(write_model(Path(mkdtemp())), args.streams)
    with Service(settings) as service:
        service.wait_deterministic()
        app = App(service, "", settings)
        app.url, app.name = service.url, "llm42"
        rounds = asyncio.run(measure(app, args))
    raw = {"rounds": rounds, "load_average": os.getloadavg(), "arguments": arguments(args)}
    figures = {
        f"wait_p{round(100 * q)}_s": Figure(
            round(statistics.median(quantile(r["waits_s"], q) for r in rounds), 2), "s"
        )
        for q in (0.5, 0.99)
    }
    print(report("cpu-direct-killed", figures, raw))


if __name__ == "__main__":
    main()
