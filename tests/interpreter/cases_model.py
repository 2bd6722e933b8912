"""The CUDA forward, step packing and sampler on a tiny model, against the CPU verifier's code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm42.cache import KVCache
from llm42.engine.vllm import agreement
from llm42.models.config import ModelConfig
from llm42.models.rope import RopeSettings
from llm42.models.weights import LayerWeights, LoadedModel, ModelWeights
from llm42.protocol import SamplingParams
from llm42.sampling import Draw, is_plain, sample_row
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.cuda.forward import CudaForward
from llm42.verifier.cuda.pack import Layout, StepPacker
from llm42.verifier.cuda.runner import _wishes
from llm42.verifier.cuda.sampler import (
    alternatives,
    draw_rows,
    sample_step_device,
)
from llm42.verifier.runner import SequenceRows
from llm42_kernels.attention import AttentionShape, Tile
from llm42_kernels.attention_flash import make_attention
from llm42_kernels.cpu import cpu_operators
from llm42_kernels.cuda import cuda_operators
from llm42_kernels.operators import Operators
from llm42_kernels.sampling import row_stats
from tests.support import sweep

BLOCK, HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 16, 4, 2, 64, 128, 301
TRITON = {"linear": "triton", "lm_head": "triton"}


def _model(dtype: torch.dtype, qk_norm: bool = False) -> LoadedModel:
    config = ModelConfig(
        "llama",
        VOCAB,
        HIDDEN,
        192,
        2,
        HEADS,
        KV_HEADS,
        DIM,
        1e-5,
        RopeSettings(10000.0),
        512,
        qk_norm=qk_norm,
    )

    def w(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(width)).to(dtype)

    rows = (HEADS + 2 * KV_HEADS) * DIM
    layers = [
        LayerWeights(
            norm(HIDDEN), w(rows, HIDDEN), w(rows), norm(DIM) if qk_norm else None,
            norm(DIM) if qk_norm else None,
            w(HIDDEN, HEADS * DIM), None, norm(HIDDEN), w(384, HIDDEN), None, w(HIDDEN, 192), None,
        )
        for _ in range(2)
    ]  # fmt: skip
    from llm42_kernels.rotary import cos_sin_table

    table = cos_sin_table(config.rope.inv_freq(config.head_dim), 512)
    weights = ModelWeights(w(VOCAB, HIDDEN), layers, norm(HIDDEN), w(VOCAB, HIDDEN), table)
    return LoadedModel(config, weights, dtype, "cpu", "test", "none")


def _widened(model: LoadedModel) -> LoadedModel:
    """The same weights as the CPU runner keeps them, in float32."""
    layers = [
        LayerWeights(
            *(
                None if x is None else x.float()
                for x in (getattr(layer, n) for n in layer.__dataclass_fields__)
            )
        )
        for layer in model.weights.layers
    ]
    w = model.weights
    wide = ModelWeights(w.embed.float(), layers, w.final_norm.float(), w.lm_head.float(), w.cos_sin)
    return LoadedModel(model.config, wide, model.dtype, "cpu", "test", "none")


class Harness:
    """CudaForward on CPU tensors: pack, upload, run."""

    def __init__(
        self,
        model: LoadedModel,
        rows: int = 32,
        ops: Operators | None = None,
        shape: AttentionShape | None = None,
    ) -> None:
        self.model, self.kv = model, KVCache(2, 12, BLOCK, KV_HEADS, DIM, model.dtype)
        self.kv.fill(range(12), float("nan"))
        tiles = (Tile(32, 4, 2, 1), Tile(16, 1, 2, 1))
        shape = shape or AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, 64, *tiles)
        attention = make_attention(shape, torch.device("cpu"), 8)
        self.layouts = {n: Layout(n, n + 8, 200) for n in (1, 16, 32, rows)}
        self.packers = {n: StepPacker(x, attention.planner, BLOCK) for n, x in self.layouts.items()}
        self.host = np.zeros(max(x.total for x in self.layouts.values()), np.int32)
        views = {n: x.views(torch.from_numpy(self.host)) for n, x in self.layouts.items()}
        self.sampled = torch.zeros(rows, dtype=torch.int32)
        """Tokens of the logit rows of the step before."""
        self.forward = CudaForward(
            model, ops or cuda_operators(TRITON), self.kv, attention, views, self.sampled
        )

    def hidden(self, bucket: int, sequences: list[SequenceRows]) -> torch.Tensor:
        views = self.layouts[bucket].views(self.host)
        packed = self.packers[bucket].pack(views, bucket, sequences)
        out = torch.empty(bucket, HIDDEN, dtype=self.model.dtype)
        self.forward.body(bucket, packed.variant, out)
        return out[views["logit_rows"][: packed.logit_rows]]


def _rows(tokens: list[int], start: int, count: int, table: list[int], first_logit: int = 0) -> SequenceRows:
    return SequenceRows(tokens, start, count, table, first_logit, 1, SamplingParams())


@pytest.mark.parametrize("qk_norm", sweep([False, True], quick=[True]))
def test_hidden_states_are_close_to_the_cpu_runner(qk_norm: bool) -> None:
    model = _model(torch.float16, qk_norm)
    wide = _widened(model)
    a, b = torch.randint(0, VOCAB, (20,)).tolist(), torch.randint(0, VOCAB, (5,)).tolist()
    sequences = [_rows(a, 0, 20, [3, 5], 18), _rows(b, 0, 5, [7])]
    got = Harness(model).hidden(32, sequences)
    kv = KVCache(2, 12, BLOCK, KV_HEADS, DIM, torch.float16)
    runner = CPURunner(wide, cpu_operators(), kv, (32,))
    with torch.inference_mode():
        want = runner._hidden(32, sequences)[[18, 19, 20, 21, 22, 23, 24]]
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_chunks_buckets_and_companions_give_equal_bits() -> None:
    model = _model(torch.float16)
    tokens, other = torch.randint(0, VOCAB, (40,)).tolist(), torch.randint(0, VOCAB, (9,)).tolist()
    whole = Harness(model, 64)
    want = whole.hidden(64, [_rows(tokens, 0, 40, [1, 2, 3])])
    pieces = Harness(model, 64)
    got = [pieces.hidden(16, [_rows(tokens, 0, 7, [9, 4, 0])])]
    got.append(pieces.hidden(32, [_rows(other, 0, 9, [5]), _rows(tokens, 7, 12, [9, 4, 0])])[9:])
    got.append(pieces.hidden(1, [_rows(tokens, 19, 1, [9, 4, 0])]))
    got.append(pieces.hidden(32, [_rows(tokens, 20, 20, [9, 4, 0]), _rows(other, 8, 1, [5])])[:20])
    assert torch.equal(torch.cat(got).view(torch.int16), want.view(torch.int16))


def test_a_token_of_the_step_before_is_that_token() -> None:
    model = _model(torch.float16)
    a, b = torch.randint(1, VOCAB, (20,)).tolist(), torch.randint(1, VOCAB, (9,)).tolist()

    def last_rows(known: bool, shift: int = 0) -> torch.Tensor:
        harness = Harness(model)
        harness.hidden(32, [_rows(a, 0, 19, [3, 5]), _rows(b, 0, 8, [7])])
        harness.sampled[:3] = torch.tensor([0, b[-1], a[-1]])
        if known:
            return harness.hidden(16, [_rows(a, 19, 1, [3, 5]), _rows(b, 8, 1, [7])])
        late = [_rows(a[:-1], 19, 1, [3, 5]), _rows(b[:-1], 8, 1, [7])]
        late[0].feed, late[1].feed = 2 - shift, 1 - shift
        return harness.hidden(16, late)

    assert torch.equal(last_rows(False).view(torch.int16), last_rows(True).view(torch.int16))
    assert not torch.equal(last_rows(False, shift=1), last_rows(True)), "control: a stale token"


def test_one_place_of_logit_rows_serves_steps_of_every_size() -> None:
    """The head's graph of a number of logit rows reads them, whatever the step's bucket was."""
    harness, tokens = Harness(_model(torch.float16), 128), list(range(100, 130))
    views = {n: layout.views(harness.host) for n, layout in harness.layouts.items()}
    views[128]["logit_rows"][:] = 31  # what a larger step has left there
    sequences = [_rows(tokens, 0, 20, [3, 5], 17), _rows(tokens, 4, 3, [7])]
    packed = harness.packers[128].pack(views[128], 128, sequences)
    assert packed.logit_rows == 6
    assert views[16]["logit_rows"].tolist() == [17, 18, 19, 20, 21, 22] + [0] * 10
    moved = views[16]["positions"].tolist() != views[128]["positions"][:16].tolist()
    assert moved, "control: other parts are elsewhere"


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.8, seed=6),
    SamplingParams(temperature=0.5, min_p=0.1, repetition_penalty=1.3, seed=7),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, logit_bias=((4, 30.0), (5, -30.0))),
    SamplingParams(min_tokens=9, min_tokens_banned=(0, 1, 2)),
]


def test_sampler_equals_the_row_sampler() -> None:
    logits = (torch.randn(len(PARAMS), VOCAB) * 3).round(decimals=1)
    logits[5, 1] = 50.0
    history = torch.randint(0, VOCAB, (12,)).tolist() * 2
    stats = row_stats(logits)
    rows = [i for i, p in enumerate(PARAMS) if not is_plain(p)]
    assert rows == [1, 2, 3, 4, 5]
    draw_rows(logits, stats, rows, [Draw(PARAMS[i], history, 20, 3) for i in rows])
    ids, values = alternatives(logits, stats, [0, 2], 3)
    for i, params in enumerate(PARAMS):
        want = sample_row(logits[i], params, history, 20, 3)
        assert int(stats.token[i]) == want.token
        assert abs(float(stats.logprob[i]) - want.logprob.logprob) < 1e-5
        if i in (0, 2):
            assert ids[[0, 2].index(i)].tolist() == [t for t, _ in want.logprob.top]
    assert values.shape == (2, 3)
    whole = sample_step_device(logits, [Draw(p, history, 20, 3) for p in PARAMS])
    assert [w.token for w in whole] == stats.token.tolist()
    assert [t for t, _ in whole[2].logprob.top] == ids[1].tolist()
    assert not stats.bad.any()


def test_a_nan_row_is_flagged_and_its_neighbour_untouched() -> None:
    logits = torch.randn(2, VOCAB)
    clean = row_stats(logits.clone())
    logits[0, 5] = float("nan")
    stats = row_stats(logits)
    draw_rows(logits, stats, [0], [Draw(PARAMS[1], [1, 2], 1, 0)])
    assert stats.bad.tolist() == [1, 0]
    assert torch.equal(stats.log_sum[1], clean.log_sum[1])


def _proposed(logits: torch.Tensor, rows: list[int], together: bool) -> list[int]:
    """What vLLM's argmax makes of the rows afterwards."""
    history = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist() * 2
    joined = agreement.History(history[:20], history[20:])
    draws = [Draw(PARAMS[i % len(PARAMS)], joined, 20) for i in range(len(rows))]
    (agreement.draw_together if together else agreement.leave_only_drawn)(logits, rows, draws)
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("count", sweep([5, 70], quick=[5]))
def test_the_fast_path_draws_its_rows_together_as_one_by_one(count: int) -> None:
    logits = (torch.randn(count + 3, VOCAB) * 3).round(decimals=1).to(torch.bfloat16)
    rows = torch.randperm(count + 3)[:count].tolist()
    others = [i for i in range(count + 3) if i not in rows]
    ours, alone = logits.clone(), logits.clone()
    assert _proposed(ours, rows, together=True) == _proposed(alone, rows, together=False)
    assert torch.equal(ours[others], logits[others])
    assert bool((ours[rows] == 0.0).sum(-1).eq(1).all()), "one token is possible"
    if count > agreement.ROWS_AT_ONCE:  # control: the rows' own parameters matter
        assert _proposed(logits.clone(), rows[::-1], together=True) != _proposed(logits.clone(), rows, True)


def test_a_nan_row_proposes_something() -> None:
    logits = torch.randn(2, VOCAB)
    logits[0] = float("nan")
    agreement.draw_together(logits, [0, 1], [Draw(PARAMS[1], [1, 2], 1)] * 2)
    assert bool(logits[0].isfinite().any())


def test_a_prompt_chunk_asks_for_nothing_and_later_rows_find_their_place() -> None:
    greedy, warm = SamplingParams(), SamplingParams(temperature=1.0)
    chunk = SequenceRows(list(range(60)), 0, 20, [0, 1], 40, 41, warm, 2)
    last = SequenceRows(list(range(60)), 30, 12, [2, 3, 4], 40, 41, warm, 2)
    plain = SequenceRows(list(range(9)), 5, 3, [5], 0, 6, greedy, 0)
    assert _wishes([chunk]) == ([], [], {})
    general, asked, tops = _wishes([chunk, plain, last])
    assert general == [3, 4], "rows 0 to 2 are the greedy sequence's"
    assert [len(d.history) for d in asked] == [41, 42]
    assert tops == {2: [3, 4]}
