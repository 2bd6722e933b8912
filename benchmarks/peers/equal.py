"""How many different outputs 10,000 equal deterministic requests have under mixed load; the same of vLLM.

    python -m benchmarks.peers.equal --out DIR --tokenizer SMOLLM2.gguf --systems auto vllm
    python -m benchmarks.peers.equal --out DIR --cpu --count 60 --tokens 12     tries the script

One prompt, SmolLM2, greedy, 128 tokens with log-probabilities; among other requests of all lengths, which
come and go. An output is the token ids and the log-probabilities, as the server wrote them. Of ours it is
asked three times: a part after a fresh start (`started`: the service is ended and started anew), a part of
one with two replicas and as many verifiers (`replicas`), and the rest under mixed load (`mixed`); all have to
be the one output. vLLM as it comes, and with VLLM_BATCH_INVARIANT=1 (`invariant`), has no flag: the same
requests without it.

Figures: distinct_outputs_10000 (ours: of all parts together), vllm_distinct_outputs_10000,
invariant_distinct_outputs_10000, each with how many requests it is of. The negative control is vLLM's
figure: were it 1, the load would have shown nothing, and the run says so.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.direct.http import Server
from benchmarks.direct.model import add_arguments
from benchmarks.lib.report import Figure, arguments, report
from benchmarks.peers.cells import PREDICTED
from benchmarks.peers.servers import server_of
from llm42.checkpoint.description import read_config
from llm42.engine.vllm.export import export_model
from tests.support import write_model

NAME, PROMPT_TOKENS = "h200-peers-equal", 40
SYSTEMS = ("auto", "verify", "canonical", "vllm", "invariant")
OURS = ("auto", "verify", "canonical")
PARTS = {"started": 0.1, "replicas": 0.3, "mixed": 0.6}
"""Of all requests to a system of ours, each with servers of its own; vLLM has `mixed` alone, with all."""
NOISE = {"prompts": (8, 60, 200, 700), "outputs": (16, 64, 160, 300)}


@dataclass
class Outputs:
    """What came of the equal requests."""

    seen: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[int]] = field(default_factory=dict)
    noise: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, tokens: list[int], logprobs: list[float]) -> None:
        """One whole answer."""
        name = hashlib.sha256(json.dumps([tokens, logprobs]).encode()).hexdigest()[:16]
        self.seen[name] += 1
        self.examples.setdefault(name, tokens)

    @property
    def count(self) -> int:
        """Of answers."""
        return sum(self.seen.values())

    def told(self) -> dict[str, Any]:
        """JSON-ready. texts: different token ids; first_difference: the earliest position of one."""
        texts = {tuple(tokens) for tokens in self.examples.values()}
        return {
            "answers": self.count, "distinct": len(self.seen), "texts": len(texts),
            "most_common": self.seen.most_common(5), "first_difference": first_difference(texts),
            "noise_requests": self.noise, "failed": len(self.failed), "failures": self.failed[:5],
        }  # fmt: skip


def first_difference(texts: set[tuple[int, ...]]) -> int | None:
    """Where the first two of them part."""
    if len(texts) < 2:
        return None
    return next((n for n, ids in enumerate(zip(*texts, strict=False)) if len(set(ids)) > 1), 0)


class Asker:
    """Equal requests and others, at one server."""

    def __init__(self, server: Server, args: argparse.Namespace, http: aiohttp.ClientSession, vocab: int):
        self.server, self.args, self.http, self.vocab = server, args, http, vocab
        self.prompt = random.Random("equal").choices(range(3, vocab), k=PROMPT_TOKENS)

    async def ask(self, count: int, end: float, seen: Outputs) -> None:
        """So many equal ones, --in-flight at a time, for as long as there is time; others beside them."""
        left, stop = iter(range(count)), asyncio.Event()
        others = [asyncio.create_task(self._others(n, seen, stop)) for n in range(self.args.others)]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(count, self.args.in_flight)):
                    group.create_task(self._equal(left, end, seen))
        finally:
            stop.set()
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _equal(self, left: Any, end: float, seen: Outputs) -> None:
        body = {
            "prompt": self.prompt, "max_tokens": self.args.tokens, "temperature": 0, "logprobs": 0,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        if self.server.kind in OURS:
            body["deterministic"] = True
        for _ in left:
            if time.monotonic() >= end:
                return
            try:
                (choice,) = (await self._post(body))["choices"]
                if len(choice["token_ids"]) != self.args.tokens:
                    raise RuntimeError(f"{len(choice['token_ids'])} tokens")
                seen.add(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            except (aiohttp.ClientError, TimeoutError, RuntimeError, LookupError) as error:
                seen.failed.append(repr(error)[:300])
                if len(seen.failed) > 100:
                    raise RuntimeError("too many failures") from error

    async def _others(self, number: int, seen: Outputs, stop: asyncio.Event) -> None:
        rng = random.Random(f"others {number}")
        small = 8 if self.args.cpu else 1
        while not stop.is_set():
            length = max(2, rng.choice(NOISE["prompts"]) // small)
            body = {
                "prompt": rng.choices(range(3, self.vocab), k=length), "ignore_eos": True,
                "max_tokens": max(2, rng.choice(NOISE["outputs"]) // small),
                "temperature": rng.choice((0.0, 0.8)),
            }  # fmt: skip
            if self.server.kind in OURS and rng.random() < 0.3:
                body["deterministic"] = True
            try:
                await self._post(body)
                seen.noise += 1
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                seen.failed.append(f"another request: {error!r}"[:300])
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.5)))

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.server.port}/v1/completions"
        async with self.http.post(url, json={"model": "m"} | body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {(await reply.text())[:200]}")
            told: dict[str, Any] = await reply.json()
            return told


def parts_of(system: str, count: int) -> dict[str, int]:
    """How many requests each part of a system has."""
    if system not in OURS:
        return {"mixed": count}
    counts = {name: int(count * share) for name, share in PARTS.items()}
    counts["mixed"] += count - sum(counts.values())
    return counts


async def run_part(args: argparse.Namespace, system: str, part: str, count: int, path: str) -> Outputs:
    """With a server of its own. Raises RuntimeError when that does not start."""
    args.verifiers = args.replicas = 2 if part == "replicas" else 1
    if system not in OURS and args.engine == "vllm":  # which reads no GGUF files
        path = str(export_model(path, "bfloat16", Path(args.scratch or args.out)))
    server, seen, began = server_of(system, args, path), Outputs(), time.monotonic()
    vocab = 256 if args.cpu else 49_152
    server.start(args.out)
    try:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await server.ready(http, began, args.boot_s)
            await Asker(server, args, http, vocab).ask(count, args.deadline, seen)
    finally:
        server.stop()
    print(system, part, round(time.monotonic() - began, 1), "s", seen.told(), flush=True)
    return seen


def figures_of(found: dict[str, dict[str, Outputs]], wanted: int) -> dict[str, Figure]:
    """Of all parts together. With fewer requests than were wanted there is no figure of that name."""
    figures: dict[str, Figure] = {}
    for system, parts in found.items():
        whole = sum((outputs.seen for outputs in parts.values()), Counter[str]())
        count, ours = sum(whole.values()), system in OURS
        if not count:
            continue
        name = {"vllm": "vllm_", "invariant": "invariant_"}.get(
            system, "" if system == "auto" else f"{system}_"
        )
        title = f"{name}distinct_outputs_{wanted if count >= wanted else count}"
        figures[title] = Figure(len(whole), "outputs", 1 if ours else None)
        figures[f"{name}equal_requests"] = Figure(count, "requests", wanted, "higher")
        if ours:
            failed = sum(len(outputs.failed) for outputs in parts.values())
            figures[f"{name}failed_requests"] = Figure(failed, "requests", 0)
    return figures


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["auto", "vllm"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="of ours")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of the whole run")
    parser.add_argument("--boot-s", type=float, default=200.0, help="of each start")
    parser.add_argument("--engine", choices=["vllm", "torch"], help="ours; by default vllm, with --cpu torch")
    for name, default in (("count", 10_000), ("tokens", 128), ("in-flight", 192), ("others", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_arguments(parser)
    args = parser.parse_args()
    args.engine = args.engine or ("torch" if args.cpu else "vllm")
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    args.deadline = time.monotonic() + args.limit_s - 20
    return args


def main() -> None:
    """Runs the systems one after the other. The exit status counts what failed."""
    args = parsed()
    place = Path(args.scratch or args.out)
    path = str(write_model(place / "tiny", positions=4096)) if args.cpu else args.tokenizer
    c = read_config(Path(path))
    args.kv_token_bytes = c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2
    args.max_len = 2048
    found: dict[str, dict[str, Outputs]] = {}
    raw: dict[str, Any] = {
        "arguments": arguments(args), "notes": [], "left_out": [], "parts": {},
        "predicted": {name: list(told) for name, told in PREDICTED.items() if "distinct" in name},
    }  # fmt: skip
    for system in args.systems:
        for part, count in parts_of(system, args.count).items():
            if part not in args.parts or time.monotonic() > args.deadline:
                raw["left_out"].append(f"{system} {part}")
                continue
            try:
                seen = asyncio.run(run_part(args, system, part, count, path))
            except (RuntimeError, OSError, ExceptionGroup) as error:
                raw["notes"].append(f"{system} {part}: {error!r}"[:600])
                print(raw["notes"][-1], flush=True)
                continue
            found.setdefault(system, {})[part] = seen
            raw["parts"][f"{system} {part}"] = seen.told()
            report(args.name, figures_of(found, args.count), raw, args.out)
    if (plain := found.get("vllm")) and len(plain["mixed"].seen) == 1:
        raw["notes"].append("vLLM had one output too: this load shows nothing")
    figures = figures_of(found, args.count)
    report(args.name, figures, raw, args.out)
    print({name: figure.value for name, figure in figures.items()}, raw["notes"], flush=True)
    raise SystemExit(len(raw["notes"]) + sum(not f.met for f in figures.values()))


if __name__ == "__main__":
    main()
