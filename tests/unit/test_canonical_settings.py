"""The canonical layout (engine.kind canonical) as settings: defaults by layout, and what is refused before
anything loads."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from llm42.cli.errors import setting_error
from llm42.config import EngineSettings, SessionSettings, Settings, VerifierSettings

CANONICAL: dict[str, Any] = {"engine": {"kind": "canonical"}}
ON_GPU: dict[str, Any] = {"model": {"device": "cuda"}}


def test_the_verifiers_decode_and_have_the_gpu() -> None:
    settings = Settings.load(CANONICAL | ON_GPU)
    engine = settings.engine
    assert settings.session.mode == "direct"
    assert (settings.verifier.kv_tokens, settings.verifier.gpus) == (None, 1.0)
    assert (engine.decodes, engine.shares_weights, engine.takes_schemas) == (False, False, False)
    assert (engine.gpus_per_replica, engine.thread_count, engine.places) == (0, 0, 256)
    assert engine.draws_by_seed, "its noise is the verifiers'"


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_control_with_an_engine_they_are_as_ever(kind: str) -> None:
    settings = Settings.load(ON_GPU | {"engine": {"kind": kind}})
    assert (settings.session.mode, settings.verifier.kv_tokens) == ("verify", 131072)
    assert (settings.verifier.gpus, settings.engine.gpus_per_replica, settings.engine.decodes) == (
        0.1,
        1,
        True,
    )
    direct = Settings.load({"engine": {"kind": kind}, "session": {"mode": "direct"}})
    assert direct.session.mode == "direct"


def test_on_a_cpu_a_verifier_is_that_of_every_layout() -> None:
    assert Settings.load(CANONICAL).verifier == Settings().verifier


@pytest.mark.parametrize("model", [{}, ON_GPU])
def test_null_is_nothing_said_and_what_is_sent_on_is_what_was_configured(model: dict[str, Any]) -> None:
    unsaid = {"session": {"mode": None}, "verifier": {"kv_tokens": None, "gpus": None}}
    for engine in ({}, CANONICAL):
        settings = Settings.load(model | engine | unsaid)
        assert settings == Settings.load(model | engine)
        assert Settings.load(settings.model_dump(mode="json")) == settings


def test_what_is_said_stands() -> None:
    told = {"session": {"mode": "direct"}, "verifier": {"kv_tokens": 65536, "gpus": 0.5}}
    more = {"engine": {"kind": "canonical", "canonical": {"max_num_seqs": 64}}}
    settings = Settings.load(ON_GPU | told | more)
    assert (settings.verifier.kv_tokens, settings.verifier.gpus, settings.engine.places) == (65536, 0.5, 64)


def test_sections_that_are_objects_already() -> None:
    settings = Settings(engine=EngineSettings(kind="canonical"))
    assert settings.session.mode == "direct"
    with pytest.raises(pydantic.ValidationError, match=r"session\.mode 'verify'"):
        Settings(engine=EngineSettings(kind="canonical"), session=SessionSettings())


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"session": {"mode": "verify"}}, ("session.mode 'verify'", "session.mode at null", "torch or vllm")),
        ({"server": {"verifiers": 0}}, ("server.verifiers to 1",)),
        ({"server": {"verifiers": 0, "max_verifiers": 2}}, ("server.verifiers to 1",)),
        ({"verifier": {"kv_tokens": 2047}}, ("verifier.kv_tokens 2047", "model.max_model_len 2048", "raise")),
        ({"engine": {"kind": "canonical", "corrupt_share": 0.1}}, ("engine.corrupt_share", "set it to 0")),
        ({"engine": {"kind": "canonical", "canonical": {"max_num_seqs": 0}}}, ("max_num_seqs",)),
    ],
    ids=["verify", "no verifiers", "none at first", "KV", "test plant", "places"],
)
def test_what_cannot_be_is_refused_with_what_to_do(tree: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings.load(CANONICAL | tree)
    (line,) = map(setting_error, caught.value.errors())
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "tree",
    [
        {"session": {"mode": "verify"}},
        {"server": {"verifiers": 0}},
        {"verifier": {"kv_tokens": 2047}},
        {"engine": {"corrupt_share": 0.1}},
    ],
    ids=["verify", "no verifiers", "KV", "test plant"],
)
def test_control_beside_a_fast_path_each_of_them_may_be(tree: dict[str, Any]) -> None:
    Settings.load(tree)


def test_one_request_of_the_longest_is_enough() -> None:
    Settings.load(CANONICAL | {"verifier": {"kv_tokens": 2048}})


@pytest.mark.parametrize(
    "tree", [{}, ON_GPU, CANONICAL], ids=["CPU", "beside a replica", "canonical on a CPU"]
)
def test_what_is_left_is_of_a_gpu_that_nobody_shares(tree: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"verifier\.kv_tokens"):
        Settings.load(tree | {"verifier": VerifierSettings(kv_tokens=None)})
