"""vLLM's side of wide.py: what it generates for all prompts at once, and the keys and values that it keeps.

python -m benchmarks.affinity.vllm_outputs CONFIGURATION MODEL_DIRECTORY OUTPUT_DIRECTORY

Writes CONFIGURATION.pt: tokens and log-probabilities, and the KV of a few sequences, which shows the first
layer whose bits differ. CONFIGURATION.kernels.json lists the kernels that the compiler made, with their
launch parameters. Engine internals are read (block tables, caches): this is a probe of one version, not a
part of the service."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from llm42.engine.vllm.options import FIXED_COMPILATION
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

os.environ |= {**CUBLAS_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

OUTPUT = 512
UNSPLIT_ATTENTION = {"flash_attn_max_num_splits_for_cuda_graph": 1}
"""vLLM's attention_config under which a row's sum over its context does not depend on the batch."""
KEPT = (0, 17, 40)
"""Sequences whose KV is kept."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "service": {},
    "fixed": {"compilation_config": FIXED_COMPILATION},
    "unsplit": {"attention_config": UNSPLIT_ATTENTION, "compilation_config": FIXED_COMPILATION},
}
"""service, fixed: what `verifier.affinity: vllm` sets for narrow models, and for those wider than 2,048."""


def start(directory: Path, **options: Any) -> Any:
    """A vLLM engine in this process, small enough that several fit on one GPU."""
    from vllm import LLM

    return LLM(
        model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, seed=0,
        max_num_seqs=256, gpu_memory_utilization=0.15, kv_cache_memory_bytes=4 << 30, **options,
    )  # fmt: skip


def run(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """All prompts at once, greedy: tokens, log-probabilities, and the block tables of KEPT."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False, logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    engine, tables, done = llm.llm_engine, {}, {}
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[1])] = output.outputs[0]
        tables |= _block_tables(engine)
    outputs = [done[i] for i in range(len(prompts))]
    return {
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [
            [step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
        ],
        "tables": tables,
    }


def _block_tables(engine: Any) -> dict[int, list[int]]:
    scheduler = engine.engine_core.engine_core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    found = {}
    for name, blocks in managers[0].req_to_blocks.items():
        index = int(name.split("-")[1])
        if index in KEPT and blocks:
            found[index] = [b.block_id for b in blocks]
    return found


def keys_and_values(llm: Any, table: list[int]) -> Any:
    """[layers, blocks * block_size, KV heads, 2 * head_dim]: keys, then values, of one sequence."""
    import torch

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    out = []
    for cache in runner.kv_caches:  # [blocks, KV heads, block_size, 2 * head_dim]
        out.append(cache[torch.tensor(table, device=cache.device)].transpose(1, 2).flatten(0, 1))
    return torch.stack(out)


def compiled_kernels() -> list[dict[str, Any]]:
    """Every kernel that inductor launches: name, launch parameters, source where it is still held."""
    found = []
    gc.unfreeze()
    for thing in gc.get_objects():
        if type(thing).__name__ != "CachingAutotuner":
            continue
        launchers = getattr(thing, "launchers", [])
        found.append(
            {
                "name": thing.inductor_meta.get("kernel_name"),
                "hints": str(getattr(thing, "size_hints", "")),
                "configs": [str(getattr(x, "config", "")) for x in launchers],
                "source": getattr(getattr(thing, "fn", None), "src", ""),
                "file": str(getattr(thing, "filename", "")),
                "meta": str(thing.inductor_meta),
            }
        )
    return found


def main() -> None:
    name, directory, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    import torch

    prompts = json.loads((directory / "prompts.json").read_text())
    llm = start(directory, **CONFIGURATIONS[name])
    result = {"prompts": prompts, **run(llm, prompts)}
    result["kv"] = {i: keys_and_values(llm, t).cpu() for i, t in result.pop("tables").items()}
    torch.save(result, out / f"{name}.pt")
    (out / f"{name}.kernels.json").write_text(json.dumps(compiled_kernels(), indent=1))


if __name__ == "__main__":
    main()
