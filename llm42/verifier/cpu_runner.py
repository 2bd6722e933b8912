"""The canonical runner on CPU: the step in the same shape as the fast path's, with padded rows and anchored tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_cpu import TILE, attention_tiled
from kernels.operators import Operators
from llm42.cache import KVCache, slot_ids
from llm42.models.decoder import forward, logits
from llm42.models.weights import LoadedModel
from llm42.sampling import Sampled, sample_row
from llm42.verifier.plan import SequenceRows

PAD_TOKEN = 0


class CPURunner:
    """Runs steps of exactly `bucket` rows. The padding rows hold PAD_TOKEN and touch neither cache nor attention."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Operators,
        kv: KVCache,
        buckets: tuple[int, ...],
        attention=attention_tiled,
        sample=sample_row,
    ) -> None:
        if TILE % kv.block_size:
            raise ValueError(f"verifier.block_size must divide {TILE} on CPU, got {kv.block_size}")
        self.model, self.ops, self.kv, self.buckets = model, ops, kv, buckets
        self._attention, self._sample = attention, sample

    def copy_block(self, source: int, target: int) -> None:
        """Copies one KV block (all layers)."""
        self.kv.copy_block(source, target)

    @torch.inference_mode()
    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Computes the rows of `sequences`, at most `bucket`, padded to exactly `bucket`."""
        hidden = self._hidden(bucket, sequences)
        picked = _logit_rows(sequences)
        if not picked:
            return [[] for _ in sequences]
        head_rows = next(b for b in self.buckets if b >= len(picked))
        rows = logits(self.model, self.ops, _pad_rows(hidden[picked], head_rows))
        return self._draw(sequences, rows)

    def _hidden(self, bucket: int, sequences: list[SequenceRows]) -> Tensor:
        rows = sum(s.count for s in sequences)
        assert rows <= bucket, f"{rows} rows in a step of {bucket}"
        block_size = self.kv.block_size
        tokens = [t for s in sequences for t in s.tokens[s.start : s.start + s.count]]
        positions = [p for s in sequences for p in range(s.start, s.start + s.count)]
        slots = torch.tensor(
            [x for s in sequences for x in slot_ids(s.block_table, s.start, s.count, block_size)]
        )
        tables = [_padded_table(s, block_size) for s in sequences]
        scale = self.model.config.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv.write(layer, slots, k[:rows], v[:rows])
            out = torch.zeros(bucket, q.shape[1] * q.shape[2], dtype=q.dtype)
            row = 0
            for sequence, table in zip(sequences, tables, strict=True):
                keys, values = self.kv.gather(layer, table)
                part = q[row : row + sequence.count]
                mixed = self._attention(part, keys, values, sequence.start, scale)
                out[row : row + sequence.count] = mixed.flatten(1)
                row += sequence.count
            return out

        padding = bucket - rows
        return forward(
            self.model,
            self.ops,
            torch.tensor(tokens + [PAD_TOKEN] * padding),
            torch.tensor(positions + [0] * padding),
            attend,
        )

    def _draw(self, sequences: list[SequenceRows], rows: Tensor) -> list[list[Sampled]]:
        out, row = [], 0
        for s in sequences:
            drawn = []
            for position in range(max(s.start, s.first_logit), s.start + s.count):
                history = s.tokens[: position + 1]
                # clone: a row of its own, aligned the same way wherever it stood in the step
                args = (s.sampling, history, s.prompt_len, s.num_logprobs)
                drawn.append(self._sample(rows[row].clone(), *args))
                row += 1
            out.append(drawn)
        return out


def _logit_rows(sequences: list[SequenceRows]) -> list[int]:
    picked, row = [], 0
    for s in sequences:
        picked += [row + i for i in range(s.count) if s.start + i >= s.first_logit]
        row += s.count
    return picked


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _padded_table(s: SequenceRows, block_size: int) -> Tensor:
    """The blocks up to the end of the last row's tile; missing ones repeat the last block (they are masked)."""
    needed = -(-(s.start + s.count) // TILE) * (TILE // block_size)
    table = s.block_table[:needed]
    return torch.tensor(table + table[-1:] * (needed - len(table)))
