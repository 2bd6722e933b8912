"""What a fast-path replica's own process spends, beside the device: per token, and per window.

    python -m benchmarks.service.replica_cost

`driver`: 256 best-effort requests on the vLLM adapter over a stand-in for AsyncLLM that makes a token for
each every 13 ms; CPU per token of adapter, driver and detokenisation, passing tokens on one by one, at the
default interval, and for clients that wait for the whole. `calls`: windows of 25 candidates after 400 tokens
between two actors, one call each or over an exchange (replica/exchange.py), 8 to 256 of them at a time; the
verifying side answers after 20 ms. On few cores the two actors share them: compare the columns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
import uuid
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llm42_serve.launch import prepare_environment

prepare_environment()

import ray  # noqa: E402

from benchmarks.lib.report import RESULTS, Figure, report  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42.engine.vllm.connection import Connection  # noqa: E402
from llm42.engine.vllm.engine import VllmEngine  # noqa: E402
from llm42.protocol import Commit, Failure, Request, SamplingParams, TokenLogprob, Window  # noqa: E402
from llm42.session.driver import Generator  # noqa: E402
from llm42.text.tokenizer import Tokenizer  # noqa: E402
from llm42_serve.replica.exchange import Exchange  # noqa: E402
from llm42_serve.verifiers.outboxes import Outboxes  # noqa: E402
from llm42_serve.wire import Down, Up  # noqa: E402

REQUESTS, TOKENS, STEP_S, WINDOWS, VERIFY_S = 256, 128, 0.013, 4096, 0.02
VOCAB = 49000


class StandIn:
    """Steps every request it has."""

    errored = False

    def __init__(self) -> None:
        self.live: dict[str, tuple[asyncio.Queue[Any], itertools.count[int], int]] = {}
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due += STEP_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for name, (queue, numbers, limit) in list(self.live.items()):
                number = next(numbers)
                finish = "length" if number >= limit else None
                token = (7919 * number + len(name)) % VOCAB + 3
                new = SimpleNamespace(token_ids=[token], finish_reason=finish, logprobs=None)
                queue.put_nowait(SimpleNamespace(outputs=[new], finished=bool(finish), num_cached_tokens=0))

    async def generate(self, _prompt: Any, params: Any, name: str, priority: int = 0) -> Any:
        """As AsyncLLM."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.live[name] = (queue, itertools.count(1), params["max_tokens"])
        try:
            while True:
                output = await queue.get()
                yield output
                if output.finished:
                    return
        finally:
            self.live.pop(name, None)

    async def abort(self, name: str) -> None:
        """As AsyncLLM."""
        self.live.pop(name, None)

    def shutdown(self) -> None:
        """As AsyncLLM."""
        self.task.cancel()


def driver(path: str) -> dict[str, float]:
    """CPU microseconds per token."""
    found = {}
    for name, interval_s, stream in (("each", 0.0, True), ("interval", 0.05, True), ("whole", 0.05, False)):
        tree = {"engine": {"kind": "vllm"}, "server": {"stream_interval_s": interval_s}}
        settings = Settings.load(tree)
        engine = VllmEngine(
            settings, lambda _: Connection(StandIn(), lambda **k: k, list, RuntimeError, VOCAB + 3, 1 << 20)
        ).start()
        generator = Generator(engine, Tokenizer.load(Path(path)), settings)

        async def one(i: int, generator: Generator = generator, stream: bool = stream) -> int:
            request = Request(f"r{i}", tuple(range(5, 40)), TOKENS, seeded=False, stream=stream)
            async with aclosing(generator.generate(request)) as deltas:
                return sum([len(d.token_ids) async for d in deltas])

        async def every(one: Any = one) -> int:
            return sum(await asyncio.gather(*(one(i) for i in range(REQUESTS))))

        began = time.process_time()
        tokens = asyncio.run(every())
        found[name] = 1e6 * (time.process_time() - began) / tokens
        engine.close()
    return found


class Steps:
    """Answers windows after VERIFY_S, in the actor's loop."""

    def submit(self, window: Window) -> Future[Commit | Failure]:
        """As a verifier's."""
        answer: Future[Commit | Failure] = Future()
        asyncio.get_running_loop().call_later(VERIFY_S, _answer, window, answer)
        return answer

    def release(self, request_id: str) -> None:
        """Nothing is held."""

    def load(self, request: object) -> None:
        """Nothing is known of how busy it is."""

    def progressed_s(self, request_id: str) -> float:
        """It always goes on."""
        return 0.0


def _answer(window: Window, answer: Future[Commit | Failure]) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_result(_commit(window))


def _commit(w: Window) -> Commit:
    """All candidates stand."""
    found = tuple(TokenLogprob(t, -1.5) for t in (*w.candidates, 7))
    return Commit(w.request_id, len(w.tokens), len(w.candidates), 7, found, "fp")


class Verifying:
    """Answers windows."""

    def __init__(self) -> None:
        self.boxes = Outboxes(Steps())  # type: ignore[arg-type]

    async def verify(self, window: Window) -> Commit:
        """One, after VERIFY_S."""
        await asyncio.sleep(VERIFY_S)
        return _commit(window)

    async def exchange(self, up: Up) -> Down:
        """As a verifier's actor."""
        return await self.boxes.exchange(up)

    def cpu_s(self) -> float:
        """Seconds that the process has used."""
        return time.process_time()


class Asking:
    """Sends windows."""

    def __init__(self, verifier: Any) -> None:
        self.verifier = verifier

    async def run(self, concurrent: int, how: str) -> tuple[float, float]:
        """Windows per second, and a window's median time in milliseconds."""
        self.exchange = Exchange(uuid.uuid4().hex, self._call, lambda: 0.05)
        ask = self._alone if how == "single" else self._exchanged
        took: list[float] = []

        async def loop(number: int) -> None:
            name, tokens = f"cmpl-{number:032}", tuple(range(400))
            window = Window(name, tokens, 256, tuple(range(25)), SamplingParams())
            for _ in range(WINDOWS // concurrent):
                began = time.perf_counter()
                await ask(window)
                took.append(1000 * (time.perf_counter() - began))

        began = time.perf_counter()
        await asyncio.gather(*(loop(i) for i in range(concurrent)))
        self.exchange.close()
        return len(took) / (time.perf_counter() - began), statistics.median(took)

    async def _call(self, up: Up) -> Down:
        found: Down = await self.verifier.exchange.remote(up)
        return found

    async def _alone(self, window: Window) -> None:
        await self.verifier.verify.remote(window)

    async def _exchanged(self, window: Window) -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.exchange.follow(window, answer.set_result)
        assert isinstance(await answer, Commit)

    def cpu_s(self) -> float:
        """Seconds that the process has used."""
        return time.process_time()


def calls() -> dict[str, dict[str, float]]:
    """By way and windows at a time: rate, latency, CPU microseconds per window of either side."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    options = {"num_cpus": 0.1, "max_concurrency": 1000}
    verifier = ray.remote(Verifying).options(**options).remote()
    asking = ray.remote(Asking).options(**options).remote(verifier)
    ray.get(asking.run.remote(8, "exchanged"))
    found = {}
    for concurrent, name in itertools.product((8, 64, 256), ("single", "exchanged")):
        before = ray.get([verifier.cpu_s.remote(), asking.cpu_s.remote()])
        rate, median = ray.get(asking.run.remote(concurrent, name))
        after = ray.get([verifier.cpu_s.remote(), asking.cpu_s.remote()])
        used = [1e6 * (b - a) / WINDOWS for a, b in zip(before, after, strict=True)]
        found[f"{name}_{concurrent}"] = {
            "windows_s": rate, "median_ms": median, "verifier_us": used[0], "replica_us": used[1]
        }  # fmt: skip
        print(name, concurrent, found[f"{name}_{concurrent}"], flush=True)
    ray.shutdown()
    return found


def main() -> None:
    """Runs both and writes results/cpu-replica-cost.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=Settings().model.path, help="whose tokenizer is used")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    raw: dict[str, Any] = {"driver_us": driver(args.model), "calls": calls()}
    figures = {f"driver_{k}_us": Figure(round(v, 1), "us per token") for k, v in raw["driver_us"].items()}
    for name, run in raw["calls"].items():
        figures[f"windows_s_{name}"] = Figure(round(run["windows_s"]), "windows/s", better="higher")
        figures[f"window_{name}_us"] = Figure(round(run["verifier_us"]), "us per window at the verifier")
    raw["load_average"] = os.getloadavg()
    print(report("cpu-replica-cost", figures, raw, args.out))


if __name__ == "__main__":
    main()
