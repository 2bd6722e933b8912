"""Matrix product y = x W^T + b on a CPU. Activations are widened to float32, the product runs in float32 on
float32 weights, and is rounded once to the activation dtype; logits are not. Providers, fastest first:

`mkl`      one sgemm over all rows. A closed library: it is row-invariant only where certification finds
           it so (it groups row counts into classes that differ from machine to machine).
`mkl-tile` sgemm calls of exactly TILE_ROWS rows, the last one padded with zeros: the call's shape never
           changes, so only a row's place in the tile could matter.
`row`      one sgemv-shaped call per row: the same call for every row whatever the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llm42_kernels.operators import Linear

TILE_ROWS = 16


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64 product, rounded once to x's dtype. x [T, K], weight [N, K], bias [N] or None -> [T, N]."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _tiled(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    tiles = torch.split(F.pad(x, (0, 0, 0, -rows % TILE_ROWS)), TILE_ROWS)
    return torch.cat([F.linear(tile, weight) for tile in tiles])[:rows]


def _by_row(x: Tensor, weight: Tensor) -> Tensor:
    # clone(): every call sees its row at the start of a fresh, equally aligned buffer
    return torch.cat([F.linear(row.clone(), weight) for row in torch.split(x, 1)])


def _operators(product: Callable[[Tensor, Tensor], Tensor]) -> tuple[Linear, Linear]:
    """`linear` and `lm_head` over a float32 product [T, K] x [N, K] -> [T, N]."""

    def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [R, H], weight [V, H] float32, bias [V] or None -> [R, V] float32."""
        y = product(x.float(), weight)
        return y if bias is None else y + bias.float()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], weight [N, K] float32, bias [N] or None -> [T, N] of x's dtype."""
        return logits(x, weight, bias).to(x.dtype)

    return linear, logits


linear_mkl, lm_head_mkl = _operators(F.linear)
linear_mkl_tile, lm_head_mkl_tile = _operators(_tiled)
linear_row, lm_head_row = _operators(_by_row)

CPU_PROVIDERS = {"mkl": linear_mkl, "mkl-tile": linear_mkl_tile, "row": linear_row}
CPU_LM_HEAD_PROVIDERS = {"mkl": lm_head_mkl, "mkl-tile": lm_head_mkl_tile, "row": lm_head_row}
