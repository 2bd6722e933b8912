"""Gumbel noise from a counter: a pure integer function of (seed, absolute position, vocabulary id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call gives the
four words of vocabulary ids 4 j .. 4 j + 3:

    counter = (j, position & 0xFFFFFFFF, position >> 32, 0)
    key     = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    u       = (word + 0.5) / 2^32                              in float64
    gumbel  = -ln(-ln u)                                       in float64
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """32 x 32 -> 64 bit product as (high, low) words. `a` holds uint32 values in int64; the product wraps
    mod 2^64, which two's complement makes the unsigned product's bits."""
    product = a * m
    return (product >> 32) & _MASK, product & _MASK


def philox_words(seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """The random words of one row: [vocab_size] int64 holding uint32 values."""
    c0 = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)
    c1 = torch.full_like(c0, position & _MASK)
    c2 = torch.full_like(c0, (position >> 32) & _MASK)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        hi0, lo0 = _mul_hi_lo(c0, _M0)
        hi1, lo1 = _mul_hi_lo(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).reshape(-1)[:vocab_size]


def gumbel_row(seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise of one row, [vocab_size] float64."""
    u = (philox_words(seed, position, vocab_size, device).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(u))
