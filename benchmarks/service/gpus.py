"""Tokens per second through the whole service on several GPUs, at rising shares of deterministic requests.

    python -m benchmarks.service.gpus [--model GGUF|8b] [--gpus 2] [--concurrent 128] [--requests 512]
    python -m benchmarks.service.gpus --device cpu --engine torch --model tiny --concurrent 8 --requests 24

Layouts, each a cluster of its own:

  plain    a replica on every GPU and no verifier: what the others are compared with (0 % only)
  apart    a verifier on the last GPU, replicas on the others
  beside   a replica and a verifier on every GPU

Requests come over HTTP, a fixed number at a time, the deterministic ones evenly among them.
The arithmetic bound of `apart` is (GPUs - 1) / GPUs of `plain`. A deterministic prompt must bring the same
token ids and log-probabilities at every share in every layout, or the run fails.

8b: a Llama 3 8B's shape with random weights and SmolLM2's vocabulary, written to --scratch first. Its two
most likely tokens are closer than a trained model's, so more candidates differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx

from llm42_serve.launch import prepare_environment

prepare_environment()

from benchmarks.lib.random_model import LLAMA_8B, write_random  # noqa: E402
from benchmarks.lib.report import RESULTS, Figure, arguments, report  # noqa: E402
from benchmarks.lib.vllm_setup import prompts_of  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42.config.serve_file import absolute  # noqa: E402
from llm42.errors import LaunchFailed  # noqa: E402
from llm42.text.tokenizer import Tokenizer  # noqa: E402
from llm42_serve.launch import Service  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.support import write_model  # noqa: E402

LAYOUTS = ("plain", "apart", "beside")
SHARES = (0, 10, 50, 100)
PROMPT_SEED = 7


def model_path(args: argparse.Namespace) -> str:
    """The model on disk."""
    if args.model == "tiny":
        return str(write_model(Path(mkdtemp())))
    if args.model == "8b":
        tokenizer = Tokenizer.load(Path(Settings().model.path))
        config = replace(LLAMA_8B, vocab_size=49152, eos_token_ids=(2,), bos_token_id=1)
        return str(write_random(config, tokenizer, Path(args.scratch or mkdtemp()) / "random-8b"))
    return str(args.model)


def settings_of(args: argparse.Namespace, path: str, layout: str) -> Settings:
    """One layout: how many processes of a role, and what each gets of a GPU."""
    cuda, shared = args.device == "cuda", layout == "beside"
    replicas = args.gpus - 1 if layout == "apart" else args.gpus
    verifiers = {"plain": 0, "apart": 1, "beside": args.gpus}[layout]
    vllm = {
        "gpu_memory_utilization": 0.45 if shared else 0.85, "max_num_seqs": 256,
    }  # fmt: skip
    length = args.input + args.output + 16
    kv = args.concurrent * (length + 64)
    engine: dict[str, Any] = {"kind": args.engine, "gpus": 0.6 if shared else 1.0, "threads": 1}
    engine |= {"kv_tokens": kv, "max_batch": 256} if args.engine == "torch" else {"vllm": vllm}
    verifier: dict[str, Any] = {"kv_tokens": kv, "gpus": 0.4 if shared else 1.0, "audit_share": 0.0}
    verifier |= {"max_waiting": 4 * args.concurrent}
    if cuda and args.engine == "vllm" and verifiers:  # plain is vLLM as it comes
        verifier |= {"affinity": "vllm"}
    tree = {
        "model": {"path": path, "name": "m", "device": args.device, "max_model_len": length},
        "engine": engine,
        "verifier": verifier,
        "session": {"mode": "verify"},
        "server": {
            "port": free_port(), "fastpath_replicas": replicas, "verifiers": verifiers,
            "ingress_replicas": args.ingresses, "max_queued": 4 * args.concurrent,
        },
    }  # fmt: skip
    return absolute(Settings.load(tree))


async def load(url: str, args: argparse.Namespace, share: int, outputs: dict[int, Any]) -> dict[str, Any]:
    """`requests` answers, `concurrent` at a time. outputs: prompt -> what a deterministic request brought."""
    prompts = prompts_of(args.requests, args.input, args.vocab, PROMPT_SEED)
    gate, counts = (
        asyncio.Semaphore(args.concurrent),
        dict.fromkeys(("tokens", "deterministic_tokens", "rollbacks", "rolled_back_tokens", "different"), 0),
    )

    async def one(http: httpx.AsyncClient, number: int) -> None:
        deterministic = (number * share) // 100 != ((number + 1) * share) // 100
        body = {
            "model": "m", "prompt": list(prompts[number]), "max_tokens": args.output, "ignore_eos": True,
            "temperature": 0, "logprobs": 0 if deterministic else None, "return_token_ids": deterministic,
            "deterministic": deterministic,
        }  # fmt: skip
        async with gate:
            reply = await http.post(f"{url}/v1/completions", json=body)
        reply.raise_for_status()
        answer = reply.json()
        counts["tokens"] += answer["usage"]["completion_tokens"]
        if deterministic:
            choice, told = answer["choices"][0], answer["llm42"]
            counts["deterministic_tokens"] += answer["usage"]["completion_tokens"]
            counts["rollbacks"] += told["rollbacks"]
            counts["rolled_back_tokens"] += told["rolled_back_tokens"]
            got = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
            counts["different"] += outputs.setdefault(number, got) != got

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        began = time.perf_counter()
        await asyncio.gather(*(one(http, i) for i in range(args.requests)))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens_s": counts["tokens"] / seconds, **counts}


def measure(
    args: argparse.Namespace, path: str, layout: str, outputs: dict[int, Any], found: dict[str, Any]
) -> None:
    """One cluster: all shares, each after a short warm-up, into `found`."""
    settings = settings_of(args, path, layout)
    began = time.perf_counter()
    with Service(settings, print) as service:
        if settings.server.verifiers:
            service.wait_deterministic()
        found["ready_s"] = time.perf_counter() - began
        shares = SHARES if settings.server.verifiers else (0,)
        short = argparse.Namespace(**vars(args) | {"requests": args.concurrent, "output": 16})
        asyncio.run(load(service.url, short, max(shares), {}))
        for share in shares:
            found[str(share)] = asyncio.run(load(service.url, args, share, outputs))
            print(layout, share, found[str(share)], flush=True)


def figures_of(raw: dict[str, Any], gpus: int) -> dict[str, Figure]:
    """Tokens per second, and what is kept of plain replicas on the same GPUs."""
    plain = raw.get("plain", {}).get("0", {}).get("tokens_s")
    figures = {}
    for layout in (name for name in LAYOUTS if name in raw):
        for share in (s for s in map(str, SHARES) if s in raw[layout]):
            speed = raw[layout][share]["tokens_s"]
            figures[f"{layout}_{share}_tok_s"] = Figure(round(speed, 1), "tokens/s", None, "higher")
            if share != "0" and "0" in raw[layout]:
                own = speed / raw[layout]["0"]["tokens_s"]
                figures[f"{layout}_{share}_of_0"] = Figure(round(own, 3), "share", None, "higher")
            if plain and layout != "plain":
                figures[f"{layout}_{share}_kept"] = Figure(round(speed / plain, 3), "share", None, "higher")
    if "apart" in raw:
        figures["apart_bound"] = Figure(round((gpus - 1) / gpus, 3), "share", None, "higher")
    every = [run for found in raw.values() for run in found.values() if isinstance(run, dict)]
    figures["different_outputs"] = Figure(sum(run["different"] for run in every), "answers", 0, "lower")
    return figures


def main() -> None:
    """Runs the layouts one after another and writes results/NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=Settings().model.path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="vllm")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    for name, default in (("gpus", 2), ("concurrent", 128), ("requests", 512), ("input", 256),
                          ("output", 256), ("ingresses", 2), ("vocab", 49152)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scratch", help="where a model that has to be written goes")
    parser.add_argument("--name", default="h200x2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.model == "tiny":
        args.vocab = 256
    path, outputs, raw = model_path(args), dict[int, Any](), dict[str, Any]()
    failed = 0
    for layout in args.layouts:
        raw[layout] = {}
        try:
            measure(args, path, layout, outputs, raw[layout])
        except (LaunchFailed, httpx.HTTPError) as error:  # what was measured stays, and the others may work
            raw[layout]["error"] = f"{type(error).__name__}: {error}"
            failed += 1
        figures = figures_of(raw, args.gpus)
        told = {**raw, "arguments": arguments(args), "load_average": os.getloadavg()}
        print(report(args.name, figures, told, args.out), flush=True)
    raise SystemExit(failed or not figures["different_outputs"].met)


if __name__ == "__main__":
    main()
