"""The systems of h200.py as servers, each as its users start it: `vllm serve`, and `llm42 serve`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.direct.http import Server
from benchmarks.lib.processes import free_port
from benchmarks.peers.cells import KV_TOKENS, MAX_LEN, VERIFIER_KV_TOKENS

MOST = 256
CPU_KV_TOKENS, CPU_MAX_LEN = 8192, 512
CPU_SERVERS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def server_of(lane: str, args: argparse.Namespace, path: str) -> Server:
    """Not started yet. With --engine torch that engine stands for vLLM: it tries the script."""
    if lane in ("vllm", "invariant") and args.engine == "vllm":
        return _vllm(lane, args, path)
    return _ours(lane, args, path)


def max_len_of(args: argparse.Namespace) -> int:
    """Of all servers."""
    return CPU_MAX_LEN if args.cpu else int(getattr(args, "max_len", MAX_LEN))


def _vllm(lane: str, args: argparse.Namespace, path: str) -> Server:
    port = free_port()
    options: dict[str, Any] = {
        "model": path, "served-model-name": "m", "port": port, "host": "127.0.0.1",
        "max-model-len": max_len_of(args), "max-num-seqs": MOST, "gpu-memory-utilization": 0.25,
        "kv-cache-memory-bytes": args.kv_token_bytes * KV_TOKENS,
    }  # fmt: skip
    if args.cpu:
        options |= {
            "kv-cache-memory-bytes": 1 << 28, "block-size": 32,
            "dtype": "float32", "gpu-memory-utilization": 0.05,
        }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | (CPU_SERVERS if args.cpu else {})
    environment |= {"VLLM_BATCH_INVARIANT": "1"} if lane == "invariant" else {}
    return Server(lane, command, environment, port)


def tree_of(lane: str, args: argparse.Namespace, path: str) -> dict[str, Any]:
    """The settings of `llm42 serve`. lane: vllm stands for an engine alone."""
    cpu, kv_tokens = args.cpu, CPU_KV_TOKENS if args.cpu else KV_TOKENS
    verifier = CPU_KV_TOKENS if cpu else KV_TOKENS if lane == "canonical" else VERIFIER_KV_TOKENS
    tree: dict[str, Any] = {
        "model": {
            "path": path, "name": "m", "device": "cpu" if cpu else "cuda",
            "dtype": "float32" if cpu else "bfloat16", "max_model_len": max_len_of(args),
        },
        "verifier": {
            "kv_tokens": verifier, "audit_share": 0.0, "max_waiting": 16_384,
            "certificate_dir": str(args.out / "certificates"),
            "affinity": "none" if cpu or lane == "canonical" else "vllm",
        },
        "server": {
            "verifiers": 0 if lane == "vllm" else args.verifiers, "max_queued": 16_384,
            "fastpath_replicas": getattr(args, "replicas", 1),
        },
    }  # fmt: skip
    if (count := getattr(args, "replicas", 1)) > 1:  # on one GPU
        tree["verifier"]["gpus"] = (0.9 if lane == "canonical" else 0.1) / count
    if lane == "canonical":
        return tree | {"engine": {"kind": "canonical", "canonical": {"max_num_seqs": MOST}}}
    vllm = {
        "max_num_seqs": MOST, "gpu_memory_utilization": 0.05 if cpu else 0.25, "enforce_eager": cpu,
        "extra_args": {"kv_cache_memory_bytes": 1 << 28, "block_size": 32} if cpu
        else {"kv_cache_memory_bytes": args.kv_token_bytes * KV_TOKENS},
    }  # fmt: skip
    tree["engine"] = {
        "kind": args.engine, "vllm": vllm, "kv_tokens": kv_tokens, "max_batch": 64, "threads": 1,
        "gpus": 0.8 / count,
    }  # fmt: skip
    return tree | {"session": {"mode": "verify" if lane == "vllm" else lane}}


def _ours(lane: str, args: argparse.Namespace, path: str) -> Server:
    port, file = free_port(), args.out / f"{lane}.settings.json"
    tree = tree_of(lane, args, path)
    file.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "llm42", "serve", "-c", str(file), "--port", str(port)]
    environment = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
    return Server(lane, command, environment, port)
