"""One engine in a process of its own: reads orders as JSON lines, answers on a pipe.

    python -m benchmarks.attention_backend.side plain|ours SMALL REPLY_FD

Dummy weights in Llama 3 8B's shape; everything that is not the attention backend is as vLLM has it.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.attention_backend import weights
from benchmarks.lib.random_model import LLAMA_8B
from benchmarks.lib.sides import serve
from llm42.engine.vllm.export import config_json

CACHE_BYTES = 40 << 30
MAX_LEN = 33_792
FEW = 8
"""Tokens of the shorter one of two generations whose difference is a step's time."""


class Side:
    """A vLLM engine and what it can be asked."""

    def __init__(self, kind: str, small: str) -> None:
        from vllm import LLM

        place = Path(tempfile.mkdtemp())
        (place / "config.json").write_text(json.dumps(config_json(LLAMA_8B, "bfloat16")))
        more: dict[str, Any] = {}
        if kind == "ours":
            from benchmarks.attention_backend.backend import OPTION, register

            register()
            more = {"attention_config": {"backend": "CUSTOM"}, "additional_config": {OPTION: small}}
        self.llm = LLM(
            model=str(place), load_format="dummy", skip_tokenizer_init=True, max_model_len=MAX_LEN,
            gpu_memory_utilization=0.3, kv_cache_memory_bytes=CACHE_BYTES, max_num_seqs=256,
            enable_prefix_caching=True, **more,
        )  # fmt: skip
        self._prompts: dict[tuple[int, int, int], list[Any]] = {}

    def generate(self, prompts: list[Any], tokens: int, **options: Any) -> tuple[float, list[Any]]:
        """Seconds, and vLLM's outputs."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began, outputs

    def fill(self) -> dict[str, Any]:
        """Weights that are equal in both engines."""
        return {"parameters": self.llm.collective_rpc(weights.fill)}

    def tokens(self, lengths: list[int], count: int) -> dict[str, Any]:
        """Greedy tokens and their log-probabilities, of prompts of these lengths."""
        prompts = [_prompt(n, 1000 + n) for n in lengths]
        _, outputs = self.generate(prompts, count, logprobs=1)
        completions = [output.outputs[0] for output in outputs]
        return {
            "tokens": [list(c.token_ids) for c in completions],
            "logprobs": [
                [float(top[t].logprob) for t, top in zip(c.token_ids, c.logprobs, strict=True)]
                for c in completions
            ],
        }

    def warm(self, batch: int, context: int, seed: int) -> dict[str, Any]:
        """Brings a cell's prompts into the cache."""
        self._prompts.clear()
        prompts = [_prompt(context, seed * 1000 + i) for i in range(batch)]
        self._prompts[batch, context, seed] = prompts
        seconds, _ = self.generate(prompts, 4)
        self.generate(prompts, FEW)
        return {"prefill_s": seconds}

    def decode(self, batch: int, context: int, seed: int, tokens: int) -> dict[str, Any]:
        """Milliseconds of a decoding step after prompts that are in the cache: the difference of two
        generations."""
        prompts = self._prompts[batch, context, seed]
        short, _ = self.generate(prompts, FEW)
        long, _ = self.generate(prompts, FEW + tokens)
        return {"ms": (long - short) / tokens * 1000, "short_s": short}

    def prompt(self, batch: int, length: int, seed: int) -> dict[str, Any]:
        """Prompt tokens per second of prompts that no cache has seen."""
        prompts = [_prompt(length, seed * 1000 + i) for i in range(batch)]
        seconds, _ = self.generate(prompts, 1)
        return {"seconds": seconds, "tok_s": batch * length / seconds}

    def throughput(self, batch: int, length: int, seed: int, tokens: int) -> dict[str, Any]:
        """Output tokens per second, prompts included."""
        prompts = [_prompt(length, seed * 1000 + i) for i in range(batch)]
        seconds, _ = self.generate(prompts, tokens)
        return {"seconds": seconds, "tok_s": batch * tokens / seconds}


def _prompt(length: int, seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": random.Random(seed).choices(range(3, 128_000), k=length)}


def main() -> None:
    """Answers until stdin ends."""
    kind, small, pipe = sys.argv[1], sys.argv[2], int(sys.argv[3])
    serve(lambda: Side(kind, small), pipe)


if __name__ == "__main__":
    main()
