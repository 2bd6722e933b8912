"""What a verifier costs its host when the device costs nothing: CPU time a step of all its threads, with 256
requests that are decoded directly and come and go.

    python -m benchmarks.direct.host [--requests 256] [--output 256] [--steps 400] [--out DIR]
    python -m benchmarks.direct.host --profile      where the step thread's time goes

A runner that only waits takes 13 ms a step and makes its results as the CUDA runner makes them. Commits leave
through the actor's outbox: a second process is the replica, with its own `Exchange` for all requests, whose
calls come and go as pickled messages over a socket, in place of Ray's. It renews credit when half is used.
`host_ms_N` is the verifier's process alone: step thread, event loop, pickling. Not in it: Ray's own threads,
and packing a step for the GPU. `pack_ms_N` is what the CUDA runner's packing takes of one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import os
import pickle
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.direct.alone import BLOCK, BUCKETS, CREDIT, VOCAB, Waiting
from benchmarks.lib.report import RESULTS, Figure, arguments, report
from llm42.cache import BlockPool
from llm42.protocol import Commit, SamplingParams, Window
from llm42.session.driver import DELTA_S
from llm42.verifier.cuda.pack import Layout, StepPacker
from llm42.verifier.cuda.runner import PARTIAL_TOKENS, PARTIALS, attention_shape
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier
from llm42_kernels.attention_plan import Planner
from llm42_serve.replica.exchange import Exchange
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Down, Up

PROMPT, SEGMENTS, SMS = 256, 5, 132
PREDICTION = "3.2 ms: 2.4 for the step thread (9 us a request), 0.5 for packing commits, 0.3 for the loop"


# ---- the replica's process


async def replica(port: int, requests: int, tokens: int, interval_s: float) -> None:
    """So many requests at a time, until the verifier's process closes the connection. The first ones end one
    after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    waiting, numbers = dict[int, asyncio.Future[Down]](), itertools.count()

    async def call(up: Up) -> Down:
        number, future = next(numbers), asyncio.get_running_loop().create_future()
        waiting[number] = future
        await _send(writer, (number, up))
        return await future

    exchange = Exchange("replica", call, lambda: interval_s)
    for i in range(requests):
        _Request(exchange, tokens * (i + 1) // requests + 1, tokens)
    while (message := await _receive(reader)) is not None:
        number, down = message
        waiting.pop(number).set_result(down)
    exchange.close()


class _Request:
    """Renews its credit when half is used; when it has ended, another one begins."""

    numbers = itertools.count()

    def __init__(self, exchange: Exchange, tokens: int, tokens_after: int) -> None:
        number = next(self.numbers)
        prompt = tuple((7919 * number + 104729 * j + 13) % VOCAB for j in range(PROMPT))
        self.exchange, self.name, self.renew_at = exchange, f"r{number}", PROMPT + CREDIT // 2
        self.end, self.tokens_after, sampling = PROMPT + tokens, tokens_after, SamplingParams()
        window = Window(self.name, prompt, PROMPT, (), sampling, credit=CREDIT, max_len=self.end)
        exchange.follow(window, self)

    def __call__(self, answer: Any) -> None:
        if not isinstance(answer, Commit):
            raise SystemExit(f"{self.name}: {answer}")
        if answer.end >= self.end:
            self.exchange.release(self.name)
            _Request(self.exchange, self.tokens_after, self.tokens_after)
        elif answer.end >= self.renew_at:
            self.renew_at = answer.end + CREDIT // 2
            self.exchange.renew(self.name, answer.end + CREDIT)


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message, protocol=5)
    writer.write(len(data).to_bytes(4, "little") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# ---- the verifier's process


class Steps:
    """How many have been completed, and the step thread's CPU time."""

    def __init__(self, verifier: Verifier) -> None:
        self.count, self.thread_s = 0, 0.0
        verifier.on_step = self._one

    def _one(self, _seconds: float) -> None:
        self.count, self.thread_s = self.count + 1, time.thread_time()

    def now(self) -> tuple[int, float, float, float]:
        """Steps, CPU seconds of the process, of the step thread, and wall seconds."""
        return self.count, time.process_time(), self.thread_s, time.monotonic()


def serve(verifier: Verifier) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """The actor's side of a connection."""
    boxes, under_way = Outboxes(verifier), set[asyncio.Task[None]]()

    async def answer(number: int, up: Up, writer: asyncio.StreamWriter) -> None:
        down = await boxes.exchange(up)
        with suppress(ConnectionError):  # the replica's process was ended
            await _send(writer, (number, down))

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (message := await _receive(reader)) is not None:
            task = asyncio.get_running_loop().create_task(answer(*message, writer))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    return connection


async def measure(args: argparse.Namespace, verifier: Verifier) -> dict[str, Any]:
    """So many requests that come and go, over some segments of steps."""
    steps = Steps(verifier)
    server = await asyncio.start_server(serve(verifier), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.direct.host", "--replica", str(port)]
    options = [
        "--requests",
        str(args.requests),
        "--output",
        str(args.output),
        "--interval-s",
        str(args.interval_s),
    ]
    child = subprocess.Popen(command + options)
    try:
        while steps.count < args.output:  # until those are gone that began together
            await asyncio.sleep(0.05)
        marks, before = [steps.now()], verifier.stats().decoded
        for _ in range(SEGMENTS):
            while steps.count < marks[-1][0] + args.steps // SEGMENTS:
                await asyncio.sleep(0.1)
            marks.append(steps.now())
        decoded = (verifier.stats().decoded - before) / (marks[-1][0] - marks[0][0])
    finally:
        child.terminate()
        child.wait()
        await asyncio.sleep(0.2)  # the connection sees it
        server.close()
    found: dict[str, Any] = {"decoded_per_step": round(decoded, 1), "steps": steps.count}
    for at, name in ((1, "host_ms"), (2, "step_thread_ms"), (3, "wall_ms")):
        pairs = zip(marks[1:], marks, strict=False)
        found[name] = [round(1e3 * (a[at] - b[at]) / (a[0] - b[0]), 3) for a, b in pairs]
    return found


def pack_ms(requests: int) -> float:
    """The CUDA runner's packing of a step of so many requests, each with one row; median."""
    bucket = next(b for b in BUCKETS if b >= requests)
    shape = attention_shape(32, 8, 128, BLOCK)
    planner = Planner(shape, SMS * shape.large.per_sm, PARTIALS, PARTIAL_TOKENS)
    layout = Layout(bucket, bucket + PARTIALS, bucket * 64)
    packer, flat = StepPacker(layout, planner, BLOCK), np.zeros(layout.total, np.int32)
    tokens = list(range(1024))
    plain, blocks = SamplingParams(), list(range(16))
    rows = [SequenceRows(tokens, 1000, 1, blocks, 1000, PROMPT, plain) for _ in range(requests)]
    took = []
    for _ in range(30):
        began = time.thread_time()
        packer.pack(layout.views(flat), bucket, rows)
        took.append(1e3 * (time.thread_time() - began))
    return statistics.median(took)


def made(args: argparse.Namespace) -> tuple[Verifier, cProfile.Profile]:
    """A verifier whose runner only waits."""
    blocks = 2 * args.requests * (-(-(PROMPT + args.output) // BLOCK) + 2)
    profile = cProfile.Profile(time.thread_time)
    verifier = Verifier(
        Waiting(args.device_ms / 1e3), BlockPool(blocks, BLOCK), buckets=BUCKETS, max_len=32768,
        vocab_size=VOCAB, fingerprint="f", max_waiting=1 << 20,
        on_thread_start=profile.enable if args.profile else lambda: None,
    )  # fmt: skip
    return verifier.start(), profile


def main() -> None:
    """Writes results/cpu-direct-host.json, or prints a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output", type=int, default=256, help="tokens of a request")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device-ms", type=float, default=13.0)
    parser.add_argument("--interval-s", type=float, default=0.05, help="session.commit_interval_s")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--replica", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.interval_s = max(args.interval_s, args.requests * DELTA_S)  # as Following has it
    if args.replica:
        asyncio.run(replica(args.replica, args.requests, args.output, args.interval_s))
        return
    verifier, profile = made(args)
    found = asyncio.run(measure(args, verifier))
    verifier.close()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        print(found)
        return
    figures = {
        f"host_ms_{args.requests}": Figure(statistics.median(found["host_ms"]), "ms per step", 4.0),
        f"pack_ms_{args.requests}": Figure(round(pack_ms(args.requests), 3), "ms per step"),
    }
    raw = {
        "prediction": PREDICTION,
        "options": arguments(args),
        "found": found,
        "load_average": os.getloadavg(),
    }
    print(report("cpu-direct-host", figures, raw, args.out))
    print({name: figure.value for name, figure in figures.items()}, found)


if __name__ == "__main__":
    main()
