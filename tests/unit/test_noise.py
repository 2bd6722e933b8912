"""llm42/noise.py: the words equal Philox's definition, and are distributed as they should be.

The tests of distribution are functions of a generator; each is run on the real one and on some that are wrong
on purpose, which it must refuse. All inputs are fixed, so the p-values are constants, not chances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from llm42 import noise
from llm42.protocol import SamplingParams
from llm42.sampling import draw
from tests.support import sweep
from tests.unit import sampling_oracle as oracle

Generator = Callable[[Sequence[int], Sequence[int], int], NDArray[np.int64]]
"""(seeds, positions, vocabulary) -> words [seeds, positions, vocabulary]."""

PASS, REFUSE = 1e-3, 1e-9
"""The real generator's p-value must be above the first, a wrong one's below the second."""


def real(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    return np.stack([[noise.philox_words(s, p, vocab).numpy() for p in positions] for s in seeds])


# Known answers (Random123 distribution, kat_vectors, philox4x32 with 10 rounds): counter, key, words.
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_oracle_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    assert tuple(int(w) for w in oracle.philox4x32(counter, key)) == want
    assert tuple(int(w) for w in oracle.philox4x32(counter, key, rounds=9)) != want


def test_known_answer() -> None:
    assert tuple(noise.philox_words(0, 0, 4).tolist()) == KNOWN[0][2]


SEEDS = (0, 1, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**32, 0x9E3779B97F4A7C15)
POSITIONS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 3, 2**63 - 1)


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 7, 49152])
def test_words_equal_the_definition(vocab: int) -> None:
    for seed in SEEDS:
        for position in POSITIONS[:: 1 if vocab < 100 else 3]:
            got = noise.philox_words(seed, position, vocab).numpy()
            assert np.array_equal(got.astype(np.uint64), oracle.words(seed, position, vocab))
            assert got.min() >= 0


def test_a_word_does_not_depend_on_the_vocabulary() -> None:
    rows = [noise.philox_words(5, 9, v) for v in range(1, 40)]
    assert all(torch.equal(row, rows[-1][: len(row)]) for row in rows)


def test_seeds_are_64_bit_words() -> None:
    """-1 and 2^64 - 1 are one seed; every one of the 64 bits, and every bit of the position, matters."""
    assert torch.equal(noise.philox_words(-1, 3, 8), noise.philox_words(2**64 - 1, 3, 8))
    assert torch.equal(noise.philox_words(-(2**63), 3, 8), noise.philox_words(2**63, 3, 8))
    for bit in range(64):
        assert not torch.equal(noise.philox_words(1 << bit, 3, 8), noise.philox_words(0, 3, 8))
        assert not torch.equal(noise.philox_words(7, 1 << bit, 8), noise.philox_words(7, 0, 8))


def test_gumbel_values() -> None:
    for seed, position in ((0, 0), (-3, 2**35), (2**63, 17)):
        got = noise.gumbel_row(seed, position, 49152).numpy()
        want = oracle.gumbel(oracle.words(seed, position, 49152))
        assert got.dtype == np.float64
        assert np.abs(got - want).max() < 1e-13


def test_gumbel_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    monkeypatch.setattr(noise, "philox_words", lambda *_: ends)
    got = noise.gumbel_row(0, 0, 5)
    want = [-math.log(-math.log((w + 0.5) / 2**32)) for w in ends.tolist()]
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=1e-16)
    assert torch.equal(got, got.sort().values)


# ---- distribution ----


def uniformity(generate: Generator) -> float:
    """Smallest p-value of chi-squares over each of a word's four bytes: words that differ in seed and id, in
    position and id, and in the id alone (2^17 each), corrected for their number."""
    p = 1.0
    many = range(100, 100 + 2**9)
    for w in (generate(many, [5], 2**8), generate([7], many, 2**8), generate([7], [5], 2**17)):
        assert w.size >= 10**5
        for shift in (0, 8, 16, 24):
            counts = np.bincount((w.reshape(-1) >> shift) & 0xFF, minlength=256)
            p = min(p, float(stats.chisquare(counts).pvalue))
    return min(1.0, 12 * p)


OFFSETS = [
    (a, b, c)
    for a in (0, 1)
    for b in (-1, 0, 1)
    for c in (-4, -3, -2, -1, 0, 1, 2, 3, 4)
    if (a, b, c) > (0, 0, 0)
]


def independence(generate: Generator) -> float:
    """Smallest p-value over neighbours in seed, position and id (and their diagonals) of a correlation, and
    of a chi-square over the 16 x 16 table of both words' top bits; corrected for their number."""
    w = generate(range(40, 56), range(1000, 1064), 128)
    tests = []
    for offset in OFFSETS:
        a, b = (_shifted(w, offset, side) for side in (1, -1))
        r = float(np.corrcoef(a, b)[0, 1])
        tests.append(float(2 * stats.norm.sf(abs(r) * math.sqrt(len(a)))))
        table = np.bincount((a >> 28) * 16 + (b >> 28), minlength=256)
        tests.append(float(stats.chisquare(table).pvalue))
    return min(1.0, len(tests) * min(tests))


def _shifted(w: NDArray[np.int64], offset: tuple[int, ...], side: int) -> NDArray[np.int64]:
    """The words whose partner at +offset (side 1), or at -offset (side -1), exists; in the same order."""
    cut = []
    for size, step in zip(w.shape, offset, strict=True):
        step *= side
        cut.append(slice(max(0, -step), size - max(0, step)))
    return w[tuple(cut)].reshape(-1)


def runs(generate: Generator) -> float:
    """Wald-Wolfowitz runs above and below the median, along ids, along positions and along seeds."""
    p = 1.0
    many = range(2**11)
    lines = (
        generate([3], [4], 2**17),
        generate([3], many, 32).swapaxes(1, 2),
        generate(many, [4], 32).swapaxes(0, 2),
    )
    for line in lines:
        high = line.reshape(-1) >= 2**31
        n, n1 = high.size, int(high.sum())
        mean = 2 * n1 * (n - n1) / n + 1
        deviation = math.sqrt((mean - 1) * (mean - 2) / (n - 1))
        count = 1 + int((high[1:] != high[:-1]).sum())
        p = min(p, float(2 * stats.norm.sf(abs(count - mean) / deviation)))
    return min(1.0, 3 * p)


PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.0099, 0.0001])


def gumbel_max(generate: Generator) -> float:
    """Chi-square of argmax(ln p + Gumbel) against p over 2^17 draws: groups of eight neighbouring ids."""
    w = generate(range(4), range(50, 82), 2**13).reshape(-1, 8)
    assert len(w) >= 10**5
    value = np.log(PROBABILITIES) + oracle.gumbel(w.astype(np.uint64))
    counts = np.bincount(value.argmax(1), minlength=8)
    return float(stats.chisquare(counts, PROBABILITIES * len(w)).pvalue)


TESTS = (uniformity, independence, runs, gumbel_max)


@pytest.mark.parametrize("check", TESTS)
def test_distribution(check: Callable[[Generator], float]) -> None:
    assert check(real) > PASS


def _sticky_bit(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """One bit of the word is 1 in 52 % of the cases instead of 50 %."""
    w = real(seeds, positions, vocab)
    return np.where(w % 25 == 0, w | (1 << 30), w)


def _squeezed(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """1 - (1 - u)^1.1 instead of u. (u^1.1 would only shift the Gumbel values, which no argmax can see.)"""
    u = (real(seeds, positions, vocab) + 0.5) / 2**32
    return ((1 - (1 - u) ** 1.1) * 2**32).astype(np.int64)


def _favoured_lane(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """The last of a counter's four words is never above 0.97."""
    w = real(seeds, positions, vocab)
    w[..., 3::4] = np.where(w[..., 3::4] > 0.97 * 2**32, w[..., 3::4] - 2**31, w[..., 3::4])
    return w


def _seed_ignored(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    return real([0] * len(seeds), positions, vocab)


def _position_ignored(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    return real(seeds, [0] * len(positions), vocab)


def _four_equal(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """The four ids of a counter share one word."""
    w = real(seeds, positions, vocab)
    return w[..., np.arange(vocab) // 4 * 4]


def _seed_plus_position(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """A stream per seed + position: seed 5 at position 9 repeats seed 6 at position 8."""
    return np.stack([[noise.philox_words(s + p, 0, vocab).numpy() for p in positions] for s in seeds])


def _position_plus_id(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """One long stream per seed, in which each position begins one id further."""
    low, high = min(positions), max(positions)
    stream = [noise.philox_words(s, 0, high - low + vocab).numpy() for s in seeds]
    return np.stack([[x[p - low : p - low + vocab] for p in positions] for x in stream])


def _few_rounds(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """Philox with two rounds instead of ten."""
    blocks = np.arange((vocab + 3) // 4, dtype=np.uint64)
    rows = [
        [
            np.stack(oracle.philox4x32((blocks, p, 0, 0), (s, 0), rounds=2), 1).reshape(-1)[:vocab]
            for p in positions
        ]
        for s in seeds
    ]
    return np.array(rows).astype(np.int64)


def _slow_drift(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> NDArray[np.int64]:
    """Each word keeps a tenth of its neighbour's value."""
    w = real(seeds, positions, vocab)
    return (0.9 * w + 0.1 * np.roll(w, 1, axis=-1)).astype(np.int64)


@pytest.mark.parametrize(
    ("check", "wrong"),
    sweep(
        [
            (uniformity, _sticky_bit),
            (uniformity, _squeezed),
            (uniformity, _favoured_lane),
            (independence, _seed_ignored),
            (independence, _position_ignored),
            (independence, _four_equal),
            (independence, _seed_plus_position),
            (independence, _position_plus_id),
            (independence, _slow_drift),
            (independence, _few_rounds),
            (runs, _seed_ignored),
            (runs, _position_ignored),
            (runs, _four_equal),
            (runs, _slow_drift),
            (gumbel_max, _favoured_lane),
            (gumbel_max, _squeezed),
            (gumbel_max, _four_equal),
        ],
        quick=[
            (uniformity, _squeezed),
            (independence, _seed_plus_position),
            (independence, _few_rounds),
            (runs, _four_equal),
            (gumbel_max, _favoured_lane),
        ],
    ),
)
def test_control_wrong_generators(check: Callable[[Generator], float], wrong: Generator) -> None:
    assert check(wrong) < REFUSE


def test_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov against the standard Gumbel distribution; a missing logarithm, a flipped sign, a
    scale or a shift fails."""
    g = np.concatenate([noise.gumbel_row(s, 11, 49152).numpy() for s in range(3)])
    assert len(g) >= 10**5
    assert stats.kstest(g, stats.gumbel_r.cdf).pvalue > PASS
    assert abs(g.mean() - np.euler_gamma) < 5 * g.std() / math.sqrt(len(g))
    for wrong in (-g, np.exp(-g), g * 1.05, g + 0.03):
        assert stats.kstest(wrong, stats.gumbel_r.cdf).pvalue < REFUSE


def _frequencies(seeds: Sequence[int], positions: Sequence[int], temperature: float) -> NDArray[np.int64]:
    logits = torch.tensor(np.log(PROBABILITIES[:6]), dtype=torch.float32)
    counts = np.zeros(6, dtype=np.int64)
    for seed in seeds:
        params = SamplingParams(temperature=temperature, seed=seed)
        for position in positions:
            token = draw(logits, params, range(position), 1)
            assert token is not None
            counts[token] += 1
    return counts


@pytest.mark.parametrize("axis", sweep(["positions", "seeds"], quick=["positions"]))
def test_drawn_frequencies_follow_softmax(axis: str) -> None:
    """Whole draws, along the positions of one seed and over seeds at one position, at temperature 1.5."""
    many, one = range(1, 8001), [77]
    counts = _frequencies(one, many, 1.5) if axis == "positions" else _frequencies(many, one, 1.5)
    want = PROBABILITIES[:6] ** (1 / 1.5)
    want = want / want.sum() * counts.sum()
    assert stats.chisquare(counts, want).pvalue > PASS
    cold = PROBABILITIES[:6] / PROBABILITIES[:6].sum() * counts.sum()
    assert stats.chisquare(counts, cold).pvalue < REFUSE  # negative control: another temperature's
