"""vLLM on the same GPU, for comparison: its decode step, and its FlashAttention 3 on the verifier's paged
rows."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

CONTEXT, SHORT, LONG = 480, 8, 72


def _model_directory() -> str:
    """A Llama-3-8B config.json without weights (load_format="dummy")."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    place = Path(tempfile.mkdtemp())
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def decode_steps() -> dict[str, Any]:
    """Milliseconds per decode step: the difference of two generations that differ in length only, greedy."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model=_model_directory(), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
        gpu_memory_utilization=0.6, max_num_seqs=256, enable_prefix_caching=False,
    )  # fmt: skip
    out: dict[str, Any] = {"boot_s": time.perf_counter() - began}
    for n in (64, 256):
        prompts = [
            {"prompt_token_ids": [(17 * i + 31 * j) % 128000 + 3 for j in range(CONTEXT)]} for i in range(n)
        ]

        def seconds(tokens: int, prompts: list[Any] = prompts) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            t = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - t

        seconds(SHORT)
        pairs = [(seconds(LONG), seconds(SHORT)) for _ in range(3)]
        step = min((a - b) / (LONG - SHORT) for a, b in pairs)
        out[str(n)] = {"step_ms": step * 1000, "tok_s": n / step, "pairs": pairs}
        print(n, out[str(n)], flush=True)
    return out


def attention_micros() -> dict[str, Any]:
    """FlashAttention 3 over paged KV (its scheduler's own splits), same cases as the part `attention`."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from benchmarks.lib.timing import graph_ms
    from benchmarks.verifier.attention_tiles import HEADS, KV_HEADS, Work

    out = {}
    for name in ("16x32@2k", "512@2k", "16x32@16k", "64x1@2k", "2x32@2k"):
        best = {}
        for page in (16, 128):
            work = Work(name, page)
            tables = torch.tensor(work.tables, dtype=torch.int32, device="cuda")
            starts = torch.arange(work.sequences + 1, dtype=torch.int32, device="cuda") * work.rows
            used = torch.full((work.sequences,), work.keys, dtype=torch.int32, device="cuda")
            caches = [[x.view(-1, page, KV_HEADS, work.q.shape[2]) for x in pair] for pair in work.kv]

            def layers(
                work: Work = work,
                tables: Any = tables,
                starts: Any = starts,
                used: Any = used,
                caches: Any = caches,
            ) -> None:
                for k, v in caches:
                    flash_attn_varlen_func(
                        work.q, k, v, max_seqlen_q=work.rows, cu_seqlens_q=starts, max_seqlen_k=work.keys,
                        seqused_k=used, causal=True, block_table=tables, fa_version=3,
                    )  # fmt: skip

            best[page] = graph_ms(layers) * 1000 / len(caches)
            del work
        out[name] = {"us": min(best.values()), "by_page": best, "heads": HEADS}
        print(name, out[name], flush=True)
    return out
