"""How a side is built: plain values, which go to its process as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm42.checkpoint.description import read_config
from llm42.config import Settings

SERVE_TOKENS = 8192
"""Most tokens in a step of `vllm serve` on this GPU; vLLM's own default depends on who starts it."""
CPU_VLLM = {"kv_cache_memory_bytes": 1 << 28, "block_size": 32}
"""Prompts are short there, and only whole blocks are cached."""


@dataclass(frozen=True)
class Options:
    """One stage's."""

    model: str
    engine: str = "vllm"
    """Ours; vLLM untouched stands beside it where this is vllm, else the torch engine does."""
    cpu: bool = False
    affinity: str = "vllm"
    max_len: int = 2048
    kv_tokens: int = 0
    """Of each engine."""
    verifier_kv_tokens: int = 0
    """0: there is none."""
    max_requests: int = 256
    batched_tokens: int | None = None
    """Most tokens in a step of our vLLM; None: as the service has it."""
    certificates: str = ""

    @property
    def kv_bytes(self) -> int:
        """Of each engine's KV, in bfloat16."""
        c = read_config(Path(self.model))
        return self.kv_tokens * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2


def settings_of(options: Options, mode: str) -> Settings:
    """As a service with this engine has them, but for memory; nothing is audited."""
    o = options
    vllm: dict[str, Any] = {
        "max_num_seqs": o.max_requests, "max_num_batched_tokens": o.batched_tokens,
        "gpu_memory_utilization": 0.05 if o.cpu else 0.25, "enforce_eager": o.cpu,
        "extra_args": CPU_VLLM if o.cpu else {"kv_cache_memory_bytes": o.kv_bytes},
    }  # fmt: skip
    return Settings.load(
        {
            "model": {
                "path": o.model, "name": "m", "device": "cpu" if o.cpu else "cuda",
                "max_model_len": o.max_len, "dtype": "float32" if o.cpu else "bfloat16",
            },
            "engine": {
                "kind": o.engine, "vllm": vllm, "kv_tokens": o.kv_tokens, "max_batch": o.max_requests,
                "threads": 1,
            },
            "verifier": {
                "kv_tokens": o.verifier_kv_tokens or 1024, "affinity": "none" if o.cpu else o.affinity,
                "audit_share": 0.0, "certificate_dir": o.certificates or None, "max_waiting": 4096,
            },
            "session": {"mode": mode},
            "server": {"verifiers": 1 if o.verifier_kv_tokens else 0},
        }
    )  # fmt: skip
