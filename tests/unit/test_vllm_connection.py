"""What the adapter asks of vLLM (no vLLM is needed here): arguments, versions, log-probabilities, imports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lib.random_model import SMALL_64
from llm42.checkpoint.description import load_tokenizer
from llm42.config import Settings
from llm42.engine.vllm import connection as vllm_connection
from llm42.engine.vllm.connection import check_version
from llm42.engine.vllm.engine import VllmEngine
from llm42.engine.vllm.export import config_json
from llm42.engine.vllm.options import EngineUnavailable, engine_arguments, model_directory
from llm42.engine.vllm.sampling import arguments_of, draw_of, finish_of, token_logprobs
from llm42.protocol import FinishReason, SamplingParams, TokenLogprob
from llm42_kernels.rmsnorm import carried_launch
from tests.support import GREEDY, PENALISED, SAMPLED, write_model
from tests.unit.fake_vllm import request_of

NEUTRAL = {"max_tokens", "ignore_eos", "stop_token_ids", "temperature"}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_deterministic_requests_ask_for_the_plain_argmax(sampling: SamplingParams) -> None:
    request = request_of("d", sampling=sampling, max_tokens=50, stop_token_ids=(7, 9), num_logprobs=3)
    arguments = arguments_of(request, 12, sampled_agreement=False)
    assert set(arguments) == NEUTRAL
    assert arguments["temperature"] == 0.0
    assert arguments["ignore_eos"]
    assert arguments["stop_token_ids"] == [7, 9]
    assert arguments["max_tokens"] == 38


def test_only_requests_that_need_it_ask_for_the_canonical_draw() -> None:
    def asked(sampling: SamplingParams, deterministic: bool = True) -> Any:
        request = request_of("d", deterministic, sampling=sampling)
        return draw_of(arguments_of(request, 3, sampled_agreement=True).get("extra_args"))

    assert asked(GREEDY) is None
    assert asked(replace(GREEDY, top_p=0.5, seed=3)) is None
    assert asked(SAMPLED, deterministic=False) is None
    assert asked(SAMPLED) == (SAMPLED, 10)
    assert asked(replace(GREEDY, repetition_penalty=1.1)) is not None


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_the_canonical_draw_survives_the_way_to_vllms_process(sampling: SamplingParams) -> None:
    extra = arguments_of(request_of("d", sampling=sampling), 0, sampled_agreement=True)["extra_args"]
    assert draw_of(json.loads(json.dumps(extra))) == (sampling, 10)


def test_best_effort_requests_get_vllms_sampler_as_asked() -> None:
    request = request_of("b", False, sampling=PENALISED, max_tokens=50, stop_token_ids=(7,), num_logprobs=2)
    asked = arguments_of(request, 0, sampled_agreement=True)
    for name in ("temperature", "top_k", "top_p", "min_p", "min_tokens", "seed"):
        assert asked[name] == getattr(PENALISED, name)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert asked[name] == getattr(PENALISED, name)
    assert asked["logit_bias"] == {17: 2.5, 300: -4.0}
    assert arguments_of(replace(request, max_tokens=4), 0)["min_tokens"] == 4, "vLLM refuses more"
    assert [arguments_of(request, done)["min_tokens"] for done in (5, 30)] == [4, 0]
    assert (asked["logprobs"], asked["max_tokens"], asked["stop_token_ids"]) == (2, 50, [7])


def test_a_seed_that_nobody_named_is_not_passed_on() -> None:
    """vLLM draws faster without one."""
    request = request_of("b", False, sampling=SAMPLED)
    assert arguments_of(request, 0, False)["seed"] == SAMPLED.seed
    assert "seed" not in arguments_of(replace(request, seeded=False), 0, False)
    assert "seed" not in arguments_of(request, 0, seeds=False)
    large = replace(request, sampling=replace(SAMPLED, seed=2**64 - 1))
    assert 0 <= arguments_of(large, 0, False)["seed"] < 2**63


def entry(logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_logprobs() -> None:
    inside = {5: entry(-0.1, 1), 9: entry(-3.0, 2)}
    outside = {4: entry(-6.0, 17), 5: entry(-0.2, 1), 9: entry(-2.0, 2)}
    assert token_logprobs([9, 4], [inside, outside], 2) == (
        TokenLogprob(9, -3.0, ((5, -0.1), (9, -3.0))),
        TokenLogprob(4, -6.0, ((5, -0.2), (9, -2.0))),
    )
    assert token_logprobs([4], [{4: entry(-6.0, 17)}], 0) == (TokenLogprob(4, -6.0),)
    assert token_logprobs([4], None, None) == ()


def test_finish_reasons() -> None:
    assert [finish_of(r) for r in (None, "stop", "length")] == [None, FinishReason.STOP, FinishReason.LENGTH]
    with pytest.raises(RuntimeError, match="error"):
        finish_of("error")


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1.dev3", "0.27.0+cpu", "0.32.0+cpu", "0.32.4"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "0.6.3", "dev"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(EngineUnavailable, match=r"0\.26.*0\.33") as caught:
        check_version(version)
    assert version in str(caught.value)


def settings_of(**vllm: Any) -> Settings:
    return Settings.load({"engine": {"kind": "vllm", "vllm": vllm}})


def near(place: Path, **extra_args: Any) -> dict[str, Any]:
    """Arguments with verifier.affinity vllm, for the model at `place`."""
    engine = {"kind": "vllm", "vllm": {"custom_ops": ["+silu_and_mul"], "extra_args": extra_args}}
    tree = {"model": {"device": "cuda"}, "verifier": {"affinity": "vllm"}, "engine": engine}
    return engine_arguments(Settings.load(tree), str(place))


def shape_of(place: Path, hidden_size: int) -> Path:
    """A directory with the configuration of a model of that width."""
    place.mkdir()
    config = replace(SMALL_64, hidden_size=hidden_size, num_heads=hidden_size // 64, num_kv_heads=1)
    (place / "config.json").write_text(json.dumps(config_json(config, "bfloat16")))
    return place


@pytest.mark.parametrize("width", [2048, 4096])
def test_affinity_leaves_attention_as_it_comes(tmp_path: Path, width: int) -> None:
    """vLLM splits a context where that is faster: best effort pays nothing. Whole by the operator's wish."""
    place, whole = shape_of(tmp_path / "model", width), {"flash_attn_max_num_splits_for_cuda_graph": 1}
    assert "attention_config" not in near(place)
    assert near(place, attention_config=whole)["attention_config"] == whole, "what is asked for is given"
    plain = Settings.load({"engine": {"kind": "vllm", "vllm": {"custom_ops": ["+silu_and_mul"]}}})
    changed = {k for k, v in near(place).items() if engine_arguments(plain, str(place)).get(k) != v}
    assert changed == ({"compilation_config"} if width > 2048 else set())


def test_affinity_leaves_no_order_of_a_wide_model_to_a_measurement_of_time(tmp_path: Path) -> None:
    narrow, wide = (shape_of(tmp_path / str(width), width) for width in (2048, 4096))
    assert near(narrow)["compilation_config"] == {"custom_ops": ["+silu_and_mul"]}
    found = near(wide, compilation_config={"inductor_compile_config": {"x": 1}, "mode": 2})
    inner = found["compilation_config"].pop("inductor_compile_config")
    assert found["compilation_config"] == {"custom_ops": ["+silu_and_mul"], "mode": 2}
    assert inner["deterministic"] is True
    assert inner["benchmark_combo_kernel"] is False
    assert inner["x"] == 1
    assert carried_launch(2048) != carried_launch(4096), "the verifier's norm takes the launch of that mode"


def test_engine_arguments() -> None:
    asked = engine_arguments(settings_of(), "/model")
    assert (asked["scheduling_policy"], asked["enable_prefix_caching"]) == ("priority", True)
    assert (asked["dtype"], asked["max_model_len"]) == ("bfloat16", 2048)
    assert not {"logits_processors", "compilation_config", "max_num_batched_tokens"} & set(asked)
    more = engine_arguments(
        settings_of(
            dtype="float32",
            custom_ops=["+rms_norm"],
            sampled_agreement=True,
            max_num_batched_tokens=64,
            extra_args={"max_num_seqs": 3, "block_size": 32},
        ),
        "/model",
    )
    assert more["compilation_config"] == {"custom_ops": ["+rms_norm"]}
    assert more["logits_processors"] == ["llm42.engine.vllm.draw:CanonicalDraw"]
    names = ("dtype", "max_num_batched_tokens", "max_num_seqs", "block_size")
    assert [more[name] for name in names] == ["float32", 64, 3, 32]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scheduling_policy", "depends"), ("enable_prefix_caching", "depends"),
        ("model", "model.path"), ("tensor_parallel_size", "says it"), ("pipeline_parallel_size", "one node"),
        ("speculative_config", "min_p"), ("spec_method", "min_p"), ("runner", "text"),
        ("pooler_config", "text"), ("logprobs_mode", "raw logits"), ("max_logprobs", "20"),
        ("data_parallel_size", "fastpath_replicas"), ("data_parallel_backend", "fastpath_replicas"),
    ],
)  # fmt: skip
def test_arguments_that_the_engine_depends_on_cannot_be_changed(name: str, reason: str) -> None:
    with pytest.raises(EngineUnavailable, match=f"{name}: .*{reason}"):
        engine_arguments(settings_of(extra_args={name: "other"}), "/model")


def test_the_canonical_draw_comes_after_other_processors() -> None:
    """Whatever they make of the logits, what it leaves is what is proposed."""
    own = {"extra_args": {"logits_processors": ["mine:Processor"]}}
    assert engine_arguments(settings_of(**own), "/model")["logits_processors"] == ["mine:Processor"]
    both = engine_arguments(settings_of(**own, sampled_agreement=True), "/model")["logits_processors"]
    assert both == ["mine:Processor", "llm42.engine.vllm.draw:CanonicalDraw"]


def test_what_undoes_the_affinity_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = shape_of(tmp_path / "wide", 4096)
    near(place, attention_config={"backend": "X"}, compilation_config={"mode": 2})
    assert not caplog.records
    near(place, attention_config={"flash_attn_max_num_splits_for_cuda_graph": 1})
    assert not caplog.records, "it brings vLLM nearer"
    near(place, compilation_config=3)
    near(place, compilation_config={"inductor_compile_config": {"deterministic": False}})
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2


def test_a_directory_is_used_as_it_is(tmp_path: Any) -> None:
    place = write_model(tmp_path / "tiny")
    settings = Settings.load({"model": {"path": str(place)}})
    assert model_directory(settings) == str(place)
    assert load_tokenizer(settings.model).vocab_size == 512


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    engine = VllmEngine(settings_of())
    with pytest.raises(EngineUnavailable, match=r"pip install 'vllm>=0\.26,<0\.33'"):
        engine.start()
    assert not engine.alive
    engine.close()


def test_a_broken_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vllm", None)  # what an import that fails leaves behind
    with pytest.raises(EngineUnavailable, match="cannot be imported"):
        VllmEngine(settings_of()).start()


def started(monkeypatch: pytest.MonkeyPatch, facts: Any) -> tuple[str, list[str]]:
    """What `connect` raises when vLLM has started and something after that goes wrong, and what was ended."""
    ended: list[str] = []
    guard = SimpleNamespace(close=lambda: ended.append("guard"), ready=lambda: ended.append("ready"))
    llm = SimpleNamespace(vllm_config=None, shutdown=lambda: ended.append("vllm"))
    for name, value in {
        "check_installed": lambda: "0.27.0", "model_directory": lambda _: "/m", "Guard": lambda: guard,
        "engine_arguments": lambda *_: {}, "_start": lambda *_: llm, "_facts": facts,
        "_connector": lambda: lambda *_: SimpleNamespace(), "config_of": lambda _model: SMALL_64,
    }.items():  # fmt: skip
        monkeypatch.setattr(vllm_connection, name, value)
    try:
        vllm_connection.connect(settings_of())
    except EngineUnavailable as error:
        return str(error), ended
    return "", ended


def test_a_start_that_fails_late_leaves_no_vllm_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = SMALL_64.vocab_size
    assert started(monkeypatch, lambda *_: {"vocab_size": vocab, "device": "cpu"}) == ("", ["ready"])
    text, ended = started(monkeypatch, lambda *_: {"vocab_size": vocab + 1})
    assert f"{vocab + 1} token ids" in text
    assert ended == ["vllm", "guard"]
    text, ended = started(monkeypatch, lambda *_: {}["x"])
    assert "KeyError" in text
    assert ended == ["vllm", "guard"]


def test_vllm_is_imported_only_when_an_engine_starts() -> None:
    modules = "llm42.engine.vllm.engine, llm42.engine.build, llm42.local.assembly"
    code = f"import sys, {modules}, llm42_serve.replica.fastpath"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
