"""What determinism costs vLLM on one GPU: throughput kept with a verifier beside it, all deterministic.

    python -m benchmarks.engine.early_cost --out DIR [--parts shared invariant] [--requests 512] \
        [--concurrent 256]

8B shape, bf16, random weights, prompts of 1,024 tokens and outputs of 256. `shared`: an untouched AsyncLLM,
the adapter without and with deterministic requests, on one vLLM beside one verifier process (which computes
every row, prompts included). Random weights do not agree between engines, so a window's candidates are taken
as accepted whatever the verifier drew: this measures the cost of verification, not of rollbacks. `invariant`:
vLLM again, with VLLM_BATCH_INVARIANT=1. vLLM keeps cuBLAS's workspace, the verifier runs without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Figure, arguments, report
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

PROMPT, OUTPUT, MAX_LEN, VOCAB = 1024, 256, 2048, 128256
KV_TOKENS = 256 * (PROMPT + OUTPUT + 128)
BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024)
VERIFIER_ROWS_S = 35_600
"""Rows a second of a verifier alone on the device: results/h200-verifier.json."""


def verifier_process(pipe: Pipe) -> None:
    """Serves (number, windows) with (number, commits) until None comes."""
    from benchmarks.lib.random_model import LLAMA_8B, random_model
    from llm42.cache import BlockPool, KVCache
    from llm42.verifier.cuda.runner import CudaRunner
    from llm42.verifier.scheduler import Verifier
    from llm42_kernels.cuda import cuda_operators

    model, c = random_model(LLAMA_8B, max_len=MAX_LEN), LLAMA_8B
    kv = KVCache(c.num_layers, KV_TOKENS // 128, 128, c.num_kv_heads, c.head_dim, model.dtype, "cuda")
    runner = CudaRunner(model, cuda_operators(), kv, BUCKETS, MAX_LEN)
    verifier = Verifier(
        runner, BlockPool(KV_TOKENS // 128, 128), buckets=BUCKETS, max_len=MAX_LEN, vocab_size=VOCAB,
        fingerprint="f", max_waiting=1 << 20,
    ).start()  # fmt: skip
    lock = threading.Lock()

    def send(item: Any) -> None:
        with lock:
            pipe.send(item)

    send("ready")
    while (message := pipe.recv()) is not None:
        kind, number, payload = message
        if kind == "release":
            verifier.release(payload)
        elif kind == "stats":
            send((number, verifier.stats()))
        else:
            verifier.submit(payload).add_done_callback(lambda f, n=number: send((n, f.result())))
    verifier.close()


class RemoteVerifier:
    """llm42.session.interfaces.VerifierClient over the pipe; every candidate counts as accepted."""

    kv_tokens = KV_TOKENS

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._numbers = pipe, iter(range(1 << 62))
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except EOFError:  # the verifier has ended
                return
            loop, future = self._waiting.pop(number)
            loop.call_soon_threadsafe(lambda f=future, a=answer: f.done() or f.set_result(a))

    async def _ask(self, kind: str, payload: Any) -> Any:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = (loop, future)
        self._pipe.send((kind, number, payload))
        return await future

    async def verify(self, windows: Sequence[Any]) -> list[Any]:
        """One window at a time; the commit's tokens are the window's own."""
        (window,) = windows
        commit = await self._ask("verify", window)
        last = len(window.candidates) - 1
        entry = replace(commit.logprobs[0], top=())
        return [
            replace(commit, accepted=last, next_token=window.candidates[last], logprobs=(entry,) * (last + 1))
        ]

    def release(self, request_id: str) -> None:
        """Passes it on."""
        self._pipe.send(("release", 0, request_id))

    async def stats(self) -> Any:
        """The verifier's counters."""
        return await self._ask("stats", None)


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts, different in every run, so that no prefix cache helps."""
    import random

    rng = random.Random(seed)
    return [tuple(rng.randrange(3, 128000) for _ in range(PROMPT)) for _ in range(count)]


async def closed_loop(count: int, concurrent: int, one: Any) -> dict[str, float]:
    """Runs `one(i)` for i < count, `concurrent` at a time; output tokens per second."""
    gate = asyncio.Semaphore(concurrent)
    began = time.perf_counter()

    async def guarded(i: int) -> None:
        async with gate:
            await one(i)

    await asyncio.gather(*(guarded(i) for i in range(count)))
    seconds = time.perf_counter() - began
    return {"tok_s": count * OUTPUT / seconds, "seconds": seconds, "tokens": count * OUTPUT}


def vllm_settings(directory: str, share: float) -> Any:
    """Settings of an engine on dummy weights of the 8B shape."""
    from llm42.config import Settings

    extra = {"load_format": "dummy"}
    tree = {
        "model": {"path": directory, "name": "8b", "device": "cuda", "max_model_len": MAX_LEN},
        "engine": {
            "kind": "vllm",
            "vllm": {"gpu_memory_utilization": share, "max_num_seqs": 256, "extra_args": extra},
        },
        "session": {
            "mode": "verify",
            "min_window": 31,
            "start_window": 31,
            "max_window": 63,
            "commit_deadline_s": 5.0,
        },
    }
    return Settings.load(tree)


def engine_for(share: float) -> Any:
    """vLLM, started through the adapter."""
    from benchmarks.verifier.vllm_comparison import _model_directory
    from llm42.engine.vllm.engine import VllmEngine

    settings = vllm_settings(_model_directory(), share)
    began = time.perf_counter()
    engine = VllmEngine(settings).start()
    print(f"vLLM boot {time.perf_counter() - began:.0f} s: {engine.facts}", flush=True)
    return engine, settings


async def untouched(engine: Any, count: int, concurrent: int, seed: int) -> dict[str, float]:
    """AsyncLLM itself, in its own event loop, without the adapter."""
    connection, ids = engine._connection, prompts(count, seed)

    async def one(i: int) -> None:
        params = connection.make_params(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        prompt = connection.make_prompt(list(ids[i]))
        async for _ in connection.llm.generate(prompt, params, f"plain-{seed}-{i}"):
            pass

    run = asyncio.run_coroutine_threadsafe(closed_loop(count, concurrent, one), engine._loop)
    return await asyncio.wrap_future(run)


async def through(
    generator: Any, count: int, concurrent: int, seed: int, deterministic: bool
) -> dict[str, float]:
    """The driver over the adapter."""
    from llm42.protocol import Request

    ids = prompts(count, seed)

    async def one(i: int) -> None:
        request = Request(f"{seed}-{i}", ids[i], OUTPUT, deterministic=deterministic)
        tokens = 0
        async for delta in generator.generate(request):
            tokens += len(delta.token_ids)
        assert tokens == OUTPUT, tokens

    return await closed_loop(count, concurrent, one)


class NoText:
    """Stands for a tokenizer: text is not what is measured."""

    identity = ""

    def token_text(self, token: int) -> str:
        """Nothing."""
        return ""


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """One verifier, one vLLM beside it, four runs."""
    from llm42.session import driver

    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=verifier_process, args=(theirs,), daemon=True)
    began = time.perf_counter()
    os.environ.update(CUBLAS_ENVIRONMENT)
    process.start()
    for name in CUBLAS_ENVIRONMENT:
        del os.environ[name]
    assert mine.recv() == "ready"
    print(f"verifier {time.perf_counter() - began:.0f} s", flush=True)
    engine, settings = engine_for(args.utilization)
    driver.OutputText = _Silent  # type: ignore[misc,assignment]
    settings = settings.model_copy(
        update={"verifier": settings.verifier.model_copy(update={"kv_tokens": KV_TOKENS})}
    )
    verifier = RemoteVerifier(mine)
    generator = driver.Generator(engine, NoText(), settings, verifier)  # type: ignore[arg-type]
    out: dict[str, Any] = {"facts": engine.facts}

    async def all_runs() -> None:
        n, c = args.requests, args.concurrent
        await untouched(engine, 64, 64, 90)
        await through(generator, 64, 64, 91, True)
        for name, run in (
            ("untouched_a", lambda: untouched(engine, n, c, 1)),
            ("adapter_0", lambda: through(generator, n, c, 2, False)),
            ("untouched_b", lambda: untouched(engine, n, c, 3)),
            ("adapter_100", lambda: through(generator, n, c, 4, True)),
        ):
            before = await verifier.stats()
            out[name] = await run()
            after = await verifier.stats()
            out[name]["verifier"] = {
                key: getattr(after, key) - getattr(before, key)
                for key in ("windows", "steps", "rows", "padding_rows", "step_s", "queue_s")
            }
            print(name, out[name], flush=True)
            (args.out / "shared.json").write_text(json.dumps(out, indent=1))

    asyncio.run(all_runs())
    engine.close()
    mine.send(None)
    process.join(30)
    return out


class _Silent:
    """OutputText without text: detokenising is neither vLLM's nor the verifier's cost."""

    stopped = False

    @classmethod
    def of(cls, *_: Any) -> _Silent:
        return cls()

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        return "", len(tokens)

    def flush(self) -> str:
        return ""


def invariant(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's own batch-invariant mode, alone on the GPU with the same share of memory."""
    assert os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    engine, _ = engine_for(args.utilization)
    out: dict[str, Any] = {"facts": engine.facts}

    async def run() -> None:
        await untouched(engine, 64, 64, 90)
        out["untouched"] = await untouched(engine, args.requests, args.concurrent, 1)

    asyncio.run(run())
    print("invariant", out, flush=True)
    engine.close()
    return out


def figures_of(raw: dict[str, Any]) -> dict[str, Figure]:
    """The named figures of the parts that were run."""
    figures: dict[str, Figure] = {}
    if "shared" in raw:
        runs = raw["shared"]
        plain = (runs["untouched_a"]["tok_s"] + runs["untouched_b"]["tok_s"]) / 2
        rows = runs["adapter_100"]["verifier"]["rows"] / (runs["adapter_100"]["tokens"])
        # both take turns on the device: a token's own time, and that of its rows
        predicted = (1 / plain) / (1 / plain + rows / VERIFIER_ROWS_S)
        figures = {
            "untouched_tok_s": Figure(round(plain, 1), "output tokens/s", None, "higher"),
            "adapter_share": Figure(round(runs["adapter_0"]["tok_s"] / plain, 3), "ratio", 0.99, "higher"),
            "kept_100": Figure(round(runs["adapter_100"]["tok_s"] / plain, 3), "ratio", None, "higher"),
            "predicted_kept_100": Figure(round(predicted, 3), "ratio", None, "higher"),
            "rows_per_output_token": Figure(round(rows, 3), "rows"),
        }
    if "invariant" in raw:
        speed = raw["invariant"]["untouched"]["tok_s"]
        figures["invariant_tok_s"] = Figure(round(speed, 1), "output tokens/s", None, "higher")
        if "shared" in raw:
            figures["invariant_kept"] = Figure(round(speed / plain, 3), "ratio", None, "higher")
    return figures


def main() -> None:
    """Runs the parts, each in a process of its own, and writes DIR/h200-early-cost.json with what has been
    run there so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["shared", "invariant"])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--utilization", type=float, default=0.45)
    parser.add_argument("--part", choices=["shared", "invariant"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if args.part:
        result = {"shared": shared, "invariant": invariant}[args.part](args)
        (args.out / f"{args.part}.json").write_text(json.dumps(result, indent=1))
        return
    for part in args.parts:
        command = [sys.executable, "-m", "benchmarks.engine.early_cost", *sys.argv[1:], "--part", part]
        more = {"VLLM_BATCH_INVARIANT": "1"} if part == "invariant" else {}
        subprocess.run(command, env=os.environ | more, check=True)
    files = {part: args.out / f"{part}.json" for part in ("shared", "invariant")}
    raw = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    print(report("h200-early-cost", figures_of(raw), raw | {"arguments": arguments(args)}, args.out))


if __name__ == "__main__":
    main()
