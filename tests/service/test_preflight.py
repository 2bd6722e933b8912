"""What a start refuses before the slow part, and what it says when a deployment fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.preflight import LaunchFailed, cause_of, check
from llm42.config import Settings
from tests.conftest import free_port
from tests.support import write_model


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def settings_of(place: Path, **tree: Any) -> Settings:
    model = {"path": str(place), **tree.pop("model", {})}
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


def test_vllm_that_is_not_installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(LaunchFailed, match=r"pip install 'vllm>="):
        check(settings_of(place, engine={"kind": "vllm"}))


def test_a_gpu_that_is_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchFailed, match=r"model\.device is cuda.*cpu"):
        check(settings_of(place, model={"device": "cuda"}))


@pytest.mark.parametrize(("replicas", "enough"), [(1, True), (2, False)])
def test_gpus_that_ray_would_wait_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, enough: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    server = {"fastpath_replicas": replicas, "verifiers": 1}
    shares = {"engine": {"gpus": 0.6}, "verifier": {"gpus": 0.4}}
    asked = settings_of(place, model={"device": "cuda"}, server=server, **shares)
    if enough:
        check(asked)
        return
    with pytest.raises(LaunchFailed, match=r"1\.2 GPUs for replicas .*0\.4 for verifiers.* has 1"):
        check(asked)


def deployment(status: str, message: str) -> SimpleNamespace:
    return SimpleNamespace(status=SimpleNamespace(value=status), message=message)


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:llm42:FastPath.initialize_and_get_metadata() (pid=1)
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 3, in initialize
    raise error
llm42.engine.vllm_options.EngineUnavailable: vLLM 0.27.0 did not start: ValueError: no such argument
"""


def test_a_failed_deployment_says_why() -> None:
    deployments = {
        "Ingress": deployment("HEALTHY", "x.Error: not this"),
        "FastPath": deployment("DEPLOY_FAILED", TRACEBACK),
    }
    app = SimpleNamespace(message="Failed to update the deployments ['FastPath'].", deployments=deployments)
    assert cause_of(app) == "EngineUnavailable: vLLM 0.27.0 did not start: ValueError: no such argument"
    deployments["FastPath"].message = "something else"
    assert cause_of(app) == app.message
