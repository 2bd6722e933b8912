"""Starts vLLM and talks to it: the only module of ours that imports vllm, when an engine
starts. (draw.py and amx.py are loaded by vLLM itself.)

vLLM 0.26 (on a GPU), 0.27 and 0.32 (on a CPU) are known to work; what lies between is let through. What is
used of them: AsyncEngineArgs, AsyncLLM (from_engine_args, generate, abort, errored, shutdown, vllm_config),
SamplingParams, tokens_input, the platform's name of the device, and the stat-logger interface for load
figures.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm42.config import Settings
from llm42.engine.base import require_known_ids
from llm42.engine.vllm.expected import rollbacks_expected
from llm42.engine.vllm.guard import Guard
from llm42.engine.vllm.options import (
    MAX_LOGPROBS,
    EngineUnavailable,
    config_of,
    engine_arguments,
    model_directory,
    require_vllm,
)
from llm42.errors import RequestRejected
from llm42.protocol import Request
from llm42.step_times import StepTimes

log = logging.getLogger(__name__)

FIRST, BEFORE = (0, 26), (0, 33)
"""The vLLM versions that this adapter is for: FIRST <= version < BEFORE."""
TIMED = 8
"""Steps that are timed together."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses more; to deterministic requests it means nothing, their draw is not vLLM's."""


@dataclass(slots=True)
class Stats:
    """vLLM's own figures, as of its last step."""

    running: int = 0
    kv_usage: float = 0.0
    """Share of the KV cache that requests hold; what is only cached does not count."""
    preemptions: int = 0
    steps: int = 0
    times: StepTimes = field(default_factory=lambda: StepTimes(late=True))
    timed: list[tuple[int, int]] = field(default_factory=list)
    """Decoded tokens and prompts' tokens of the steps since `began`."""
    began: float = 0.0
    asked: Callable[[], bool] = lambda: True
    """Whether anything is wanted of vLLM. It tells of steps: not of the end of the last one, if a step was
    under way as the last request was aborted."""

    def step(self, decoded: int, prompts: int, now: float) -> None:
        """A step has ended at `now` (time.monotonic) with so many tokens of either kind. Steps are timed some
        at a time, since several may be told of at once, and chunks of a prompt are told with its last one;
        the first one after a rest is not."""
        self.times.worked.begin()
        if not decoded or not self.began:
            self.began, self.timed = (now if decoded else 0.0), []
            return
        self.timed.append((decoded, prompts))
        if len(self.timed) == TIMED:
            rows, others = (sum(of_kind) / TIMED for of_kind in zip(*self.timed, strict=True))
            self.times.add(round(rows), others, (now - self.began) / TIMED)
            self.began, self.timed = now, []

    def told(self, decoded: int, prompts: int, now: float) -> None:
        """As `step`; after the last one vLLM rests."""
        self.step(decoded, prompts, now)
        if not self.running or not self.asked():
            self.rest()

    def rest(self) -> None:
        """Nothing runs."""
        self.began, self.timed = 0.0, []
        self.times.worked.end()


@dataclass(slots=True)
class Connection:
    """A running AsyncLLM. Its methods are called in the event loop that it was made in."""

    llm: Any
    """vllm.v1.engine.async_llm.AsyncLLM"""
    make_params: Callable[..., Any]
    """vllm.SamplingParams, for token deltas"""
    make_prompt: Callable[..., Any]
    """Of token ids, and of `cache_salt` where there is one."""
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
            raise RequestRejected("prompt: it is empty; give at least one token", "prompt")
        require_known_ids(request, self.vocab_size)
        for count, name in ((request.num_logprobs, "logprobs"), (request.prompt_logprobs, "prompt_logprobs")):
            if (count or 0) > MAX_LOGPROBS:
                raise RequestRejected(f"{name}: at most {MAX_LOGPROBS} per token", name)
        if not request.deterministic and request.sampling.temperature > MAX_TEMPERATURE:
            text = f"temperature: vLLM samples best-effort requests at up to {MAX_TEMPERATURE:g}"
            raise RequestRejected(
                f"{text}: lower it, or send the request with deterministic: true", "temperature"
            )

    def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        arguments: dict[str, Any],
        priority: int,
        cache_salt: str = "",
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs (RequestOutput, token deltas) for a prompt of token ids."""
        salted = {"cache_salt": cache_salt} if cache_salt else {}
        prompt, params = self.make_prompt(list(tokens), **salted), self.make_params(**arguments)
        outputs: AsyncGenerator[Any, None] = self.llm.generate(prompt, params, request_id, priority=priority)
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
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # commands print JSON on the other
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # as Ray's: nothing is reported unless asked for
    model = model_directory(settings)
    arguments, stats, guard, llm = engine_arguments(settings, model), Stats(), Guard(), None
    try:
        connection_of = _connector()
        llm = _start(arguments, stats)
        facts, config = _facts(llm.vllm_config, version), config_of(model)
        if config is not None and config.vocab_size != facts["vocab_size"]:
            theirs, ours = facts["vocab_size"], config.vocab_size
            raise ValueError(f"it has {theirs} token ids, and the verifier's model has {ours}")
        facts["rollbacks_expected"] = rollbacks_expected(settings, config, version, facts["device"])
        connection = connection_of(llm, facts, stats, guard)
    except Exception as error:
        if llm is not None:
            llm.shutdown()
        guard.close()
        raise EngineUnavailable(f"vLLM {version} did not start: {type(error).__name__}: {error}") from error
    guard.ready()
    told = (f"{key} {value}" for key, value in facts.items() if key != "rollbacks_expected")
    log.info("vLLM is ready: %s", ", ".join(told))
    log.info("%s", facts["rollbacks_expected"])
    return connection


def _start(arguments: dict[str, Any], stats: Stats) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # what is not set has the value that `vllm serve` gives it on this device: prompts of more tokens a step
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments),
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[_stat_logger_class(stats)],
    )


def _facts(config: Any, version: str) -> dict[str, Any]:
    from vllm.platforms import current_platform

    cache = config.cache_config
    return {
        "version": version,
        "device": str(current_platform.get_device_name()),
        "model_runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": cache.block_size,
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "vocab_size": config.model_config.get_vocab_size(),
        "logits_processors": list(config.model_config.logits_processors or ()),
    }


def _connector() -> Callable[[Any, dict[str, Any], Stats, Guard], Connection]:
    """What makes a Connection; what it needs of vLLM is imported before the slow start."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.engine.exceptions import EngineDeadError

    def make_params(**values: Any) -> Any:
        if (schema := values.pop("json_schema", None)) is not None:
            values["structured_outputs"] = StructuredOutputsParams(json=schema)
        return SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, **values)

    def connection(llm: Any, facts: dict[str, Any], stats: Stats, guard: Guard) -> Connection:
        # on a CPU, vLLM dies of a seeded request whose prompt comes in chunks (its generator has no offset)
        seeds = llm.vllm_config.device_config.device_type != "cpu"
        sizes = facts["vocab_size"], facts["kv_tokens"]
        return Connection(llm, make_params, tokens_input, EngineDeadError, *sizes, seeds, stats, facts, guard)

    return connection


def check_installed() -> str:
    """vLLM's version. Raises EngineUnavailable when it is missing, broken or not supported."""
    require_vllm()
    try:
        from vllm import __version__
    except Exception as error:
        raise EngineUnavailable(f"vLLM is installed but cannot be imported: {error}") from error
    check_version(str(__version__))
    return str(__version__)


def check_version(version: str) -> None:
    """Raises EngineUnavailable for a version that this adapter is not for."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) < BEFORE:
        first, before = (".".join(map(str, v)) for v in (FIRST, BEFORE))
        raise EngineUnavailable(
            f"vLLM {version} is not supported: this version of llm42 works with vLLM {first} up to, not"
            f" including, {before} (pip install 'vllm>={first},<{before}')"
        )


def _stat_logger_class(stats: Stats) -> Any:
    """A stat logger, in vLLM's interface, that keeps the latest figures in `stats`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LatestStats(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.kv_usage = scheduler_stats.kv_cache_usage
                stats.steps += 1
            if iteration_stats is not None:
                kinds = getattr(iteration_stats, "prompt_token_stats", None)
                prompts = getattr(kinds, "computed", iteration_stats.num_prompt_tokens)  # or cached, too
                stats.told(iteration_stats.num_generation_tokens, prompts, time.monotonic())
                stats.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            """Nothing to say: `connect` logs the facts."""

    return LatestStats
