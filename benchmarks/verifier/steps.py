"""Times of canonical steps on one GPU beside their floors: the step's own matrix products, and the KV bytes
it reads."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.lib.timing import captured
from llm42.models.weights import LoadedModel
from llm42.protocol import SamplingParams
from llm42.verifier.cuda.runner import CudaRunner, Pending
from llm42.verifier.runner import SequenceRows

COPY_BYTES_PER_S = 4.3e12


@dataclass(frozen=True, slots=True)
class Mix:
    """A step of `sequences` x `rows` rows after `context` cached tokens; `logits`: all rows need logits,
    else one."""

    name: str
    sequences: int
    rows: int
    context: int
    logits: bool = True

    @property
    def total(self) -> int:
        """Rows of the step."""
        return self.sequences * self.rows

    @property
    def head_rows(self) -> int:
        """Rows that need logits."""
        return self.total if self.logits else self.sequences


MIXES = (
    Mix("512 as 16x32", 16, 32, 2048),
    Mix("512 as 8x64", 8, 64, 2048),
    Mix("512 as prompt", 1, 512, 2048, logits=False),
    Mix("1024 as 32x32", 32, 32, 2048),
    Mix("64 as 2x32", 2, 32, 2048),
    Mix("64 as 64x1", 64, 1, 2048),
    Mix("64 as 64x1 at 512", 64, 1, 512),
    Mix("256 as 256x1 at 512", 256, 1, 512),
)


def sequences_of(mix: Mix, block_size: int, vocab: int) -> list[SequenceRows]:
    """Greedy windows with random tokens, each on blocks of its own."""
    generator = torch.Generator().manual_seed(0)
    length = mix.context + mix.rows
    per = -(-length // block_size)
    out = []
    for i in range(mix.sequences):
        tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
        table = list(range(i * per, (i + 1) * per))
        first = mix.context if mix.logits else length - 1
        out.append(SequenceRows(tokens, mix.context, mix.rows, table, first, mix.context, SamplingParams()))
    return out


def products_graph(model: LoadedModel, rows: int, head_rows: int) -> torch.cuda.CUDAGraph:
    """All matrix products of a step, one graph."""
    w, config = model.weights, model.config

    def x(width: int, n: int = rows) -> torch.Tensor:
        return torch.randn(n, width, device=model.device).to(model.dtype)

    hidden, mixed, inner = (
        x(config.hidden_size),
        x(config.num_heads * config.head_dim),
        x(config.intermediate_size),
    )
    last = x(config.hidden_size, head_rows)

    def work() -> None:
        for layer in w.layers:
            torch.nn.functional.linear(hidden, layer.qkv)
            torch.nn.functional.linear(mixed, layer.o)
            torch.nn.functional.linear(hidden, layer.gate_up)
            torch.nn.functional.linear(inner, layer.down)
        torch.mm(last, w.lm_head.T, out_dtype=torch.float32)

    with torch.inference_mode():
        return captured(work)


def kv_ms(mix: Mix, model: LoadedModel) -> float:
    """Reading every sequence's keys and values once at copy speed."""
    c = model.config
    size = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2
    return mix.sequences * (mix.context + mix.rows) * size / COPY_BYTES_PER_S * 1000


def step_and_products_ms(
    runner: CudaRunner, mix: Mix, sequences: list[SequenceRows], rounds: int = 12, each: int = 4
) -> tuple[float, float]:
    """Milliseconds per step (queued ahead, as in service) and per set of its products, measured in turn so
    that both see the same clocks. Medians over rounds of `each` back-to-back runs."""
    graph = products_graph(runner.model, mix.total, mix.head_rows)
    pending: list[Pending] = []

    def run_steps() -> None:
        pending.extend(runner.begin(mix.total, sequences) for _ in range(each))

    def run_products() -> None:
        for _ in range(each):
            graph.replay()

    times: dict[str, list[float]] = {"steps": [], "products": []}
    for turn in range(rounds + 2):
        order = [("steps", run_steps), ("products", run_products)]
        torch.cuda.synchronize()
        with torch.cuda.stream(runner.stream):
            torch.cuda._sleep(6_000_000)  # the host gets ahead of the device
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            marks[0].record()
            for (_, work), mark in zip(order[:: 1 if turn % 2 else -1], marks[1:], strict=True):
                work()
                mark.record()
        marks[2].synchronize()
        while pending:
            runner.finish(pending.pop())
        for i, (name, _) in enumerate(order[:: 1 if turn % 2 else -1]):
            if turn > 1:
                times[name].append(marks[i].elapsed_time(marks[i + 1]) / each)
    steps, products = times["steps"], times["products"]
    return statistics.median(steps), statistics.median(products)


def host_ms(
    runner: CudaRunner, mix: Mix, sequences: list[SequenceRows], repeats: int = 50
) -> tuple[float, float]:
    """Host milliseconds of `begin`, and of `finish` once the device is done."""
    begin_ms, finish_ms = [], []
    for _ in range(repeats):
        t0 = time.perf_counter()
        pending = runner.begin(mix.total, sequences)
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        t2 = time.perf_counter()
        runner.finish(pending)
        t3 = time.perf_counter()
        begin_ms.append((t1 - t0) * 1000)
        finish_ms.append((t3 - t2) * 1000)
    return statistics.median(begin_ms), statistics.median(finish_ms)


def pipelined_ms(runner: CudaRunner, bucket: int, sequences: list[SequenceRows], steps: int = 30) -> float:
    """Wall time per step when the next step is packed while one runs, as a scheduler with two steps in
    flight does."""
    runner.finish(runner.begin(bucket, sequences))
    t0 = time.perf_counter()
    pending = runner.begin(bucket, sequences)
    for _ in range(steps - 1):
        following = runner.begin(bucket, sequences)
        runner.finish(pending)
        pending = following
    runner.finish(pending)
    return (time.perf_counter() - t0) * 1000 / steps
