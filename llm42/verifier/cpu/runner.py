"""The canonical runner on CPU: the step in the same shape as the fast path's, with padded rows and
anchored tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm42.cache import KVCache, slot_ids
from llm42.models.decoder import forward, logits
from llm42.models.weights import LoadedModel
from llm42.sampling import Sampled, StepSampler, sample_step
from llm42.verifier.runner import SequenceRows
from llm42_kernels.attention_cpu import TILE, QueryRows, StepAttention, attention_step
from llm42_kernels.operators import Operators

PAD_TOKEN = 0


class CPURunner:
    """Runs steps of exactly `bucket` rows. The padding rows hold PAD_TOKEN and touch neither cache nor
    attention."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Operators,
        kv: KVCache,
        buckets: tuple[int, ...],
        attention: StepAttention = attention_step,
        sampler: StepSampler = sample_step,
    ) -> None:
        self.model, self.ops, self.kv, self.buckets = model, ops, kv, buckets
        self._attention, self._sampler = attention, sampler

    def copy_block(self, source: int, target: int) -> None:
        """Copies one KV block (all layers)."""
        self.kv.copy_block(source, target)

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Computes the rows of `sequences`, at most `bucket`, padded to exactly `bucket`."""
        rows = self.logits(bucket, sequences)
        flat = self._sampler(rows, [s.draw_at(p) for s in sequences for p in s.logit_positions])
        counts = [len(s.logit_positions) for s in sequences]
        drawn = iter(flat)
        return [[next(drawn) for _ in range(count)] for count in counts]

    @torch.inference_mode()
    def logits(self, bucket: int, sequences: list[SequenceRows]) -> Tensor:
        """The logits of every row that asks for them, in order: [R, V] float32."""
        hidden = self._hidden(bucket, sequences)
        picked = _logit_rows(sequences)
        if not picked:
            return torch.empty(0, self.model.config.vocab_size)
        head_rows = next(b for b in self.buckets if b >= len(picked))
        return logits(self.model, self.ops, _pad_rows(hidden[picked], head_rows))[: len(picked)]

    def _hidden(self, bucket: int, sequences: list[SequenceRows]) -> Tensor:
        rows = sum(s.count for s in sequences)
        assert rows <= bucket, f"{rows} rows in a step of {bucket}"
        tokens = [t for s in sequences for t in s.tokens[s.start : s.start + s.count]]
        positions = [p for s in sequences for p in range(s.start, s.start + s.count)]
        size = self.kv.block_size
        slots = torch.tensor([x for s in sequences for x in slot_ids(s.block_table, s.start, s.count, size)])
        groups = [QueryRows(s.start, s.count, _padded_table(s, size)) for s in sequences]
        scale = self.model.config.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv.write(layer, slots, k[:rows], v[:rows])
            mixed = self._attention(q[:rows], self.kv.keys[layer], self.kv.values[layer], groups, scale)
            return _pad_rows(mixed.flatten(1), bucket)

        padding = bucket - rows
        token_ids = torch.tensor(tokens + [PAD_TOKEN] * padding)
        return forward(self.model, self.ops, token_ids, torch.tensor(positions + [0] * padding), attend)


def _logit_rows(sequences: list[SequenceRows]) -> list[int]:
    picked, row = [], 0
    for s in sequences:
        picked += [row + i for i in range(s.count) if s.start + i >= s.first_logit]
        row += s.count
    return picked


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _padded_table(s: SequenceRows, block_size: int) -> Tensor:
    """The blocks up to the end of the last row's tile; missing ones repeat the last block (they are
    masked)."""
    last = -(-(s.start + s.count) // TILE) * TILE
    needed = -(-last // block_size)
    table = s.block_table[:needed]
    return torch.tensor(table + table[-1:] * (needed - len(table)))
