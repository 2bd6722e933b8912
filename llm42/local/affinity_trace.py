"""The first operator whose bits differ between a fast path and a verifier that run in this process on CPU.

Both sides compute one sequence: the fast path as it would (a prompt chunk, then one row at a time, beside
equal rows), the verifier in steps of its own size. Every operator's output is recorded in the order of
execution. Until the first difference all inputs are equal, so the operator that shows it causes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llm42.cache import KVCache
from llm42.config import Settings
from llm42.engine.torch.batch import BatchRunner, Rows
from llm42.models.weights import LoadedModel
from llm42.protocol import SamplingParams
from llm42.verifier.cpu.operators import canonical_set
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.runner import SequenceRows
from llm42_kernels.operators import Operators


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """Where the two sides part."""

    operator: str
    place: str
    """For example "layer 3 gate_up"."""
    position: int
    """Of the token, from 0."""
    differing: int
    """Elements of that row that differ."""
    of: int


@dataclass(slots=True)
class Recorder:
    """Operators that note what they return; `records` has one entry per call: operator, place, outputs."""

    model: LoadedModel
    ops: Operators
    records: list[tuple[str, str, tuple[Tensor, ...]]] = field(default_factory=list)

    def operators(self) -> Operators:
        """`ops`, recorded. What goes into the product after attention is recorded as `attention`."""
        names = {
            id(getattr(layer, name)): (i, name)
            for i, layer in enumerate(self.model.weights.layers)
            for name in ("qkv", "o", "gate_up", "down")
        }

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            layer, name = names[id(weight)]
            if name == "o":
                self._note("attention", f"layer {layer}", x)
            y = self.ops.linear(x, weight, bias)
            self._note("linear", f"layer {layer} {name}", y)
            return y

        def elsewhere(operator: str) -> Any:
            run = getattr(self.ops, operator)

            def call(*args: Any) -> Any:
                out = run(*args)
                self._note(operator, self._after(), *(out if isinstance(out, tuple) else (out,)))
                return out

            return call

        others = {name: elsewhere(name) for name in ("rms_norm", "rotary", "silu_mul", "lm_head")}
        return replace(self.ops, linear=linear, **others)

    def _note(self, operator: str, place: str, *outputs: Tensor) -> None:
        self.records.append((operator, place, tuple(x.clone() for x in outputs)))

    def _after(self) -> str:
        linears = [place for operator, place, _ in self.records if operator == "linear"]
        return f"after {linears[-1]}" if linears else "after the embedding"


def first_difference(
    settings: Settings,
    model: LoadedModel,
    fast_ops: Operators,
    manifest: Mapping[str, Any],
    tokens: Sequence[int],
    prompt_len: int,
    concurrent: int,
) -> OperatorDifference | None:
    """Compares the torch engine's operators with those that a verifier's manifest names over `tokens`, of
    which the first prompt_len are the prompt. None: every operator's bits are equal."""
    canonical = canonical_records(settings, model, manifest, tokens)
    steps = fast_records(settings, Recorder(model, fast_ops), tokens, prompt_len, concurrent)
    for start, count, records in steps:
        for (operator, place, got), (_, _, want) in zip(records, canonical, strict=False):
            for a, b in zip(got, want, strict=True):
                found = _compare(operator, place, start, a[:count], b[start : start + count])
                if found is not None:
                    return found
    return None


def _compare(operator: str, place: str, start: int, a: Tensor, b: Tensor) -> OperatorDifference | None:
    other = (a != b).flatten(1)
    rows = other.any(1).nonzero().flatten()
    if not len(rows):
        return None
    row = int(rows[0])
    return OperatorDifference(operator, place, start + row, int(other[row].sum()), other.shape[1])


@torch.inference_mode()
def canonical_records(
    settings: Settings, model: LoadedModel, manifest: Mapping[str, Any], tokens: Sequence[int]
) -> list[tuple[str, str, tuple[Tensor, ...]]]:
    """The verifier's side: operator, place and outputs [T, ...] for all T rows of the sequence."""
    parts, bucket = canonical_set(manifest["providers"]), manifest["reference_rows"]
    recorder, c, size = Recorder(model, parts.ops), model.config, settings.verifier.block_size
    blocks = -(-len(tokens) // size)
    kv = KVCache(c.num_layers, blocks, size, c.num_kv_heads, c.head_dim, model.dtype)
    runner = CPURunner(model, recorder.operators(), kv, (bucket,), parts.attention, parts.sampler)
    chunks = []
    for start in range(0, len(tokens), bucket):
        count, recorder.records = min(bucket, len(tokens) - start), []
        rows = SequenceRows(
            list(tokens), start, count, list(range(blocks)), len(tokens), len(tokens), SamplingParams()
        )
        runner.logits(bucket, [rows])
        chunks.append([(o, p, tuple(x[:count] for x in outputs)) for o, p, outputs in recorder.records])
    return [
        (same[0][0], same[0][1], tuple(torch.cat(x) for x in zip(*(s[2] for s in same), strict=True)))
        for same in zip(*chunks, strict=True)
    ]


@torch.inference_mode()
def fast_records(
    settings: Settings, recorder: Recorder, tokens: Sequence[int], prompt_len: int, concurrent: int
) -> list[tuple[int, int, list[tuple[str, str, tuple[Tensor, ...]]]]]:
    """The fast path's side: per step its first position, its rows, and what was recorded. A decode step holds
    `concurrent` equal rows."""
    model, size, out = recorder.model, settings.engine.block_size, []
    c, blocks = model.config, -(-len(tokens) // size)
    kv = KVCache(
        c.num_layers, concurrent * blocks + 1, size, c.num_kv_heads, c.head_dim, model.dtype, model.device
    )
    tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(concurrent)]  # block 0: zeros
    runner = BatchRunner(model, recorder.operators(), kv)
    for start in range(0, prompt_len, settings.engine.prefill_chunk):
        part = tokens[start : min(start + settings.engine.prefill_chunk, prompt_len)]
        recorder.records = []
        runner.step([], [Rows(part, start, tables[0])])
        out.append((start, len(part), recorder.records[:-1]))  # without lm_head: one row of the step has it
    for table in tables[1:]:
        for a, b in zip(tables[0], table, strict=True):
            kv.copy_block(a, b)
    for start in range(prompt_len, len(tokens)):
        recorder.records = []
        runner.step([Rows([tokens[start]], start, table) for table in tables], [])
        out.append((start, 1, recorder.records[:-1]))
    return out
