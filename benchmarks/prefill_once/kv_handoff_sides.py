"""The two sides of the hand-over proof: a verifier whose KV other processes can read, and vLLM in a process
of its own with the connector loaded."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.prefill_once.kv_pool import describe, remove
from llm42.cache import BlockPool, KVCache
from llm42.checkpoint.load import load_model
from llm42.engine.vllm.export import config_json, export_model
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, SamplingParams, Window
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.scheduler import Verifier

BUCKETS = {"cpu": (8, 64, 128), "cuda": (64, 512)}
BLOCK = {"cpu": 16, "cuda": 64}
TEXTS = [Path(__file__).parents[2] / "docs" / name for name in ("determinism.md", "sampling.md")]


Model = tuple[LoadedModel, str, list[int]]
"""The verifier's model, the directory that vLLM loads, and token ids to cut prompts from."""


def from_files(path: str, dtype: str, device: str, max_len: int) -> Model:
    """A GGUF file or a Hugging Face directory, and this project's documentation as text."""
    place = Path(path)
    directory = place if place.is_dir() else export_model(place, dtype, ".cache/exports")
    stream = Tokenizer.load(path).encode("\n".join(f.read_text() for f in TEXTS))
    return load_model(path, dtype, device, max_len), str(directory), stream


def random_8b() -> Model:
    """Random weights in the shape of an 8B model, on the GPU; vLLM's weights are other ones (load_format
    dummy)."""
    from benchmarks.lib.random_model import LLAMA_8B, random_model

    directory = tempfile.mkdtemp()
    (Path(directory) / "config.json").write_text(json.dumps(config_json(LLAMA_8B, "bfloat16")))
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, LLAMA_8B.vocab_size, (4096,), generator=generator).tolist()
    return random_model(LLAMA_8B), directory, stream


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that the verifier has computed: its canonical next token and the handle to its KV."""

    prompt: list[int]
    next_token: int
    handle: dict[str, Any]


class Source:
    """A verifier with a shared pool of `tokens` tokens. Not certified: only its KV is of interest here."""

    def __init__(self, model: LoadedModel, max_len: int, tokens: int) -> None:
        c, device = model.config, model.device
        block, buckets = BLOCK[device], BUCKETS[device]
        blocks = tokens // block
        kv = KVCache(c.num_layers, blocks, block, c.num_kv_heads, c.head_dim, model.dtype, device)
        self.pool = describe(kv)
        self._verifier = Verifier(
            _runner(model, kv, buckets, max_len), BlockPool(blocks, block), buckets=buckets, max_len=max_len,
            vocab_size=c.vocab_size, fingerprint="proof",
        ).start()  # fmt: skip
        self._ids = itertools.count()

    def prefill(self, prompt: Sequence[int]) -> Prefilled:
        """Computes the prompt once. Its blocks stay held until `close`."""
        request_id = f"p{next(self._ids)}"
        window = Window(request_id, tuple(prompt), len(prompt), (), SamplingParams())
        answer = self._verifier.submit(window).result()
        if not isinstance(answer, Commit):
            raise RuntimeError(answer.message)
        # the step thread rests: nothing else is in its queue
        blocks = list(self._verifier._store._idle[request_id].blocks)
        handle = {"pool": self.pool, "blocks": blocks, "tokens": len(prompt)}
        return Prefilled(list(prompt), answer.next_token, handle)

    def close(self) -> None:
        """Ends the verifier and removes its shared files."""
        self._verifier.close()
        remove(self.pool)


def _runner(model: LoadedModel, kv: KVCache, buckets: tuple[int, ...], max_len: int) -> Any:
    if model.device == "cuda":
        from llm42.verifier.cuda.runner import CudaRunner
        from llm42_kernels.cuda import cuda_operators

        return CudaRunner(model, cuda_operators(), kv, buckets, max_len)
    from llm42.verifier.cpu.operators import canonical_set
    from llm42.verifier.cpu.runner import CPURunner

    parts = canonical_set({})
    return CPURunner(model, parts.ops, kv, buckets, parts.attention, parts.sampler)


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy request. salt: keeps its blocks in vLLM's prefix cache apart from those of other salts."""

    name: str
    tokens: list[int]
    max_tokens: int
    handle: dict[str, Any] | None = None
    salt: str | None = None


@dataclass(slots=True)
class Got:
    """What came back. computed: prompt tokens that vLLM computed itself; seconds: to the first token."""

    tokens: list[int]
    logprobs: list[float]
    seconds: float = 0.0
    computed: int = 0
    loaded: int = 0


class Engine:
    """vLLM, driven step by step. Its engine core runs in another process."""

    def __init__(self, directory: str, trace: Path | None, **options: Any) -> None:
        from vllm import LLM, __version__

        connector = {"kv_transfer_config": transfer_config(trace)} if trace else {}
        arguments: dict[str, Any] = {
            "model": directory, "skip_tokenizer_init": True, "seed": 0, "max_num_seqs": 64,
            "enable_prefix_caching": True, "distributed_executor_backend": "uni",
        }  # fmt: skip
        self._llm = LLM(**(arguments | connector | options))
        self._trace, self._ids = trace, itertools.count()
        config = self._llm.llm_engine.vllm_config
        self.facts = {
            "vllm": __version__,
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "block_size": config.cache_config.block_size,
            "hybrid_kv_cache_manager": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        }

    def run(self, asks: Sequence[Ask], abort_after: int | None = None) -> dict[str, Got]:
        """All at once. abort_after: every request is aborted when it has that many tokens."""
        from vllm import SamplingParams

        engine, names, out, began = self._llm.llm_engine, {}, {}, time.perf_counter()
        for ask in asks:
            extra = {"kv_transfer_params": ask.handle} if ask.handle else None
            params = SamplingParams(
                temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False, logprobs=0,
                extra_args=extra,
            )  # fmt: skip
            prompt: dict[str, Any] = {"prompt_token_ids": ask.tokens}
            if ask.salt is not None:
                prompt["cache_salt"] = ask.salt
            name = f"q{next(self._ids)}"
            names[name], out[ask.name] = ask.name, Got([], [])
            engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                got, new = out[names[output.request_id]], output.outputs[0]
                got.seconds = got.seconds or time.perf_counter() - began
                got.tokens = list(new.token_ids)
                steps = zip(new.token_ids, new.logprobs, strict=True)
                got.logprobs = [step[token].logprob for token, step in steps]
                if abort_after is not None and not output.finished and len(got.tokens) >= abort_after:
                    engine.abort_request([output.request_id])
        self._count(names, out)
        return out

    def forget(self) -> None:
        """Empties vLLM's prefix cache."""
        self._llm.reset_prefix_cache()

    def notes(self) -> list[dict[str, Any]]:
        """What the connector has written down so far."""
        assert self._trace is not None
        return [json.loads(line) for line in self._trace.read_text().splitlines()]

    def close(self) -> None:
        """Ends vLLM's process."""
        self._llm.llm_engine.engine_core.shutdown()

    def _count(self, names: dict[str, str], out: dict[str, Got]) -> None:
        """Tokens in the steps of a request, less one per output token after the first, are its prompt's."""
        if self._trace is None:
            return
        for note in self.notes():
            for part in ("scheduled", "loaded"):
                for internal, count in note.get(part, {}).items():
                    name = names.get(internal.split("-")[0])  # vLLM may add a suffix to a request's id
                    if name is not None and part == "scheduled":
                        out[name].computed += count
                    elif name is not None:
                        out[name].loaded += count
        for got in out.values():
            got.computed -= len(got.tokens) - 1


def transfer_config(trace: Path) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`. trace: a file for one JSON line per step and load."""
    return {
        "kv_connector": "VerifierKV",
        "kv_connector_module_path": "benchmarks.prefill_once.kv_connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"trace": str(trace)},
    }
