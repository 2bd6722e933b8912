"""HTTP: `llm42 serve` in the canonical layout beside `vllm serve`, on one GPU; rounds in turns.

    python -m benchmarks.direct.http --out DIR [--limit-s 330]
    python -m benchmarks.direct.http --out DIR --cpu --servers ours    a tiny model on a CPU: tries the script

Both are alive, each with KV for what runs at once; an 8B's shape with random weights, SmolLM2's vocabulary,
bfloat16. One client process with one event loop sends --requests completions, at most --in-flight at a time,
as token ids, whole replies (`whole`) or streams (`stream`). Ours are deterministic. vLLM's --stream-interval
is in tokens: --stream-interval says how many come together in a delta of ours, which is in the result
(`chunks`: events of a stream). client_cpu: the client's CPU seconds for each second; above 0.7 the client is
what is measured, and the run says so.

kept_MODE is the median over the rounds of ours / vLLM. DIR/NAME.json is written after each round, a server's
output is in DIR/SERVER.log. `--layout direct`: a fast path that gets nothing to do, and session.mode direct.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.direct.model import add_arguments, model_of
from benchmarks.direct.side import prompts_of
from benchmarks.lib.report import Figure, arguments, report
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT
from tests.conftest import free_port

PREDICTED = {"kept_whole": 0.95, "kept_stream": 0.95}
TARGET, CLIENT_LIMIT = 0.95, 0.7
MODES = ("whole", "stream")
KV_TOKEN_BYTES = 32 * 2 * 8 * 128 * 2


@dataclass
class Server:
    """One of the two, as a process of its own."""

    kind: str
    command: list[str]
    environment: dict[str, str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    ready_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    """Of every request to it."""

    def start(self, out: Path) -> None:
        """Its output goes to out/KIND.log. cuBLAS is as it comes; ours sees to its own processes."""
        plain = {key: value for key, value in os.environ.items() if key not in CUBLAS_ENVIRONMENT}
        with (out / f"{self.kind}.log").open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=plain | self.environment,
                start_new_session=True,
            )  # fmt: skip

    async def ready(self, http: aiohttp.ClientSession, began: float, limit_s: float) -> None:
        """Raises RuntimeError."""
        assert self.process is not None
        while time.monotonic() - began < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.kind} ended with {self.process.returncode}: see {self.kind}.log")
            try:
                async with http.get(f"http://127.0.0.1:{self.port}/health") as reply:
                    text = await reply.read()
                    told = json.loads(text) if text else {}
                    if reply.status == 200 and told.get("deterministic", True):
                        self.ready_s = round(time.monotonic() - began, 1)
                        return
            except (aiohttp.ClientError, TimeoutError, ValueError):
                pass
            await asyncio.sleep(0.3)
        raise RuntimeError(f"{self.kind} was not ready in {limit_s:.0f} s: see {self.kind}.log")

    def stop(self) -> None:
        """Ends it and what it has started."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def ours(args: argparse.Namespace, path: str, length: int, kv_tokens: int) -> Server:
    """`llm42 serve`."""
    port, file = free_port(), args.out / "ours.settings.json"
    tree: dict[str, Any] = {
        "model": {
            "path": path, "name": "m", "device": "cpu" if args.cpu else "cuda", "max_model_len": length,
        },
        "verifier": {
            "kv_tokens": kv_tokens, "audit_share": 0.0, "max_waiting": 4 * args.requests,
            "certificate_dir": str(args.out / "certificates"),
        },
        "server": {
            "verifiers": 1, "max_queued": 4 * args.requests, "ingress_replicas": args.ingresses,
            "fastpath_replicas": args.replicas,
        },
    }  # fmt: skip
    if args.layout == "canonical":
        tree["engine"] = {"kind": "canonical", "canonical": {"max_num_seqs": args.in_flight}}
    else:
        tree |= {"engine": {"max_batch": args.in_flight, "threads": 1}, "session": {"mode": "direct"}}
    file.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "llm42", "serve", "-c", str(file), "--port", str(port)]
    return Server("ours", command, {}, port, extra={"deterministic": True})


def vllm(args: argparse.Namespace, path: str, length: int, kv_tokens: int) -> Server:
    """`vllm serve` as it comes, but for memory and the stream interval."""
    port = free_port()
    options = {
        "model": path, "served-model-name": "m", "port": port, "host": "127.0.0.1", "max-model-len": length,
        "max-num-seqs": args.in_flight, "gpu-memory-utilization": 0.3,
        "kv-cache-memory-bytes": kv_tokens * KV_TOKEN_BYTES, "stream-interval": args.stream_interval,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return Server("vllm", command, {"VLLM_USE_FLASHINFER_SAMPLER": "0"}, port)


class Client:
    """One event loop."""

    def __init__(self, args: argparse.Namespace, http: aiohttp.ClientSession, vocab: int) -> None:
        self.args, self.http, self.vocab = args, http, vocab

    async def load(self, server: Server, mode: str, requests: int, output: int, seed: int) -> dict[str, Any]:
        """One round. Raises RuntimeError for a reply that is not whole."""
        gate, firsts, chunks = asyncio.Semaphore(self.args.in_flight), list[float](), list[int]()
        url, base = f"http://127.0.0.1:{server.port}/v1/completions", self._body(server, mode, output)
        prompts = list(prompts_of(str(seed), requests, self.args.input, self.vocab))

        async def one(prompt: list[int]) -> None:
            async with gate:
                began = time.perf_counter()
                async with self.http.post(url, json=base | {"prompt": prompt}) as reply:
                    if reply.status != 200:
                        raise RuntimeError(f"{server.kind}: {reply.status}: {(await reply.text())[:500]}")
                    first, events, tail = 0.0, 0, b""
                    async for data in reply.content.iter_any():
                        first = first or time.perf_counter() - began
                        events += data.count(b"data: {")
                        tail = (tail + data)[-2000:]
                firsts.append(first)
                chunks.append(events)
                if f'"completion_tokens":{output}'.encode() not in tail.replace(b" ", b""):
                    raise RuntimeError(f"{server.kind}: a reply of fewer tokens: {tail[-300:]!r}")

        began, spent = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(prompt))
        seconds = time.perf_counter() - began
        cpu = (time.process_time() - spent) / seconds
        ordered = sorted(firsts)
        return {
            "tok_s": requests * output / seconds, "seconds": seconds, "client_cpu": cpu,
            "first_ms_p50": 1e3 * statistics.median(ordered),
            "first_ms_p99": 1e3 * ordered[len(ordered) * 99 // 100], "chunks": statistics.mean(chunks),
        }  # fmt: skip

    def _body(self, server: Server, mode: str, output: int) -> dict[str, Any]:
        stream = {"stream": True, "stream_options": {"include_usage": True}} if mode == "stream" else {}
        return (
            {"model": "m", "max_tokens": output, "temperature": 0, "ignore_eos": True} | stream | server.extra
        )


def figures_of(rounds: list[dict[str, Any]]) -> dict[str, Figure]:
    """Medians over the rounds of a mode."""
    figures: dict[str, Figure] = {}
    for mode in MODES:
        of_mode = [r for r in rounds if r["mode"] == mode]
        for kind in ("ours", "vllm"):
            found = [r[kind] for r in of_mode if kind in r]
            for name, unit, better in (
                ("tok_s", "tokens/s", "higher"), ("first_ms_p50", "ms", "lower"),
                ("first_ms_p99", "ms", "lower"), ("chunks", "events", "lower"),
            ):  # fmt: skip
                if found:
                    value = round(statistics.median(f[name] for f in found), 2)
                    figures[f"{mode}_{name}_{kind}"] = Figure(value, unit, None, better)  # type: ignore[arg-type]
            if found:
                busiest = round(max(f["client_cpu"] for f in found), 3)
                figures[f"{mode}_client_cpu_{kind}"] = Figure(busiest, "cores", CLIENT_LIMIT)
        ratios = [r["ours"]["tok_s"] / r["vllm"]["tok_s"] for r in of_mode if "ours" in r and "vllm" in r]
        if ratios:
            figures[f"kept_{mode}"] = Figure(round(statistics.median(ratios), 4), "ratio", TARGET, "higher")
    return figures


async def boot(
    args: argparse.Namespace, servers: list[Server], http: aiohttp.ClientSession, notes: list[str]
) -> list[Server]:
    """Those that are ready."""
    began, ready = time.monotonic(), []
    for server in servers:
        server.start(args.out)
    for server in servers:
        try:
            await server.ready(http, began, args.boot_s)
            ready.append(server)
        except RuntimeError as error:
            notes.append(str(error))
            server.stop()
    print("ready", {s.kind: s.ready_s for s in ready}, notes, flush=True)
    return ready


async def run(args: argparse.Namespace, servers: list[Server], vocab: int, raw: dict[str, Any]) -> None:
    """Warms up, then all rounds that fit: modes and servers in turns."""
    limits = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as http:
        ready = await boot(args, servers, http, raw["notes"])
        raw["ready_s"] = {s.kind: s.ready_s for s in ready}
        client, longest = Client(args, http, vocab), 0.0
        for server in ready:
            for mode in MODES:
                await client.load(server, mode, args.in_flight, 16, 0)
        for number in range(args.rounds * len(args.modes)):
            if time.monotonic() + 1.1 * longest > args.deadline or not ready:
                raw["notes"].append(f"{number} of {args.rounds * len(args.modes)} rounds")
                return
            began, found = time.monotonic(), {"mode": args.modes[number % len(args.modes)]}
            for server in ready if number // len(args.modes) % 2 else ready[::-1]:
                sent = args.requests, args.output, 100 + number
                found[server.kind] = await client.load(server, found["mode"], *sent)
            raw["rounds"].append(found)
            longest = max(longest, time.monotonic() - began)
            print(json.dumps(found), flush=True)
            report(args.name, figures_of(raw["rounds"]), raw, args.out)


def main() -> None:
    """Runs everything. The exit status counts what was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="h200-direct-http")
    parser.add_argument("--limit-s", type=float, default=330.0)
    parser.add_argument("--boot-s", type=float, default=220.0)
    parser.add_argument("--layout", choices=["canonical", "direct"], default="canonical")
    parser.add_argument("--servers", nargs="+", choices=["ours", "vllm"], default=["ours", "vllm"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    for name, default in (
        ("in-flight", 256), ("requests", 512), ("input", 256), ("output", 256), ("rounds", 2),
        ("stream-interval", 6), ("ingresses", 2), ("replicas", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    add_arguments(parser)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    args.deadline = time.monotonic() + args.limit_s
    path, vocab = model_of(args)
    length = args.input + args.output + 16
    kv_tokens = args.in_flight * (-(-length // 64) * 64 + 64)
    makers = {"ours": ours, "vllm": vllm}
    servers = [makers[kind](args, path, length, kv_tokens) for kind in args.servers]
    raw: dict[str, Any] = {
        "arguments": arguments(args), "predicted": PREDICTED, "notes": [], "rounds": [],
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    try:
        asyncio.run(run(args, servers, vocab, raw))
    finally:
        for server in servers:
            server.stop()
        figures = figures_of(raw["rounds"])
        raw["notes"] += [
            f"{k}: the client was too busy" for k, f in figures.items() if "cpu" in k and not f.met
        ]
        report(args.name, figures, raw, args.out)
    print(raw["notes"], {name: f.value for name, f in figures.items()}, flush=True)
    raise SystemExit(len(raw["notes"]))


if __name__ == "__main__":
    main()
