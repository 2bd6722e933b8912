"""Matrix product y = x W^T + b on a CPU. Activations are widened to float32, the product runs in float32 on
float32 weights, and is rounded once to the activation dtype. Providers, fastest first:

`mkl`      one sgemm over all rows. A closed library: it is row-invariant only where certification finds
           it so (it groups row counts into classes that differ from machine to machine).
`mkl-tile` sgemm calls of exactly TILE_ROWS rows, the last one padded with zeros: the call's shape never
           changes, so only a row's place in the tile could matter.
`row`      one sgemv-shaped call per row: the same call for every row whatever the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 16


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64 product, rounded once to x's dtype. x [T, K], weight [N, K], bias [N] or None -> [T, N]."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _finish(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)


def linear_mkl(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One float32 product over all T rows. x [T, K], weight [N, K] float32, bias [N] or None -> [T, N]."""
    return _finish(F.linear(x.float(), weight), bias, x.dtype)


def _product_tiled(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    padded = F.pad(x.float(), (0, 0, 0, -rows % TILE_ROWS))
    tiles = [F.linear(tile, weight) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[:rows]


def linear_mkl_tile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Like linear_mkl, in products of TILE_ROWS rows. x [T, K], weight [N, K] float32, bias [N] or None ->
    [T, N]."""
    return _finish(_product_tiled(x, weight), bias, x.dtype)


def _product_rows(x: Tensor, weight: Tensor) -> Tensor:
    # clone(): every call sees its row at the start of a fresh, equally aligned buffer
    return torch.cat([F.linear(row.clone(), weight) for row in torch.split(x.float(), 1)])


def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Like linear_mkl, one product per row. x [T, K], weight [N, K] float32, bias [N] or None -> [T, N]."""
    return _finish(_product_rows(x, weight), bias, x.dtype)


def lm_head_mkl(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like linear_mkl, but the logits stay in float32. x [R, H], weight [V, H] float32 -> [R, V] float32."""
    return _finish(F.linear(x.float(), weight), bias, torch.float32)


def lm_head_mkl_tile(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like linear_mkl_tile. x [R, H], weight [V, H] float32 -> logits [R, V] float32."""
    return _finish(_product_tiled(x, weight), bias, torch.float32)


def lm_head_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like linear_row. x [R, H], weight [V, H] float32 -> logits [R, V] float32."""
    return _finish(_product_rows(x, weight), bias, torch.float32)


CPU_PROVIDERS = {"mkl": linear_mkl, "mkl-tile": linear_mkl_tile, "row": linear_row}
CPU_LM_HEAD_PROVIDERS = {"mkl": lm_head_mkl, "mkl-tile": lm_head_mkl_tile, "row": lm_head_row}
