"""What a start refuses before the slow part, and what it says when a deployment fails."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm42.config import Settings
from llm42.errors import LaunchFailed
from llm42_serve.launch import cause_of
from llm42_serve.preflight import check
from tests.conftest import free_port
from tests.support import write_model


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def settings_of(place: Path, **tree: Any) -> Settings:
    model = {"path": str(place), "max_model_len": 1024, **tree.pop("model", {})}
    server = {"port": free_port(), **tree.pop("server", {})}
    return Settings.load({"model": model, "server": server, "telemetry": {"metrics_port": 0}, **tree})


def test_what_is_there_is_accepted(place: Path) -> None:
    check(settings_of(place))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"no model at .*llama") as caught:
        check(settings_of(tmp_path / "llama"))
    assert "make run" not in str(caught.value), "that fetches another model"
    with pytest.raises(LaunchFailed, match="make run"):
        check(settings_of(tmp_path / "smollm2" / "missing.gguf"))


@pytest.mark.parametrize(
    ("file", "values", "what"),
    [
        ("config.json", {"sliding_window": 64}, "sliding_window"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens"),
        ("tokenizer_config.json", {"chat_template": "{{ lipsum() }}"}, "lipsum"),
        ("generation_config.json", {"suppress_tokens": [1]}, "suppress_tokens"),
        ("config.json", {"max_position_embeddings": 512}, r"max_model_len 2048 .* 512 positions"),
    ],
)
def test_a_model_that_cannot_be_served_as_its_files_say(
    place: Path, file: str, values: dict[str, Any], what: str
) -> None:
    """Before Ray is started, by its description alone: no weights are read."""
    (place / "model.safetensors").unlink()
    data = json.loads((place / file).read_text()) if (place / file).is_file() else {}
    wide = {"max_position_embeddings": 4096} if file == "config.json" else {}
    (place / file).write_text(json.dumps(data | wide | values))
    with pytest.raises(LaunchFailed, match=what):
        check(settings_of(place, model={"max_model_len": 2048 if file == "config.json" else 1024}))


def test_a_chat_template_of_its_own(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    with pytest.raises(LaunchFailed, match=r"own\.jinja"):
        check(settings_of(place, model={"chat_template": str(file)}))
    file.write_text("{{ messages[0].content }}")
    check(settings_of(place, model={"chat_template": str(file)}))


def test_vllm_that_is_not_installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(LaunchFailed, match=r"pip install 'vllm>="):
        check(settings_of(place, engine={"kind": "vllm"}))


def test_a_gpu_that_is_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchFailed, match=r"model\.device is cuda.*cpu"):
        check(settings_of(place, model={"device": "cuda"}))


@pytest.mark.parametrize(
    ("gpus", "tree", "fits", "waiting"),
    [
        (1, {"engine": {"gpus": 0.6}, "verifier": {"gpus": 0.4}}, True, 0),
        (1, {"server": {"fastpath_replicas": 2}, "engine": {"gpus": 0.6}}, False, 0),
        (2, {"server": {"fastpath_replicas": 3}, "engine": {"gpus": 0.6}}, False, 0),
        (2, {"server": {"fastpath_replicas": 4}, "engine": {"gpus": 0.5}}, True, 1),
        (1, {"server": {"fastpath_replicas": 10}, "engine": {"gpus": 0.1}}, True, 1),
        (1, {"engine": {"gpus": 1.0}}, True, 1),
        (1, {"server": {"verifiers": 2}}, True, 1),
        (1, {"engine": {"gpus": 1.0}, "server": {"verifiers": 0}}, True, 0),
        (2, {"engine": {"gpus": 2}, "server": {"verifiers": 0}}, True, 0),
        (1, {"engine": {"gpus": 2}}, False, 0),
        (1, {"engine": {"kind": "canonical"}, "server": {"fastpath_replicas": 4}}, True, 0),
        (1, {"engine": {"kind": "canonical"}, "server": {"verifiers": 2}}, True, 1),
        (2, {"engine": {"kind": "vllm", "gpus": 1, "vllm": {"tensor_parallel_size": 2}}}, True, 1),
        (1, {"engine": {"kind": "vllm", "gpus": 1, "vllm": {"tensor_parallel_size": 2}}}, False, 0),
    ],
    ids=str,
)
def test_gpus_that_ray_would_wait_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, tree: dict[str, Any], fits: bool, waiting: int
) -> None:
    """Without them no replica can start. A verifier may come later: best effort is served until then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    said: list[str] = []
    asked = settings_of(place, model={"device": "cuda"}, **tree)
    if fits:
        check(asked, said.append)
        assert [line.split()[0] for line in said] == [str(waiting)] * (waiting > 0)
        return
    with pytest.raises(LaunchFailed, match=f"do not fit on this machine, which has {gpus}"):
        check(asked, said.append)


@pytest.mark.parametrize(("kind", "starts"), [("canonical", False), ("torch", True)])
def test_verifiers_that_have_no_gpu(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str, starts: bool
) -> None:
    """Beside an engine they may come later; without one nothing would ever be answered."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = settings_of(place, model={"device": "cuda"}, engine={"kind": kind}, verifier={"gpus": 2})
    if starts:
        check(asked)
        return
    with pytest.raises(LaunchFailed, match=r"1 of 1 verifiers .* nothing would be answered"):
        check(asked)


def deployment(status: str, message: str) -> SimpleNamespace:
    return SimpleNamespace(status=SimpleNamespace(value=status), message=message)


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:llm42:FastPath.initialize_and_get_metadata()\x1b[39m (pid=1)
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 3, in initialize
    raise error
    ^^^^^^^^^^^
"""
ONE_LINE = (
    "llm42.engine.vllm.options.EngineUnavailable: vLLM 0.27.0 did not start: ValueError: no such argument"
)
SEVERAL = """llm42.engine.vllm.options.EngineUnavailable: vLLM did not start: 1 error for ModelConfig
  Value error, there is no such dtype
    For further information visit https://errors.example
Note: it is the last line
"""


@pytest.mark.parametrize(
    ("message", "status", "said"),
    [
        (TRACEBACK + ONE_LINE, "DEPLOY_FAILED", ONE_LINE.removeprefix("llm42.engine.vllm.options.")),
        (
            TRACEBACK + SEVERAL,
            "DEPLOY_FAILED",
            "EngineUnavailable: vLLM did not start: 1 error for ModelConfig Value error, there is no such"
            " dtype For further information visit https://errors.example Note: it is the last line",
        ),
        (TRACEBACK + "AssertionError", "UNHEALTHY", "AssertionError"),
        (
            "1 replica waits for resources: {'GPU': 1.0}",
            "UPDATING",
            "1 replica waits for resources: {'GPU': 1.0}",
        ),
        ("", "DEPLOY_FAILED", "Failed to update the deployments ['FastPath']."),
    ],
    ids=["one line", "several", "no words", "waiting", "nothing"],
)
def test_a_failed_deployment_says_why(message: str, status: str, said: str) -> None:
    deployments = {
        "Ingress": deployment("HEALTHY", "x.Error: not this"),
        "FastPath": deployment(status, message),
    }
    app = SimpleNamespace(message="Failed to update the deployments ['FastPath'].", deployments=deployments)
    assert cause_of(app) == said
