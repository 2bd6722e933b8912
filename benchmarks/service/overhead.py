"""The service's own overhead and its recovery, on CPUs with a tiny model: Ray, HTTP and our code are left.

    python -m benchmarks.service.overhead [--requests 300]

router_added_ms_p50: median time of a one-token best-effort answer over HTTP, minus that of the same engine
called in this process. messages_s_N: server-sent events per second over N streams of best-effort tokens.
recover_*_s: from SIGKILL of the only process of that role to the next right answer of the kind it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx

from llm42_serve.launch import prepare_environment

prepare_environment()

from benchmarks.lib.report import Figure, arguments, report  # noqa: E402
from llm42.checkpoint.load import load_for  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42.engine.torch.engine import TorchEngine  # noqa: E402
from llm42.protocol import Request, SamplingParams  # noqa: E402
from llm42.session.driver import Generator  # noqa: E402
from llm42_serve.launch import Service  # noqa: E402
from tests.chaos.support import App, best_effort, deterministic, kill  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.support import prompt_of, write_model  # noqa: E402

PROMPT = prompt_of(1, 16)


def settings_for(directory: Path) -> Settings:
    """One process of each role, tokens sent as they come."""
    tree = {
        "model": {"path": str(directory), "name": "tiny", "max_model_len": 768},
        "engine": {"threads": 1, "kv_tokens": 32768, "max_batch": 64},
        "verifier": {"certificate_dir": str(directory), "kv_tokens": 16384, "audit_share": 0.0},
        "session": {"mode": "verify"},
        "server": {"port": free_port(), "stream_interval_s": 0.0},
    }
    return Settings.load(tree)


async def direct_ms(settings: Settings, count: int) -> float:
    """The engine called in this process: median milliseconds of a one-token answer."""
    model, tokenizer = load_for(settings)
    engine = TorchEngine(model, settings.engine).start()
    generator, taken = Generator(engine, tokenizer, settings), list[float]()
    for i in range(count):
        began = time.perf_counter()
        async for _ in generator.generate(Request(f"r{i}", PROMPT, 1)):
            pass
        taken.append(time.perf_counter() - began)
    engine.close()
    return 1000 * statistics.median(taken)


async def http_ms(app: App, count: int) -> float:
    """The same over HTTP, one connection."""
    body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0}
    taken = []
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(count):
            began = time.perf_counter()
            (await http.post(f"{app.url}/v1/completions", json=body)).raise_for_status()
            taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


async def messages_s(app: App, streams: int, tokens: int = 128) -> float:
    """Events per second over all streams."""
    events = 0

    async def one(http: httpx.AsyncClient, number: int) -> None:
        nonlocal events
        body = {
            "model": "tiny", "prompt": list(prompt_of(number, 16)), "max_tokens": tokens, "stream": True,
            "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        async with http.stream("POST", f"{app.url}/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                events += line.startswith("data: {")

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        began = time.perf_counter()
        await asyncio.gather(*(one(http, i) for i in range(streams)))
        return events / (time.perf_counter() - began)


async def recovery_s(app: App, pids: list[int], request: Request, want: Any) -> float:
    """Seconds from the kill to the next whole, right answer."""
    kill(pids)
    began = time.perf_counter()
    while True:
        got = await app.stream(replace(request, request_id="again"))
        if got.finish == "length" and (want is None or (got.tokens, got.logprobs) == want):
            return time.perf_counter() - began
        await asyncio.sleep(0.05)


async def measure(service: Service, settings: Settings, count: int) -> dict[str, Any]:
    """Every figure's raw values."""
    app = App(service, "", settings)
    app.url, app.name = service.url, "llm42"
    raw: dict[str, Any] = {}
    for request in (deterministic(1), best_effort(1)):
        await app.stream(request)
    raw["http_ms"] = await http_ms(app, count)
    raw["messages_s"] = {n: [await messages_s(app, n) for _ in range(3)] for n in (16, 64)}
    request = Request("d", PROMPT, 8, SamplingParams(), True, num_logprobs=0)
    got = await app.stream(request)
    want = (got.tokens, got.logprobs)
    plain = replace(request, deterministic=False)
    raw["recover"] = {
        "verifier": await recovery_s(app, await app.verifier_pids(), request, want),
        "replica": await recovery_s(app, app.pids("ray::ServeReplica:{name}:FastPath"), plain, None),
        "ingress": await recovery_s(app, app.pids("ray::ServeReplica:{name}:Ingress"), plain, None),
    }
    return raw


def main() -> None:
    """Runs everything and writes results/cpu-service.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    args = parser.parse_args()
    settings = settings_for(write_model(Path(mkdtemp())))
    direct = asyncio.run(direct_ms(settings, args.requests))
    with Service(settings) as service:
        service.wait_deterministic()
        raw = asyncio.run(measure(service, settings, args.requests))
    raw |= {"direct_ms": direct, "load_average": os.getloadavg(), "arguments": arguments(args)}
    figures = {
        "router_added_ms_p50": Figure(round(raw["http_ms"] - direct, 2), "ms", None, "lower"),
        "messages_s_16": Figure(
            round(statistics.median(raw["messages_s"][16]), 1), "events/s", None, "higher"
        ),
        "messages_s_64": Figure(
            round(statistics.median(raw["messages_s"][64]), 1), "events/s", None, "higher"
        ),
        **{
            f"recover_{role}_s": Figure(round(seconds, 2), "s", None, "lower")
            for role, seconds in raw["recover"].items()
        },
    }
    print(report("cpu-service", figures, raw))


if __name__ == "__main__":
    main()
