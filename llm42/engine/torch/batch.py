"""One fast step on ordinary kernels with dynamic shapes: decode rows of all requests together, then prompt
chunks.

On a CPU attention runs in float32 products; on a GPU it is torch's fused attention in the activation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llm42.cache import KVCache, slot_ids
from llm42.models.decoder import forward, logits
from llm42.models.weights import LoadedModel
from llm42_kernels.operators import Operators

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one request: tokens at positions start, start + 1, ...; `table` covers all of
    them."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    every: bool = False
    """Logits after every row are wanted, not only after the last one."""


class BatchRunner:
    """Runs steps over a paged KV cache. Shapes follow the load, so bits may depend on who else is in the
    step."""

    def __init__(self, model: LoadedModel, ops: Operators, kv: KVCache) -> None:
        self.model, self.ops, self.kv = model, ops, kv
        self.attention = FusedAttention if model.device.startswith("cuda") else PlainAttention

    @torch.inference_mode()
    def step(self, decode: list[Rows], prefill: list[Rows]) -> list[Tensor]:
        """Per entry, decode first, the logits that it wants: [1 or its number of rows, V] float32."""
        groups, device = [*decode, *prefill], self.model.device
        tokens = torch.tensor([t for r in groups for t in r.tokens], device=device)
        places = [p for r in groups for p in range(r.start, r.start + len(r.tokens))]
        attention = self.attention(self.model, self.kv, decode, prefill)
        hidden = forward(self.model, self.ops, tokens, torch.tensor(places, device=device), attention)
        picked, counts, row = list[int](), list[int](), 0
        for r in groups:
            counts.append(len(r.tokens) if r.every else 1)
            row += len(r.tokens)
            picked += range(row - counts[-1], row)
        # one copy for the whole step; each request's row is drawn on the CPU
        rows = logits(self.model, self.ops, hidden[torch.tensor(picked, device=device)]).cpu()
        return list(rows.split(counts))


class PlainAttention:
    """The `attend` callback of one step: writes KV, then one padded batch for decode and one call per
    prompt chunk."""

    def __init__(self, model: LoadedModel, kv: KVCache, decode: list[Rows], prefill: list[Rows]) -> None:
        self.kv, self.scale = kv, model.config.head_dim**-0.5
        size, device = kv.block_size, model.device
        slots = [x for r in (*decode, *prefill) for x in slot_ids(r.table, r.start, len(r.tokens), size)]
        self.slots = torch.tensor(slots, device=device)
        self.decode_rows = len(decode)
        if decode:
            longest = max(r.start // size + 1 for r in decode)
            # block 0 is never written: padding reads zeros
            tables = [[*r.table[: r.start // size + 1]] for r in decode]
            self.tables = torch.tensor([t + [0] * (longest - len(t)) for t in tables], device=device)
            last = torch.tensor([r.start for r in decode], device=device)
            future = torch.arange(longest * size, device=device)[None, :] > last[:, None]
            self.mask = torch.zeros_like(future, dtype=torch.float32).masked_fill_(future, NEG_INF)
            self.mask = self.mask[:, None, None, :]
        self.prefill = [
            (r, torch.tensor(r.table[: (r.start + len(r.tokens) - 1) // size + 1], device=device))
            for r in prefill
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kv.write(layer, self.slots, k, v)
        parts = [self._decode(layer, q[: self.decode_rows])] if self.decode_rows else []
        row = self.decode_rows
        for rows, table in self.prefill:
            count = len(rows.tokens)
            parts.append(self._chunk(layer, q[row : row + count], table, rows.start))
            row += count
        return torch.cat(parts)

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.kv.gather(layer, self.tables)  # [B, S, Hk, D]
        batch, _, kv_heads, dim = keys.shape
        grouped = q.float().view(batch, kv_heads, -1, dim) * self.scale
        heads = grouped.shape[2]
        # products of fewer than 4 rows are another class of bits than those of the verifier's tiles
        grouped = F.pad(grouped, (0, 0, 0, max(0, 4 - heads)))
        scores = grouped @ keys.float().permute(0, 2, 3, 1) + self.mask
        mixed: Tensor = scores.softmax(-1) @ values.float().permute(0, 2, 1, 3)
        return mixed[:, :, :heads].reshape(batch, -1).to(q.dtype)

    def _chunk(self, layer: int, q: Tensor, table: Tensor, start: int) -> Tensor:
        count, _, dim = q.shape
        keys, values = self.kv.gather(layer, table)
        end = start + count
        k, v = keys[:end].float().permute(1, 2, 0), values[:end].float().permute(1, 0, 2)
        kv_heads = k.shape[0]
        grouped = (q.float() * self.scale).view(count, kv_heads, -1, dim).permute(1, 2, 0, 3)
        scores = (grouped.reshape(kv_heads, -1, dim) @ k).view(kv_heads, -1, count, end)
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores[..., start:].masked_fill_(future, NEG_INF)
        mixed: Tensor = scores.softmax(-1).view(kv_heads, -1, end) @ v
        return mixed.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, -1).to(q.dtype)


class FusedAttention(PlainAttention):
    """The same over torch's scaled_dot_product_attention, in the activation dtype."""

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.kv.gather(layer, self.tables)  # [B, S, Hk, D]
        k, v, mask = keys.transpose(1, 2), values.transpose(1, 2), self.mask.to(q.dtype)
        mixed = F.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=mask, scale=self.scale, enable_gqa=True
        )
        return mixed.reshape(q.shape[0], -1)

    def _chunk(self, layer: int, q: Tensor, table: Tensor, start: int) -> Tensor:
        count = q.shape[0]
        keys, values = self.kv.gather(layer, table)
        k, v = (x[: start + count].transpose(0, 1)[None] for x in (keys, values))
        past = torch.ones(count, start + count, dtype=torch.bool, device=q.device).tril(start)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=past, scale=self.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(count, -1)
