"""A slow, plain numpy sampler, written from the specification alone: the oracle of the sampling tests.

It shares no code with llm42 (no torch either). Where the specification says float32 (penalties, logit_bias,
division by temperature) every single operation here rounds to float32 as well; everything after that is
float64. llm42 takes float32 exponentials for the top-p mass, so that border may fall on the other side of an
id there: `Drawn.decisive` says whether the token is the same when the border is moved by `BORDER` either way,
`Drawn.sharp` whether the same ids stay.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
IDS = NDArray[np.intp]
U64 = NDArray[np.uint64]

MASK = 0xFFFFFFFF
BORDER = 2e-6
"""How far the top-p mass may be off with float32 exponentials: about ln(V) * 2^-24, and 2^-23 for the
exponential itself."""
GUMBEL_GAP = 1e-12
"""Two noisy values closer than this (relative) may swap between two float64 logarithms."""


@dataclass(frozen=True)
class Params:
    """The specification's parameters with their neutral values."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    min_tokens_banned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """`token` None: the row holds NaN or +inf, a stage overflowed, or nothing is left to draw from."""

    token: int | None
    kept: tuple[int, ...] = ()
    decisive: bool = True
    sharp: bool = True


def philox4x32(counter: Sequence[U64 | int], key: tuple[int, int], rounds: int = 10) -> tuple[U64, ...]:
    """Four words for each counter; counter words broadcast, each below 2^32."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            b & np.uint64(MASK),
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            a & np.uint64(MASK),
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def words(seed: int, position: int, vocab_size: int) -> U64:
    """The 32-bit word of each vocabulary id at one position."""
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    key = (seed & MASK, (seed >> 32) & MASK)
    quads = philox4x32((blocks, position & MASK, position >> 32, 0), key)
    return np.stack(quads, axis=1).reshape(-1)[:vocab_size]


def gumbel(word: U64) -> F64:
    """Standard Gumbel values of 32-bit words, which stand for the midpoints of 2^32 cells of (0, 1)."""
    uniform = (word.astype(np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log(uniform))


def adjusted(logits: F32, p: Params, history: Sequence[int], prompt_len: int) -> F32:
    """Penalties, logit_bias, min_tokens, one float32 operation at a time."""
    out = logits.copy()  # its elements are np.float32, and so is every result of two of them
    if p.repetition_penalty != 1.0:
        r = np.float32(p.repetition_penalty)
        for t in set(history):
            out[t] = out[t] / r if out[t] > 0 else out[t] * r
    if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
        for t, n in Counter(history[prompt_len:]).items():
            out[t] = out[t] - np.float32(p.frequency_penalty) * np.float32(n)
            out[t] = out[t] - np.float32(p.presence_penalty)
    for t, bias in p.logit_bias:
        out[t] = out[t] + np.float32(bias)
    if len(history) - prompt_len < p.min_tokens:
        for t in p.min_tokens_banned:
            out[t] = np.float32(-np.inf)
    return out


def best_first(values: F32 | F64) -> IDS:
    """Ids from the largest value down, equal values by id."""
    return np.lexsort((np.arange(len(values)), -values.astype(np.float64)))


def kept_ids(scaled: F32, p: Params, shift: float = 0.0) -> IDS:
    """What top-k, top-p and min-p leave, best first; `shift` moves the top-p border."""
    value = scaled.astype(np.float64)
    ids = best_first(value)
    top = value[ids[0]]
    ids = ids[value[ids] > -np.inf]
    if p.top_k > 0:
        ids = ids[: p.top_k]
    if p.top_p < 1.0:
        mass = np.exp(value[ids] - top)
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]]) / mass.sum()
        inside = before < p.top_p + shift
        inside[0] = True
        ids = ids[inside]
    if p.min_p > 0.0:
        # ln p_i >= ln p_max + ln(min_p); the normaliser cancels
        ids = ids[value[ids] >= top + math.log(p.min_p)]
    return ids


def draw(logits: F32, p: Params, history: Sequence[int], prompt_len: int) -> Drawn:
    """The token at position len(history)."""
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return Drawn(None)
    with np.errstate(over="ignore"):
        values = adjusted(logits, p, history, prompt_len)
        if p.temperature >= GREEDY_BELOW:
            values = np.divide(values, np.float32(p.temperature), dtype=np.float32)
    if not np.isfinite(values.max()):
        return Drawn(None)
    if p.temperature < GREEDY_BELOW:
        best = int(best_first(values)[0])
        return Drawn(best, (best,))
    noisy = values.astype(np.float64) + gumbel(words(p.seed, len(history), len(logits)))

    def winner(ids: IDS) -> tuple[int, float]:
        """The id with the largest noisy value, and its lead."""
        order = np.sort(ids)[best_first(noisy[np.sort(ids)])]
        return int(order[0]), noisy[order[0]] - noisy[order[1]] if len(order) > 1 else math.inf

    kept, *moved = (kept_ids(values, p, shift) for shift in (0.0, BORDER, -BORDER))
    token, lead = winner(kept)
    clear = lead > GUMBEL_GAP * max(1.0, abs(noisy[token]))
    return Drawn(
        token,
        tuple(np.sort(kept).tolist()),
        decisive=bool(clear) and all(winner(ids)[0] == token for ids in moved),
        sharp=all(np.array_equal(ids, kept) for ids in moved),
    )


def logprobs(logits: F32) -> F64:
    """ln softmax of the raw logits, float64 throughout."""
    x = logits.astype(np.float64)
    x = x - x.max()
    return np.asarray(x - math.log(math.fsum(np.exp(x))))


def top_ids(logits: F32, count: int) -> list[int]:
    """The `count` most likely ids, equal logits by id."""
    return [int(i) for i in best_first(logits)[:count]]
