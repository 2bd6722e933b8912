"""Starts vLLM and talks to it: the only module that imports vllm, and it does so when an engine starts.

vLLM 0.26 and 0.27 are known to work. What is used of them: AsyncEngineArgs, AsyncLLM (from_engine_args,
generate, abort, errored, shutdown, vllm_config), SamplingParams, tokens_input, and the stat-logger interface
for load figures.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.rmsnorm import TIMED_BEYOND
from llm42.config import Settings
from llm42.engine.limits import require_known_ids
from llm42.engine.vllm_guard import Guard
from llm42.models.export import export_model
from llm42.models.load import read_config
from llm42.protocol import LLM42Error, Request, RequestRejected

log = logging.getLogger(__name__)

FIRST, BEFORE = (0, 26), (0, 28)
"""The vLLM versions that this adapter is tested with: FIRST <= version < BEFORE."""
UNSPLIT_ATTENTION = {"flash_attn_max_num_splits_for_cuda_graph": 1}
"""vLLM's attention_config under which a row's sum over its context does not depend on the batch."""
FIXED_COMPILATION = {
    "inductor_compile_config": {
        "deterministic": True, "combo_kernels": False, "benchmark_combo_kernel": False,
    }
}  # fmt: skip
"""vLLM's compilation_config under which the compiler times no kernels whose order of summation would follow
from it (combining kernels is decided by time as well, and refused in that mode)."""
MAX_LOGPROBS = 20
_RESERVED = ("model", "scheduling_policy", "skip_tokenizer_init", "max_model_len", "enable_prefix_caching")
_DRAW = "llm42.engine.vllm_draw:CanonicalDraw"


class EngineUnavailable(LLM42Error):
    """The configured engine cannot be started here; the message says what to do."""

    code = "engine_unavailable"


@dataclass(slots=True)
class Stats:
    """vLLM's own figures, as of its last step."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV cache that requests hold; what is only cached does not count."""
    preemptions: int = 0
    steps: int = 0


@dataclass(slots=True)
class Connection:
    """A running AsyncLLM. Its methods are called in the event loop that it was made in."""

    llm: Any
    """vllm.v1.engine.async_llm.AsyncLLM"""
    make_params: Callable[..., Any]
    """vllm.SamplingParams, for token deltas"""
    make_prompt: Callable[[list[int]], Any]
    dead: type[Exception]
    """What AsyncLLM raises once its engine process is gone."""
    vocab_size: int
    kv_tokens: int
    seeds: bool = True
    """Whether requests may carry a seed."""
    stats: Stats = field(default_factory=Stats)
    facts: dict[str, Any] = field(default_factory=dict)
    """What runs, for the log and for results."""
    guard: Guard | None = None

    @property
    def errored(self) -> bool:
        """Whether vLLM has died. May be read from any thread."""
        return bool(self.llm.errored)

    def check(self, request: Request) -> None:
        """Raises RequestRejected for what vLLM would refuse. Any thread."""
        if not request.prompt:
            raise RequestRejected("an empty prompt cannot be continued", "prompt")
        require_known_ids(request, self.vocab_size)
        if (request.num_logprobs or 0) > MAX_LOGPROBS:
            raise RequestRejected(f"at most {MAX_LOGPROBS} log-probabilities per token", "logprobs")

    def generate(
        self, request_id: str, tokens: Sequence[int], arguments: dict[str, Any], priority: int
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs (RequestOutput, token deltas) for a prompt of token ids."""
        outputs: AsyncGenerator[Any, None] = self.llm.generate(
            self.make_prompt(list(tokens)), self.make_params(**arguments), request_id, priority=priority
        )
        return outputs

    async def abort(self, request_id: str) -> None:
        """Ends a vLLM request; an unknown id is ignored."""
        await self.llm.abort(request_id)

    def close(self) -> None:
        """Ends vLLM's processes."""
        self.llm.shutdown()
        if self.guard is not None:
            self.guard.close()


def connect(settings: Settings) -> Connection:
    """Starts vLLM in the running event loop and waits until it is ready. Raises EngineUnavailable."""
    version = check_installed()
    # our process has threads already: a forked engine process could inherit a lock that nobody will release
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # as Ray's: nothing is reported unless asked for
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    stats = Stats()
    arguments = engine_arguments(settings, model_directory(settings))
    guard = Guard()
    try:
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[_stat_logger_class(stats)]
        )
    except Exception as error:
        guard.close()
        raise EngineUnavailable(f"vLLM {version} did not start: {type(error).__name__}: {error}") from error
    guard.ready()
    config = llm.vllm_config
    cache = config.cache_config
    kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    facts = {
        "version": version,
        "model_runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": cache.block_size,
        "kv_tokens": kv_tokens,
        "vocab_size": config.model_config.get_vocab_size(),
        "logits_processors": list(config.model_config.logits_processors or ()),
    }
    log.info("vLLM is ready: %s", ", ".join(f"{key} {value}" for key, value in facts.items()))

    def make_params(**values: Any) -> Any:
        if (schema := values.pop("json_schema", None)) is not None:
            values["structured_outputs"] = StructuredOutputsParams(json=schema)
        return SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, **values)

    vocab_size = facts["vocab_size"]
    # on a CPU, vLLM dies of a seeded request whose prompt is computed in chunks (its generator has no offset)
    seeds = config.device_config.device_type != "cpu"
    return Connection(
        llm, make_params, tokens_input, EngineDeadError, vocab_size, kv_tokens, seeds, stats, facts, guard
    )


def check_installed() -> str:
    """vLLM's version. Raises EngineUnavailable when it is missing, broken or not supported."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable(
            "engine.kind is vllm, but vLLM is not installed: pip install 'llm42[vllm]', or set engine.kind to"
            " torch"
        )
    try:
        from vllm import __version__
    except Exception as error:
        raise EngineUnavailable(f"vLLM is installed but cannot be imported: {error}") from error
    check_version(str(__version__))
    return str(__version__)


def check_version(version: str) -> None:
    """Raises EngineUnavailable for a version that this adapter is not tested with."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) < BEFORE:
        first, before = (".".join(map(str, v)) for v in (FIRST, BEFORE))
        raise EngineUnavailable(
            f"vLLM {version} is not supported: this version of llm42 works with vLLM {first} up to, not"
            f" including, {before} (pip install 'vllm>={first},<{before}')"
        )


def model_directory(settings: Settings) -> str:
    """The Hugging Face directory that vLLM loads: the model's own, or an export of a GGUF file."""
    place = Path(settings.model.path)
    if place.is_dir():
        return str(place)
    return str(export_model(place, settings.model.dtype, settings.engine.vllm.export_dir))


def engine_arguments(settings: Settings, model: str) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs. Raises EngineUnavailable for `extra_args` that must stay as they are."""
    v = settings.engine.vllm
    for name in _RESERVED:
        if name in v.extra_args:
            raise EngineUnavailable(f"engine.vllm.extra_args must not set {name}: the engine depends on it")
    arguments: dict[str, Any] = {
        "model": model,
        # token ids go in and come out; only a grammar has to know what they stand for
        "skip_tokenizer_init": not v.structured_outputs,
        "dtype": v.dtype or settings.model.dtype,
        "max_model_len": settings.model.max_model_len,
        "gpu_memory_utilization": v.gpu_memory_utilization,
        "max_num_seqs": v.max_num_seqs,
        "tensor_parallel_size": v.tensor_parallel_size,
        "enforce_eager": v.enforce_eager,
        "scheduling_policy": "priority",  # else a resubmission queues behind everyone
        "enable_prefix_caching": True,  # what makes a resubmission cheap
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": True,  # of vLLM's own log; the figures still come through our stat logger
    }
    if v.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = v.max_num_batched_tokens
    compilation: dict[str, Any] = {"custom_ops": list(v.custom_ops)} if v.custom_ops else {}
    if settings.verifier.affinity == "vllm":  # small batches' contexts are split otherwise: another order
        arguments["attention_config"] = dict(UNSPLIT_ATTENTION)
        if read_config(Path(model)).hidden_size > TIMED_BEYOND:
            compilation |= FIXED_COMPILATION
    if compilation:
        arguments["compilation_config"] = compilation
    if v.sampled_agreement:
        arguments["logits_processors"] = [_DRAW]
    return _merged(arguments, v.extra_args)


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`theirs` over `ours`, entry by entry."""
    out = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _stat_logger_class(stats: Stats) -> Any:
    """A stat logger, in vLLM's interface, that keeps the latest figures in `stats`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LatestStats(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.waiting = scheduler_stats.num_waiting_reqs
                stats.kv_usage = scheduler_stats.kv_cache_usage
                stats.steps += 1
            if iteration_stats is not None:
                stats.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            """Nothing to say: `connect` logs the facts."""

    return LatestStats
