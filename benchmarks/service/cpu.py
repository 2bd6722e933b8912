"""The service on a CPU: start-up, memory, best-effort speed, and what determinism costs, over HTTP.

    python -m benchmarks.service.cpu [--tokens 128] [--rounds 3]

Best-effort and deterministic rounds alternate, so that a ratio compares neighbours in time. Every request
streams `tokens` tokens with end-of-text ignored; speed is all output tokens over the time from first send
to last byte.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.processes import family
from benchmarks.lib.report import Figure, report

PROMPTS = (
    "Why is the sky blue?",
    "Write a story about a dragon.",
    "Explain how aeroplanes fly.",
    "What is a prime number?",
    "Describe Paris in one paragraph.",
    "How do vaccines work?",
    "Give advice for better sleep.",
    "Explain supply and demand.",
)


def start(port: int) -> tuple[subprocess.Popen[bytes], float]:
    """Starts `llm42 serve` and waits for a deterministic answer. Returns the process and the seconds it
    took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "llm42", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        if process.poll() is not None:
            raise SystemExit(f"llm42 serve ended with {process.returncode}")
        body = {"prompt": "Hi", "max_tokens": 1, "deterministic": True, "model": "SmolLM2-135M-Instruct"}
        try:
            if (
                httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code
                == 200
            ):
                return process, time.monotonic() - began
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


def memory(root: int) -> dict[str, float]:
    """Resident (RSS, shared pages counted by every process) and proportional (PSS) GiB of a process tree."""
    totals = {"rss": 0, "pss": 0}
    members = family(root)
    for pid in members:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                for key in totals:
                    if line.startswith(f"{key.capitalize()}:"):
                        totals[key] += int(line.split()[1])
        except OSError:
            continue
    return {key: round(kib / 2**20, 2) for key, kib in totals.items()} | {"processes": len(members)}


async def round_of(port: int, count: int, tokens: int, deterministic: bool) -> float:
    """`count` streams at once; returns output tokens per second."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    async def one(client: httpx.AsyncClient, prompt: str) -> None:
        body: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "deterministic": deterministic,
        }
        async with client.stream("POST", url, json=body) as reply:
            text = (await reply.aread()).decode()
        if reply.status_code != 200 or f'"completion_tokens":{tokens}' not in text.replace(" ", ""):
            raise SystemExit(f"a stream did not deliver {tokens} tokens: {reply.status_code} {text[-400:]}")

    async with httpx.AsyncClient(timeout=600) as client:
        began = time.monotonic()
        await asyncio.gather(*(one(client, p) for p in PROMPTS[:count]))
        return count * tokens / (time.monotonic() - began)


def measure(port: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Speeds by name; warm-up first."""
    speeds: dict[str, list[float]] = {}
    for count in (1, 8):
        asyncio.run(round_of(port, count, 16, True))
        for _ in range(rounds):
            for deterministic in (False, True):
                name = f"{'deterministic' if deterministic else 'best_effort'}_{count}"
                speed = asyncio.run(round_of(port, count, tokens, deterministic))
                speeds.setdefault(name, []).append(round(speed, 2))
                print(f"{name}: {speed:.1f} tok/s", flush=True)
    return speeds


def main() -> None:
    """Runs everything and writes results/cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    process, ready = start(args.port)
    try:
        speeds = measure(args.port, args.tokens, args.rounds)
        used = memory(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    middle = {name: statistics.median(values) for name, values in speeds.items()}

    def share(count: int) -> float:
        pairs = zip(speeds[f"deterministic_{count}"], speeds[f"best_effort_{count}"], strict=True)
        return round(statistics.median(d / b for d, b in pairs), 3)

    figures = {
        "best_effort_tok_s_1": Figure(middle["best_effort_1"], "tokens/s", 14, "higher"),
        "best_effort_tok_s_8": Figure(middle["best_effort_8"], "tokens/s", 58, "higher"),
        "deterministic_share_1": Figure(share(1), "ratio", 0.85, "higher"),
        "deterministic_share_8": Figure(share(8), "ratio", 0.85, "higher"),
        "ready_s": Figure(round(ready, 1), "s", 90, "lower"),
        "rss_gib": Figure(used["rss"], "GiB", 6, "lower"),
    }
    raw = {"speeds": speeds, "memory": used, "load_average": os.getloadavg(), "arguments": vars(args)}
    print(report("cpu", figures, raw))


if __name__ == "__main__":
    main()
