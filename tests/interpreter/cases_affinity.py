"""Providers with the arithmetic of another engine: the carried residual, attention in FlashAttention's order,
and the decoder on both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llm42.models.rope import RopeSettings
from llm42_kernels import rmsnorm, silu_mul
from llm42_kernels.attention import paged_reference
from llm42_kernels.attention_flash import UnsupportedHeadSize, flash_shape, make_attention
from llm42_kernels.attention_plan import AttentionShape
from llm42_kernels.cuda import candidates, cuda_operators
from tests.interpreter.cases_attention import Sequences
from tests.interpreter.cases_model import DIM, HEADS, KV_HEADS, VOCAB, Harness, _model, _rows
from tests.support import sweep

EPS = 1e-5


def _terms(rows: int, width: int, count: int) -> list[torch.Tensor]:
    return [torch.randn(rows, width).half() for _ in range(count)]


def _sum_norm(terms: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normed, summed = torch.empty_like(terms[0]), torch.empty_like(terms[0])
    rmsnorm.launch_sum_norm(tuple(terms), weight, normed, summed, EPS)
    return normed, summed


@pytest.mark.parametrize("width", [64, 576, 1536, 2100])
def test_the_carried_norm_against_float64(width: int) -> None:
    """One program holds several rows, one row, or a row in pieces."""
    weight = torch.rand(width).half()
    for count in (1, 2, 3):
        terms = _terms(5, width, count)
        normed, summed = _sum_norm(terms, weight)
        s = sum(t.double() for t in terms)
        want = s / torch.sqrt(s.square().mean(-1, keepdim=True) + EPS) * weight.double()  # type: ignore[union-attr]
        torch.testing.assert_close(normed.double(), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(summed.double(), s, rtol=1e-3, atol=1e-3)
        alone = _sum_norm([t[3:4].contiguous() for t in terms], weight)
        assert torch.equal(alone[0], normed[3:4]) and torch.equal(alone[1], summed[3:4])


def test_the_sum_is_rounded_once() -> None:
    """A sum that is rounded after attention, as the other provider does, has other bits."""
    weight, (y, o, r) = torch.ones(576).half(), _terms(20, 576, 3)
    once = _sum_norm([y, o, r], weight)[1]
    exact = (y.double() + (o.double() + r.double())).half()
    twice = _sum_norm([y, _sum_norm([o, r], weight)[1]], weight)[1]
    assert (once == exact).float().mean() > 0.999
    assert (twice == exact).float().mean() < 0.95


def test_the_gate_with_the_other_exponential() -> None:
    x = (torch.randn(3, 200) * 3).half()
    torch.testing.assert_close(
        silu_mul.silu_mul_library_exp(x), silu_mul.silu_mul_reference(x), rtol=2e-3, atol=2e-3
    )


def _ordered_row(shape: AttentionShape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One row and head over keys [n, D], written as the order is described: float32 throughout."""
    f, tile, scale = np.float32, shape.block_n, np.float32(np.float32(shape.dim**-0.5) * 1.4426950408889634)
    m, den, acc = f(-1e38), np.zeros(4, f), np.zeros(shape.dim, f)
    for first in range((len(k) - 1) // tile * tile, -1, -tile):
        keys = range(first, first + tile)
        scores = np.full(tile, -np.inf, f)
        for i, key in enumerate(keys):
            if key < len(k):
                total = f(0)
                for d in range(shape.dim):
                    total += f(q[d]) * f(k[key, d])
                scores[i] = total
        top = max(m, scores.max())
        alpha, base = np.exp2((m - top) * scale), -(top * scale)
        p = np.exp2(scores * scale + base)
        m, den, acc = top, den * alpha, acc * alpha
        for i in range(tile):
            den[i % 8 // 2] += p[i]
        for i, key in enumerate(keys):
            if key < len(k):
                acc = acc + f(np.float16(p[i])) * v[key].astype(f)
    return acc * (f(1) / ((den[0] + den[2]) + (den[1] + den[3])))


@pytest.mark.parametrize(("dim", "length"), [(64, 200), (128, 140)])
def test_attention_has_the_order_it_describes(dim: int, length: int) -> None:
    s = Sequences(flash_shape(2, 1, dim, 64), [length])
    shape, engine = s.shape, make_attention(s.shape, torch.device("cpu"))
    at = length - 1
    got = engine.run(s.q[0][at:], s.k, s.v, [at], [1], [s.tables[0]], torch.float32)
    keys = torch.arange(length)
    slots = torch.tensor(s.tables[0])[keys // 64] * 64 + keys % 64
    want = _ordered_row(shape, s.q[0][at, 1].numpy(), s.k[slots, 0].numpy(), s.v[slots, 0].numpy())
    assert np.array_equal(got[0, 1].numpy(), want)


@pytest.mark.parametrize("page", sweep([16, 64, 128], quick=[64]))
def test_attention_against_float64_and_in_pieces(page: int) -> None:
    shape = flash_shape(6, 2, 64, page)
    s = Sequences(shape, [430, 90])

    def rows(parts: list[tuple[int, int, int]], shape: AttentionShape = shape) -> torch.Tensor:
        q = torch.cat([s.q[i][start : start + count] for i, start, count in parts])
        engine = make_attention(shape, torch.device("cpu"))
        tables = [s.tables[i] for i, _, _ in parts]
        return engine.run(q, s.k, s.v, [p[1] for p in parts], [p[2] for p in parts], tables)

    whole = rows([(0, 380, 50)])
    reference = paged_reference(s.q[0][380:], s.k, s.v, [380], [50], [s.tables[0]], page)
    torch.testing.assert_close(whole, reference, rtol=4e-3, atol=2e-3)
    pieces = torch.cat(
        [rows([(1, 89, 1), (0, a, b - a), (1, 3, 30)])[1 : 1 + b - a] for a, b in ((380, 381), (381, 430))]
    )
    assert torch.equal(whole, pieces)
    assert not torch.equal(whole, rows([(0, 380, 50)], replace(shape, block_n=128))), "the tile sets the bits"


def test_an_unknown_head_size_is_refused() -> None:
    with pytest.raises(UnsupportedHeadSize, match=r"verifier\.affinity to 'none'"):
        flash_shape(4, 2, 96, 64)


@pytest.mark.slow
def test_the_decoder_with_affinity() -> None:
    names = candidates("vllm")
    ops = cuda_operators({"linear": "triton", "lm_head": "triton"} | {
        op: names[op][0] for op in ("rms_norm", "silu_mul", "rotary")
    })  # fmt: skip
    model = _model(torch.float16)
    tokens, other = torch.randint(0, VOCAB, (40,)).tolist(), torch.randint(0, VOCAB, (9,)).tolist()
    shape = flash_shape(HEADS, KV_HEADS, DIM, 16)
    plain = Harness(model, 64).hidden(64, [_rows(tokens, 0, 40, [1, 2, 3])])
    want = Harness(model, 64, ops, shape).hidden(64, [_rows(tokens, 0, 40, [1, 2, 3])])
    torch.testing.assert_close(want, plain, rtol=0.02, atol=0.02)
    assert not torch.equal(want, plain), "its arithmetic differs"
    pieces = Harness(model, 64, ops, shape)
    got = [pieces.hidden(16, [_rows(tokens, 0, 7, [9, 4, 0])])]
    got.append(pieces.hidden(32, [_rows(other, 0, 9, [5]), _rows(tokens, 7, 12, [9, 4, 0])])[9:])
    got.append(pieces.hidden(1, [_rows(tokens, 19, 1, [9, 4, 0])]))
    got.append(pieces.hidden(32, [_rows(tokens, 20, 20, [9, 4, 0]), _rows(other, 8, 1, [5])])[:20])
    assert torch.equal(torch.cat(got).view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("kind", ["default", "llama3"])
def test_float32_frequencies_are_close_to_exact_ones(kind: str) -> None:
    rope = RopeSettings(500000.0, kind, 8.0, 8192)
    exact, rough = rope.inv_freq(128), rope.inv_freq_float32(128, "cpu")
    torch.testing.assert_close(rough.double(), exact, rtol=1e-5, atol=0)
    assert rough.dtype == torch.float32
