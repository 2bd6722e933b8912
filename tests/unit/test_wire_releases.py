"""Messages of another release: what an older one pickled is read with defaults, what a newer one added
is left out, and a request that cannot be read ends alone."""

from __future__ import annotations

import pickle
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llm42 import protocol
from llm42.api.backend import Status
from llm42.checkpoint.load import load_for
from llm42.config import EngineSettings, Settings
from llm42.engine.torch.engine import TorchEngine
from llm42.errors import VersionSkew
from llm42.models.weights import LoadedModel
from llm42.protocol import Delta, FinishReason, Request, RequestStats, SamplingParams, Window
from llm42.step_times import Costs
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.membership import MemberInfo, Membership
from tests.support import Client, check_pool, prompt_of, write_model

FULL = Request("r", (5, 6), 4, SamplingParams(seed=3), stop=("a",), trace="t", cache_salt="salt")


def pickled_by(kind: type[Any], message: Any, drop: int = 0, add: tuple[str, ...] = ()) -> bytes:
    """The message as a release pickled it whose class lacks the last `drop` fields, or has further ones."""
    known = fields(message)[: len(fields(message)) - drop]
    names = [f.name for f in known] + list(add)
    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    place = {"__module__": kind.__module__}
    other = make_dataclass(kind.__name__, names, frozen=frozen, slots=True, namespace=place)
    made = other(*(getattr(message, f.name) for f in known), *("new" for _ in add))
    home: Any = __import__(kind.__module__, fromlist=["_"])
    setattr(home, kind.__name__, other)  # pickle looks the class up by its name
    try:
        return pickle.dumps(made)
    finally:
        setattr(home, kind.__name__, kind)


MESSAGES = [
    FULL,
    SamplingParams(min_tokens_banned=(1,)),
    Window("r", (5,), 1, (6,), SamplingParams(), cache_salt="salt", credit=3, max_len=9, yields=True),
    Delta((1,), "a", finish_reason=FinishReason.STOP, stats=RequestStats(windows=2), verifier="v"),
    RequestStats(windows=2, failovers=1, direct_tokens=3),
    Status(True, skew=True),
    Costs(((1.0, 0.1),), 0.5),
    VerifierStatus("ready", "f", request={"code": "c"}, kv_tokens=64, yielding_kv=16),
    MemberInfo("v", "0", None, 2.0),
    Membership(pid=4),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_an_older_and_a_newer_release(message: Any) -> None:
    kind = type(message)
    assert pickle.loads(pickle.dumps(message)) == message
    last = fields(kind)[-1]
    older = pickle.loads(pickled_by(kind, message, drop=1))
    assert getattr(message, last.name) != last.default, "else nothing is shown"
    assert older == replace(message, **{last.name: last.default})
    assert pickle.loads(pickled_by(kind, message, add=("new",))) == message


def test_a_message_without_what_it_needs() -> None:
    with pytest.raises(VersionSkew, match="a Request of another release came without max_tokens"):
        pickle.loads(pickled_by(Request, FULL, drop=len(fields(Request)) - 2))


def test_every_message_is_read_so() -> None:
    kinds = [k for k in vars(protocol).values() if isinstance(k, type) and hasattr(k, "__dataclass_fields__")]
    assert len(kinds) == 9
    assert {k.__dict__["__setstate__"].__qualname__ for k in kinds} == {"across_releases.<locals>.restore"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = write_model(tmp_path_factory.mktemp("tiny"))
    return load_for(Settings.load({"model": {"path": str(path), "max_model_len": 64}}))[0]


def lacking(name: str, field: str) -> Request:
    """A request without one of its fields, as one of another release could come before they had defaults."""
    made = Request(name, prompt_of(1, 9), 4)
    object.__delattr__(made, field)
    return made


@pytest.mark.parametrize(
    "field", ["cache_salt", "priority", "prompt_logprobs", "stop_token_ids", "num_logprobs"]
)
def test_a_request_that_cannot_be_read_ends_alone(model: LoadedModel, field: str) -> None:
    engine = TorchEngine(model, EngineSettings(kv_tokens=256, threads=1))
    good = [Request(name, prompt_of(2, 9), 4) for name in ("a", "b")]
    heard = [Client() for _ in range(3)]
    engine.submit(good[0], heard[0], 4)
    engine.submit(lacking("bad", field), heard[1], 4)
    engine.submit(good[1], heard[2], 4)
    for _ in range(20):
        engine.step()
    assert "AttributeError" in (heard[1].error or "")
    assert [(c.finish, len(c.tokens)) for c in heard[::2]] == [(FinishReason.LENGTH, 4)] * 2
    check_pool(engine._pool)
    load = engine.load()
    assert load.running == load.waiting == load.kv_used == 0
