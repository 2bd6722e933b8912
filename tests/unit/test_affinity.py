"""Affinity: the comparison counts what was planted, the trace names the operator, settings, rounding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llm42 import fingerprint as fp
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.engine.torch.batch import PlainAttention
from llm42.local.affinity import Comparison, compare_outputs
from llm42.local.affinity_loads import Load, TooMany, answers, loads_of
from llm42.local.affinity_trace import first_difference
from llm42.local.assembly import Output
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, Delta, FinishReason, Request, SamplingParams, Window
from llm42.sampling import sample_row
from llm42.verifier import manifest
from llm42.verifier.build import build_verifier
from llm42.verifier.scheduler import Verifier
from llm42_kernels import cpu
from llm42_kernels.attention_cpu import attention_tiled
from llm42_kernels.operators import Operators, rounded_head
from tests.support import VOCAB, Lab, verified

PROMPT = tuple(range(200, 230))
STEP = 64
"""Rows of a prompt that both sides compute in one step: products of one shape, so equal bits everywhere."""
Parts = tuple[LoadedModel, Verifier]


@pytest.fixture(scope="module")
def settings(tiny: Lab) -> Settings:
    verifier = {"buckets": [16, STEP], "kv_tokens": 2048, "certificate_dir": None}
    model = {"path": tiny.settings.model.path, "max_model_len": 768}
    return Settings.load({"model": model, "verifier": verifier})


@pytest.fixture(scope="module")
def parts(settings: Settings) -> Iterator[Parts]:
    model, tokenizer = load_for(settings)
    verifier = build_verifier(settings, model, tokenizer).start()
    yield model, verifier
    verifier.close()


def compared(*arguments: Any) -> Comparison:
    return asyncio.run(compare_outputs(*arguments))


@pytest.fixture(scope="module")
def own(parts: Parts) -> Output:
    """What the verifier itself answers, 24 tokens."""
    out = Output()
    for _ in range(24):
        window = Window("own", (*PROMPT, *out.tokens), len(PROMPT), (), SamplingParams())
        (answer,) = verified(parts[1], window)
        assert isinstance(answer, Commit)
        out.tokens.append(answer.next_token)
        out.logprobs.append(answer.logprobs[0].logprob)
    return out


def test_the_verifiers_own_output_has_no_mismatch(parts: Parts, own: Output) -> None:
    found = compared(parts[1], [PROMPT], [own.tokens], [own.logprobs])
    assert (found.tokens, found.mismatches, found.equal) == (24, 0, 24)
    assert found.to_json()["equal_share"] == 1.0


def test_planted_tokens_and_log_probabilities_are_counted(parts: Parts, own: Output) -> None:
    """Two outputs, each with one wrong token at another place: what follows is judged after that token."""
    outputs, logprobs = [], []
    for at in (0, 23):
        tokens = list(own.tokens)
        tokens[at] = (tokens[at] + 1) % VOCAB
        outputs.append(tokens)
        logprobs.append(own.logprobs)
    shifted = [x + 1e-3 for x in own.logprobs]
    found = compared(parts[1], [PROMPT] * 3, [*outputs, own.tokens], [*logprobs, shifted])
    assert found.tokens == 72
    last = compared(parts[1], [PROMPT], outputs[1:], logprobs[1:])
    assert (last.mismatches, last.equal) == (1, 23)
    first = compared(parts[1], [PROMPT], outputs[:1], logprobs[:1])
    assert first.mismatches >= 1, "the wrong first token, and what it leads to"
    assert found.mismatches == first.mismatches + 1, "log-probabilities alone are no mismatch"
    assert found.equal == first.equal + 23, "nor are shifted ones equal"


def _one_ulp(ops: Operators, operator: str, call: int) -> Operators:
    """`operator` with one element off by one ulp in its call number `call`."""
    run, count = getattr(ops, operator), [0]

    def broken(*args: object) -> object:
        out = run(*args)
        y = out[0] if isinstance(out, tuple) else out
        if count[0] == call:
            y[-1, ..., -1] = torch.nextafter(y[-1, ..., -1], torch.tensor(1e9, dtype=y.dtype))
        count[0] += 1
        return out

    return replace(ops, **{operator: broken})


def _side(parts: Parts) -> tuple[Operators, tuple[Any, ...]]:
    """The verifier's own operators as the fast path's, and what else the comparison takes: a prompt that is
    one whole step."""
    verifier = parts[1]
    named = {k: v for k, v in verifier.manifest["providers"].items() if k in cpu.PROVIDERS}
    return cpu.cpu_operators(named), (verifier.manifest, tuple(range(100, 100 + STEP)), STEP, 1)


@pytest.fixture
def canonical_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path's chunks with the verifier's attention: their own products have another shape, and it is
    the machine's affair whether those give equal bits."""

    def chunk(self: PlainAttention, layer: int, q: Tensor, table: Tensor, start: int) -> Tensor:
        keys, values = self.kv.gather(layer, table)
        return attention_tiled(q, keys, values, start, self.scale).flatten(1)

    monkeypatch.setattr(PlainAttention, "_chunk", chunk)


@pytest.mark.parametrize(
    ("operator", "call", "place"),
    [("silu_mul", 1, "after layer 1 gate_up"), ("linear", 10, "layer 2 gate_up"),
     ("rms_norm", 0, "after the embedding"), ("rotary", 2, "after layer 2 qkv")],
)  # fmt: skip
def test_the_planted_operator_is_named(
    parts: Parts, settings: Settings, canonical_attention: None, operator: str, call: int, place: str
) -> None:
    ops, args = _side(parts)
    assert first_difference(settings, parts[0], ops, *args) is None, "without the plant nothing differs"
    found = first_difference(settings, parts[0], _one_ulp(ops, operator, call), *args)
    assert found is not None
    assert (found.operator, found.place, found.position) == (operator, place, STEP - 1)
    assert found.differing == (1 if operator != "rotary" else found.differing)


def test_a_broken_attention_is_named(
    parts: Parts, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PlainAttention._chunk

    def shifted(self: PlainAttention, *args: object) -> Tensor:
        return usual(self, *args) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(PlainAttention, "_chunk", shifted)
    ops, args = _side(parts)
    found = first_difference(settings, parts[0], ops, *args)
    assert found is not None
    assert (found.operator, found.place) == ("attention", "layer 0")


def test_rounded_logits_tie_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 8.001, 8.002, 8.0]])
    ops = replace(cpu.cpu_operators(), lm_head=lambda x, w, b: x)
    rounded = rounded_head(ops, torch.bfloat16).lm_head(logits, logits, None)
    assert rounded.dtype == torch.float32
    assert sample_row(logits[0], SamplingParams(), [1], 1).token == 2
    assert sample_row(rounded[0], SamplingParams(), [1], 1).token == 1


def test_the_settings_are_in_the_fingerprint_and_change_the_bits(
    parts: Parts, own: Output, settings: Settings
) -> None:
    changed = settings.verifier.model_copy(update={"logits_dtype": "activation"})
    rounded = settings.model_copy(update={"verifier": changed})
    model, verifier = parts
    _, tokenizer = load_for(settings)
    before, after = (manifest.inputs(model, s, tokenizer.identity) for s in (settings, rounded))
    assert fp.differing_fields(before, after) == {"logits_dtype": ("float32", "activation")}
    rounding = build_verifier(rounded, model, tokenizer).start()
    try:
        assert rounding.fingerprint != verifier.fingerprint
        found = compared(rounding, [PROMPT], [own.tokens], [own.logprobs])
    finally:
        rounding.close()
    assert found.equal < found.tokens / 2, "rounded logits give other log-probabilities"


def test_affinity_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs model\.device 'cuda'"):
        Settings.load({"verifier": {"affinity": "vllm"}})
    settings = Settings.load({"model": {"device": "cuda"}, "verifier": {"affinity": "vllm"}})
    assert settings.verifier.affinity == "vllm"


class Recorder:
    """A fast path that answers as many tokens as it may, one a turn of the loop, and notes who was there."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.seen: list[tuple[str, frozenset[str]]] = []
        """Who began, and who was there already."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.seen.append((request.request_id, frozenset(self.there)))
        self.there.add(request.request_id)
        for _ in range(request.max_tokens):
            await asyncio.sleep(0)
            yield Delta((1,), "")
        self.there.remove(request.request_id)
        yield Delta((), "", finish_reason=FinishReason.LENGTH)


def began_beside(load: Load) -> list[int]:
    """For each request of the load, how many were being answered when it began."""
    recorder, prompts = Recorder(), [[1]] * load.requests
    found = asyncio.run(answers(recorder, load, prompts, 40))  # type: ignore[arg-type]
    assert [len(o.tokens) for o in found] == load.max_tokens(40)
    return [len(others) for _, others in recorder.seen]


def test_in_the_decode_load_nobody_comes_while_others_decode() -> None:
    """All are there before a wave has its first token, and no wave begins before the last one ends."""
    assert began_beside(Load("decode", 4, 10)) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_in_the_mixed_load_each_comes_as_another_ends() -> None:
    assert began_beside(Load("mixed", 4, 10)) == [0, 1, 2, *[3] * 7]


def test_prompts_of_the_mixed_load_have_several_lengths_and_fit(tiny: Lab) -> None:
    load = Load("mixed", 8, 16)
    lengths = [len(p) for p in load.prompts(tiny.tokenizer, 4000)]
    assert max(lengths) > 3 * min(lengths)
    assert len({tuple(p) for p in load.prompts(tiny.tokenizer, 4000)}) == 16
    room = sorted(lengths)[4]
    assert max(len(p) for p in load.prompts(tiny.tokenizer, room)) <= room


def test_the_loads_of_a_device() -> None:
    def kinds(tree: dict[str, Any], *sizes: int) -> list[tuple[str, int, int]]:
        return [(x.kind, x.concurrent, x.requests) for x in loads_of(Settings.load(tree), sizes, None)]

    assert kinds({}) == [("decode", 8, 16), ("mixed", 8, 16)]
    vllm = {"model": {"device": "cuda"}, "engine": {"kind": "vllm"}}
    assert [n for _, n, _ in kinds(vllm)] == [8, 8, 64, 64]
    few = {"engine": {"max_batch": 4}}
    assert kinds(few) == [("decode", 4, 8), ("mixed", 4, 8)]
    assert [n for _, n, _ in kinds(few, 2, 3)] == [2, 2, 3, 3]
    with pytest.raises(TooMany, match="--concurrent 5: the engine decodes 4 at a time"):
        kinds(few, 5)
