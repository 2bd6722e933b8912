"""The canonical runner on CUDA: one graph per bucket, no host synchronisation inside a step.

A step is: pack on the host -> one copy -> body graph of the bucket (all decoder layers) -> head graph of
the number of logit rows, rounded up to a bucket (gather, lm_head, argmax and log-sum) -> sampling of the
rows that need more -> one copy back. `begin` returns as soon as everything is queued, so that the next step
is packed while this one runs; `finish` waits.

Memory: weights + KV (verifier.kv_tokens) + logits of the largest bucket + a work area that all graphs
share. On a GPU that vLLM uses too, start this runner first and give vLLM the rest (its
gpu_memory_utilization counts what is in use)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from llm42.cache import KVCache
from llm42.config import VerifierSettings
from llm42.models.weights import LoadedModel
from llm42.sampling import Draw, Sampled, is_plain
from llm42.verifier.cuda.forward import CudaForward
from llm42.verifier.cuda.pack import HostBuffers, Layout, StepPacker
from llm42.verifier.cuda.sampler import alternatives, draw_rows, sampled
from llm42.verifier.cuda.tallies import Slot, Tallies
from llm42.verifier.runner import SequenceRows
from llm42_kernels import cuda
from llm42_kernels.attention import AttentionShape, Tile
from llm42_kernels.attention_flash import flash_shape, make_attention
from llm42_kernels.cublas import check_cublas_environment
from llm42_kernels.linear_cuda import CUDA_LM_HEAD_INTO, round_in_place
from llm42_kernels.operators import Operators
from llm42_kernels.sampling import RowStats, row_stats

VARIANTS = ("L", "S", "LS", "Lc", "Sc", "LSc")
PARTIALS, PARTIAL_TOKENS = 1024, 8192
"""Pieces of split contexts in a step, and their tokens. So many pieces split the contexts of 16 requests of
32k tokens; more requests fill the device unsplit."""


class OutOfDeviceMemory(RuntimeError):
    """The runner does not fit on the device; the message names the settings to lower."""


@dataclass(slots=True)
class Pending:
    """A step in flight."""

    sequences: list[SequenceRows]
    counts: list[int]
    done: torch.cuda.Event | None
    results: Tensor | None = None  # pinned [3, R] int32: token, logprob's bits, bad
    tops: dict[int, tuple[Tensor, Tensor, list[int]]] = field(default_factory=dict)
    """Number of alternatives -> pinned ids and log-probabilities, and the logit rows they belong to."""


class CudaRunner:
    """Runner of llm42/verifier/runner.py. One owner thread; its own CUDA stream."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Operators,
        kv: KVCache,
        buckets: tuple[int, ...],
        max_len: int,
        *,
        shape: AttentionShape | None = None,
        round_logits: bool = False,
        graphs: bool = True,
    ) -> None:
        """shape: None for the usual tiles (`attention_shape`). round_logits: to the activation dtype, before
        anything else."""
        check_cublas_environment()
        config = model.config
        self.model, self.ops, self.kv, self.buckets = model, ops, kv, buckets
        self.round_logits = round_logits
        self.shape = shape or attention_shape(
            config.num_heads, config.num_kv_heads, config.head_dim, kv.block_size
        )
        device = kv.keys.device
        self.stream = torch.cuda.Stream(device)
        with memory_advice(), torch.cuda.stream(self.stream), torch.inference_mode():
            attention = make_attention(self.shape, device, PARTIALS, PARTIAL_TOKENS)
            per_row = -(-max_len // kv.block_size)
            layouts = {b: Layout(b, b + PARTIALS, b * per_row) for b in buckets}
            self._packers = {b: StepPacker(x, attention.planner, kv.block_size) for b, x in layouts.items()}
            self._host = HostBuffers(layouts.values())
            self._device = torch.zeros(layouts[buckets[-1]].total, dtype=torch.int32, device=device)
            self._views: dict[int, dict[str, Tensor]] = {b: x.views(self._device) for b, x in layouts.items()}
            self._hidden = torch.zeros(buckets[-1], config.hidden_size, dtype=model.dtype, device=device)
            self._logits = torch.empty(buckets[-1], config.vocab_size, dtype=torch.float32, device=device)
            self._results = torch.zeros(3, buckets[-1], dtype=torch.int32, device=device)
            self._tallies = Tallies(config.vocab_size, device)
            self._forward = CudaForward(model, ops, kv, attention, self._views, self._results[0])
            self._log_sum = torch.zeros(buckets[-1], dtype=torch.float64, device=device)
            self._head_provider = CUDA_LM_HEAD_INTO[dict(ops.providers).get("lm_head", "cublas")]
            self._bodies: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
            self._heads: dict[int, torch.cuda.CUDAGraph] = {}
            self._pool = torch.cuda.graph_pool_handle()
            if graphs:
                self.capture()
        self.stream.synchronize()

    # ---- the contract

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Computes the rows of `sequences`, at most `bucket`, padded to exactly `bucket`."""
        return self.finish(self.begin(bucket, sequences))

    def copy_block(self, source: int, target: int) -> None:
        """Copies one KV block (all layers), in stream order with the steps."""
        with torch.cuda.stream(self.stream), torch.inference_mode():
            self.kv.copy_block(source, target)

    @torch.inference_mode()
    def begin(self, bucket: int, sequences: list[SequenceRows]) -> Pending:
        """Packs and queues a step; does not wait for the device."""
        index, host = self._host.take(bucket)
        packed = self._packers[bucket].pack(host, bucket, sequences)
        counts = [s.count - min(s.count, max(0, s.first_logit - s.start)) for s in sequences]
        with torch.cuda.stream(self.stream):
            self._host.copy(index, packed.used, self._device, self.stream)
            self._tallies.update(sequences, self._results[0])  # before the head overwrites what is fed
            self._run_body(bucket, packed.variant)
            pending = Pending(sequences, counts, torch.cuda.Event())
            if packed.logit_rows:
                self._sample(packed.logit_rows, pending)
            assert pending.done is not None
            pending.done.record(self.stream)
        return pending

    @torch.inference_mode()
    def logits(self, bucket: int, sequences: list[SequenceRows]) -> Tensor:
        """The logits of a step's logit rows, [R, V] float32 (certification, tests)."""
        index, host = self._host.take(bucket)
        packed = self._packers[bucket].pack(host, bucket, sequences)
        self.stream.wait_stream(torch.cuda.current_stream())  # what a check did to the cache
        with torch.cuda.stream(self.stream):
            self._host.copy(index, packed.used, self._device, self.stream)
            self._run_body(bucket, packed.variant)
            self._run_head(packed.logit_rows)
            out = self._logits[: packed.logit_rows].clone()
        self.stream.synchronize()
        return out

    def finish(self, pending: Pending) -> list[list[Sampled]]:
        """Waits for a step and returns per sequence its logit rows in order."""
        if pending.done is not None:
            pending.done.synchronize()
        if pending.results is None:
            return [[] for _ in pending.sequences]
        tokens, _, bad = pending.results.tolist()
        logprobs = pending.results[1].view(torch.float32).tolist()
        tops = _tops(pending)
        rows = [
            sampled(t, p, b, tops.get(i, ()))
            for i, (t, p, b) in enumerate(zip(tokens, logprobs, bad, strict=True))
        ]
        out, row = [], 0
        for count in pending.counts:
            out.append(rows[row : row + count])
            row += count
        return out

    # ---- device work

    @torch.inference_mode()
    def capture(self) -> None:
        """Records every graph; the first run of each kernel compiles it."""
        for bucket in reversed(self.buckets):
            self._device.zero_()  # no work items, and below: no row is written to the cache
            self._views[bucket]["slots"].fill_(-1)
            for variant in VARIANTS:
                self._bodies[bucket, variant] = self._record(partial(self._body, bucket, variant))
            self._heads[bucket] = self._record(partial(self._head, bucket))

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        work()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph

    def _run_body(self, bucket: int, variant: str) -> None:
        graph = self._bodies.get((bucket, variant))
        if graph is not None:
            graph.replay()
        else:
            self._body(bucket, variant)

    def _run_head(self, rows: int) -> None:
        """Of `rows` logit rows or a few more, whatever the step's bucket."""
        rows = next(b for b in self.buckets if b >= rows)
        graph = self._heads.get(rows)
        if graph is not None:
            graph.replay()
        else:
            self._head(rows)

    def _body(self, bucket: int, variant: str) -> None:
        self._forward.body(bucket, variant, self._hidden[:bucket])

    def _head(self, rows: int) -> None:
        picked = self._hidden[self._views[rows]["logit_rows"]]
        logits = self._logits[:rows]
        self._head_provider(picked, self.model.weights.lm_head, logits)
        if self.round_logits:
            round_in_place(logits, self.model.dtype)
        row_stats(logits, self._stats(rows))

    def _stats(self, rows: int) -> RowStats:
        token, logprob, bad = self._results
        return RowStats(token[:rows], self._log_sum[:rows], logprob[:rows].view(torch.float32), bad[:rows])

    def _sample(self, rows: int, pending: Pending) -> None:
        self._run_head(rows)
        logits, stats = self._logits[:rows], self._stats(rows)
        general, asked, top_rows = _wishes(pending.sequences)
        if general:
            draw_rows(logits, stats, general, asked, tallies=self._tallies.table)
        for count, wanted in top_rows.items():
            ids, values = alternatives(logits, stats, wanted, count)
            pending.tops[count] = (_to_host(ids), _to_host(values), wanted)
        pending.results = _to_host(self._results[:, :rows])


def attention_shape(heads: int, kv_heads: int, dim: int, block_size: int) -> AttentionShape:
    """The tiles this project uses on Hopper for a model and block size: a warp of their own loads tensor maps
    where the layout allows it.

    The key tile alone sets the bits, and it is 64 everywhere: block sizes and tile heights do not change a
    result."""
    if block_size % 64 == 0 and dim in (64, 128) and heads // kv_heads <= 64:
        large, small = Tile(128, 4, 3, 1, "hopper"), Tile(64, 4, 4, 1, "hopper")
    else:
        large = small = Tile(64, 4, 3, 2)
    return AttentionShape(heads, kv_heads, dim, block_size, large=large, small=small)


ATTENTION: dict[str, Callable[[int, int, int, int], AttentionShape]] = {
    "triton": attention_shape,
    "flash-order": flash_shape,
}
"""Provider -> its tiles for (query heads, KV heads, head size, block size)."""


def cuda_runner(
    model: LoadedModel,
    providers: Mapping[str, str],
    settings: VerifierSettings,
    buckets: tuple[int, ...],
    blocks: int,
    max_len: int,
    graphs: bool = True,
) -> CudaRunner:
    """A runner of the named providers with a cache of its own, of `blocks` blocks. max_len: positions that a
    sequence may have. Raises OutOfDeviceMemory."""
    c, size = model.config, settings.block_size
    ops = cuda.cuda_operators({op: name for op, name in providers.items() if op in cuda.PROVIDERS})
    with memory_advice():
        kv = KVCache(c.num_layers, blocks, size, c.num_kv_heads, c.head_dim, model.dtype, model.device)
    shape = ATTENTION[providers["attention"]](c.num_heads, c.num_kv_heads, c.head_dim, size)
    return CudaRunner(
        model, ops, kv, buckets, max_len, shape=shape, round_logits=settings.rounds_logits, graphs=graphs
    )


def _wishes(sequences: list[SequenceRows]) -> tuple[list[int], list[Draw], dict[int, list[int]]]:
    """Logit rows that need more than an argmax, what they need, and number of alternatives -> logit rows."""
    general: list[int] = []
    asked: list[Draw] = []
    tops: dict[int, list[int]] = {}
    row = 0
    for s in sequences:
        count = len(s.logit_positions)
        if s.score or not is_plain(s.sampling):
            general += range(row, row + count)
            if isinstance(s.tally, Slot):  # its ids are counted on the device
                asked.append(
                    Draw(s.sampling, range(s.start + 1), s.prompt_len, s.num_logprobs, tally=s.tally.row)
                )
            else:
                asked += [s.draw_at(position) for position in s.logit_positions]
        if s.num_logprobs > 0 and count:  # a prompt chunk has no logit rows yet
            tops.setdefault(s.num_logprobs, []).extend(range(row, row + count))
        row += count
    return general, asked, tops


def _tops(pending: Pending) -> dict[int, tuple[tuple[int, float], ...]]:
    out: dict[int, tuple[tuple[int, float], ...]] = {}
    for ids, values, rows in pending.tops.values():
        for row, i, v in zip(rows, ids.tolist(), values.tolist(), strict=True):
            out[row] = tuple(zip(i, v, strict=True))
    return out


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


@contextmanager
def memory_advice() -> Iterator[None]:
    """Says which settings to lower when the block runs out of GPU memory. Raises OutOfDeviceMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(
            "the verifier does not fit on the GPU: lower verifier.kv_tokens (where it is null,"
            " verifier.gpu_memory_utilization), the largest of verifier.buckets, or the memory given to other"
            f" processes on this GPU ({error})"
        ) from error
