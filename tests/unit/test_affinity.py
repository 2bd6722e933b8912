"""Affinity: the replay counts what was planted, the trace names the planted operator, settings, rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from llm42 import fingerprint as fp
from llm42.affinity import Output, replay_outputs
from llm42.affinity_trace import first_difference
from llm42.config import Settings
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, SamplingParams, Window
from llm42.sampling import sample_row
from llm42.verifier.build import build_verifier, load_for
from llm42.verifier.core import Verifier
from llm42_kernels.cpu import cpu_operators
from llm42_kernels.linear import rounded_head
from llm42_kernels.operators import Operators

SETTINGS = Settings.load({"verifier": {"buckets": [16, 64], "kv_tokens": 2048, "certificate_dir": None}})
PROMPT = tuple(range(200, 230))


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[LoadedModel, Verifier]]:
    model, tokenizer = load_for(SETTINGS)
    verifier = build_verifier(SETTINGS, model, tokenizer).start()
    yield model, verifier
    verifier.close()


@pytest.fixture(scope="module")
def own(parts: tuple[LoadedModel, Verifier]) -> Output:
    """What the verifier itself answers, 24 tokens."""
    out = Output(PROMPT)
    for _ in range(24):
        (answer,) = parts[1].verify(
            [Window("own", (*PROMPT, *out.tokens), len(PROMPT), (), SamplingParams())]
        )
        assert isinstance(answer, Commit)
        out.tokens.append(answer.next_token)
        out.logprobs.append(answer.logprobs[0].logprob)
    return out


def test_the_verifiers_own_output_has_no_mismatch(parts: tuple[LoadedModel, Verifier], own: Output) -> None:
    found = replay_outputs(parts[1], [PROMPT], [own.tokens], [own.logprobs])
    assert (found.tokens, found.mismatches, found.equal) == (24, 0, 24)
    assert found.to_json()["equal_share"] == 1.0


def test_planted_tokens_and_log_probabilities_are_counted(
    parts: tuple[LoadedModel, Verifier], own: Output
) -> None:
    """Two outputs, each with one wrong token at another place: what follows is judged after that token."""
    outputs, logprobs = [], []
    for at in (0, 23):
        tokens = list(own.tokens)
        tokens[at] = (tokens[at] + 1) % 40000
        outputs.append(tokens)
        logprobs.append(own.logprobs)
    shifted = [x + 1e-3 for x in own.logprobs]
    found = replay_outputs(parts[1], [PROMPT] * 3, [*outputs, own.tokens], [*logprobs, shifted])
    assert found.tokens == 72
    last = replay_outputs(parts[1], [PROMPT], outputs[1:], logprobs[1:])
    assert (last.mismatches, last.equal) == (1, 23)
    first = replay_outputs(parts[1], [PROMPT], outputs[:1], logprobs[:1])
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


@pytest.mark.parametrize(
    ("operator", "call", "place"),
    [("silu_mul", 7, "after layer 7 gate_up"), ("linear", 10, "layer 2 gate_up"),
     ("rms_norm", 0, "after the embedding"), ("rotary", 29, "after layer 29 qkv")],
)  # fmt: skip
def test_the_planted_operator_is_named(
    parts: tuple[LoadedModel, Verifier], own: Output, operator: str, call: int, place: str
) -> None:
    model, verifier = parts
    tokens = (*PROMPT, *own.tokens[:3])
    # the verifier's own operators: without the plant nothing may differ in the prompt's chunk
    ops = cpu_operators(
        {k: v for k, v in verifier.manifest["providers"].items() if k in ("linear", "lm_head")}
    )
    args = (verifier.manifest, tokens[: len(PROMPT)], len(PROMPT), 1)
    found = first_difference(SETTINGS, model, _one_ulp(ops, operator, call), *args)
    assert found is not None
    assert (found.operator, found.place, found.position) == (operator, place, len(PROMPT) - 1)
    assert found.differing == (1 if operator != "rotary" else found.differing)


def test_a_broken_attention_is_named(
    parts: tuple[LoadedModel, Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llm42.engine import batch

    usual = batch.PlainAttention._chunk

    def shifted(self: batch.PlainAttention, *args: object) -> torch.Tensor:
        return usual(self, *args) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(batch.PlainAttention, "_chunk", shifted)
    model, verifier = parts
    found = first_difference(SETTINGS, model, cpu_operators(), verifier.manifest, PROMPT, len(PROMPT), 1)
    assert found is not None
    assert (found.operator, found.place) == ("attention", "layer 0")


def test_rounded_logits_tie_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 8.001, 8.002, 8.0]])
    ops = replace(cpu_operators(), lm_head=lambda x, w, b: x)
    rounded = rounded_head(ops, torch.bfloat16).lm_head(logits, logits, None)
    assert rounded.dtype == torch.float32
    assert sample_row(logits[0], SamplingParams(), [1], 1).token == 2
    assert sample_row(rounded[0], SamplingParams(), [1], 1).token == 1


def test_the_settings_are_in_the_fingerprint_and_change_the_bits(
    parts: tuple[LoadedModel, Verifier], own: Output
) -> None:
    settings = SETTINGS.model_copy(
        update={"verifier": SETTINGS.verifier.model_copy(update={"logits_dtype": "activation"})}
    )
    model, verifier = parts
    _, tokenizer = load_for(SETTINGS)
    before, after = (fp.inputs(model, s, tokenizer.identity) for s in (SETTINGS, settings))
    assert fp.differing_fields(before, after) == {"logits_dtype": ("float32", "activation")}
    rounding = build_verifier(settings, model, tokenizer).start()
    try:
        assert rounding.fingerprint != verifier.fingerprint
        found = replay_outputs(rounding, [PROMPT], [own.tokens], [own.logprobs])
    finally:
        rounding.close()
    assert found.equal < found.tokens / 2, "rounded logits give other log-probabilities"


def test_affinity_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs model\.device 'cuda'"):
        Settings.load({"verifier": {"affinity": "vllm"}})
    settings = Settings.load({"model": {"device": "cuda"}, "verifier": {"affinity": "vllm"}})
    assert settings.verifier.affinity == "vllm"
