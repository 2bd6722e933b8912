"""The commands that compute in their own process: on which device, in which environment, and what they say
when that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from llm42.checkpoint.load import DeviceUnavailable, load_for
from llm42.cli import main as cli
from llm42.cli.errors import actionable
from llm42.config import Settings
from llm42.engine import build
from llm42.engine.torch.engine import TorchEngine
from llm42.engine.vllm import engine as vllm
from llm42.errors import LLM42Error
from llm42.local.demo import run_demo
from llm42.verifier import build as verifier_build
from llm42.verifier.certify import cuda as certify_cuda
from llm42.verifier.certify.certificate import Certificate
from llm42.verifier.certify.plants_cpu import PLANTS
from llm42.verifier.certify.plants_cuda import PLANTS as CUDA_PLANTS
from llm42.verifier.cuda.runner import OutOfDeviceMemory
from llm42_kernels.cublas import (
    CUBLAS_ENVIRONMENT,
    CublasEnvironmentError,
    check_cublas_environment,
    rule_out_workspace,
    workspace_for_children,
)
from tests.support import write_model

COMMANDS = ("certify", "generate hi", "affinity", "demo", "audit RECORDS")
FOUND = """
import importlib.abc, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
seen, names = [], ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG")
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            seen.append({k: os.environ.get(k) for k in names})
            raise ImportError("torch was asked for")
sys.meta_path.insert(0, Watch())
from llm42.cli.main import app
before = len(seen)
try:
    app(json.loads(sys.argv[2]), standalone_mode=False)
except ImportError:
    pass
print(json.dumps({"before": before, "seen": seen}))
"""
RECORD = {
    "request": {"model": "m", "prompt": "hi", "deterministic": True},
    "response": {
        "object": "text_completion", "model": "m", "system_fingerprint": "llm42-0",
        "choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "llm42": {"seed": 1},
    },
}  # fmt: skip


def _config(directory: Path, **sections: Any) -> str:
    file = directory / "settings.yaml"
    file.write_text(json.dumps(sections))
    return str(file)


def _arguments(command: str, config: str, directory: Path) -> list[str]:
    records = directory / "records.jsonl"
    records.write_text(json.dumps(RECORD) + "\n")
    return [*command.replace("RECORDS", str(records)).split(), "--config", config]


def _environment_at_torch(arguments: list[str]) -> list[dict[str, str | None]]:
    """What a command's process has set whenever PyTorch is asked for. The user's own setting is another."""
    command = [sys.executable, "-c", FOUND, json.dumps(sys.path), json.dumps(arguments)]
    theirs = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, env=theirs, capture_output=True, text=True, check=True, timeout=60)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["before"] == 0, "the command line itself needs no PyTorch"
    seen: list[dict[str, str | None]] = told["seen"]
    assert seen, "the command did not come to the point of computing"
    return seen


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gpus_libraries_find_no_workspace(command: str, tmp_path: Path) -> None:
    """cuBLAS reads its variables once, when CUDA starts: they are set before PyTorch is imported."""
    config = _config(tmp_path, model={"device": "cuda"})
    seen = _environment_at_torch(_arguments(command, config, tmp_path))
    assert all(found == CUBLAS_ENVIRONMENT for found in seen), seen


def test_the_planted_violation_is_the_library_as_it_comes(tmp_path: Path) -> None:
    arguments = ["certify", "--plant", "split-k", "--config", _config(tmp_path, model={"device": "cuda"})]
    assert all(set(found.values()) == {None} for found in _environment_at_torch(arguments))


def test_on_a_cpu_the_users_environment_stays(tmp_path: Path) -> None:
    seen = _environment_at_torch(["certify", "--config", _config(tmp_path)])
    assert seen[0] == {"CUBLASLT_WORKSPACE_SIZE": None, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_a_server_leaves_its_processes_environment_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that are not to agree with the verifier run as vLLM comes; they inherit from this process."""
    for name in CUBLAS_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    cli.load_settings(Path(_config(tmp_path, model={"device": "cuda"})))
    assert not CUBLAS_ENVIRONMENT.keys() & os.environ.keys()


def test_an_engines_process_may_have_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CUBLAS_ENVIRONMENT:
        monkeypatch.setenv(name, "mine")  # restores what was there after the test
    with pytest.raises(CublasEnvironmentError):
        check_cublas_environment()
    rule_out_workspace()
    with workspace_for_children():
        assert not CUBLAS_ENVIRONMENT.keys() & os.environ.keys()
    check_cublas_environment()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_devices_own_certifier_is_asked(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CUBLAS_ENVIRONMENT:
        monkeypatch.setenv(name, "mine")
    asked = []

    def certifier(name: str, plants: Any) -> Any:
        class Stand:
            known_plants = plants

            def __init__(self, *arguments: Any) -> None:
                asked.append((name, [a for a in arguments if isinstance(a, (list, tuple))]))

            def run(self) -> Certificate:
                return Certificate({}, (8,), [], 1, 0.0, True)

        return Stand

    monkeypatch.setattr("llm42.cli.certify.load_model", lambda *_: SimpleNamespace(device=device))
    monkeypatch.setattr(certify_cuda, "CUDACertifier", certifier("cuda", CUDA_PLANTS))
    monkeypatch.setattr(verifier_build, "CPUCertifier", certifier("cpu", PLANTS))
    config = _config(tmp_path, model={"device": device})
    arguments = ["certify", "--config", config, "--json", "--plant", "one-ulp"]
    result = CliRunner().invoke(cli.app, arguments)
    assert (result.exit_code, asked) == (0, [(device, [["one-ulp"]])]), result.output


@pytest.mark.parametrize(
    ("device", "there", "elsewhere"), [("cpu", PLANTS, CUDA_PLANTS), ("cuda", CUDA_PLANTS, PLANTS)]
)
def test_an_unknown_plant_names_those_of_the_device(
    device: str, there: Any, elsewhere: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CUBLAS_ENVIRONMENT:
        monkeypatch.setenv(name, "mine")
    other = next(name for name in elsewhere if name not in there)
    config = _config(tmp_path, model={"device": device})
    result = CliRunner().invoke(cli.app, ["certify", "--config", config, "--plant", other])
    assert result.exit_code == 2
    assert f"model.device {device} has: {', '.join(there)}" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gpu_that_is_not_there_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CUBLAS_ENVIRONMENT:
        monkeypatch.setenv(name, "mine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = {"device": "cuda", "path": str(write_model(tmp_path / "model"))}
    result = CliRunner().invoke(cli.app, _arguments(command, _config(tmp_path, model=model), tmp_path))
    if command.startswith("audit"):  # it has exit codes of its own
        assert result.exit_code == 3
        assert "model.device is cuda, but PyTorch" in " ".join(result.stderr.split())
        return
    assert isinstance(result.exception, DeviceUnavailable), result.output
    line = actionable(result.exception)
    assert line is not None
    assert "\n" not in line


@pytest.mark.parametrize(
    "error",
    [
        LLM42Error("what to do"),
        CublasEnvironmentError("what to do"),
        OutOfDeviceMemory("what to do"),
        torch.OutOfMemoryError("what to do\nwith\nmany lines"),
        RuntimeError("CUDA error: what to do\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("Found no NVIDIA driver on your system: what to do"),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:8]}",
)
def test_what_a_user_can_act_on_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli, "fail", told.append)

    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    cli.main()
    (line,) = told
    assert "what to do" in line
    assert "\n" not in line


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), ValueError("CUDA")])
def test_a_fault_of_the_program_keeps_its_traceback(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that the line names."""
    told: list[str] = []

    def app() -> None:
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli, "fail", told.append)
    monkeypatch.setattr(cli, "app", app)
    cli.main()
    (kept,) = tmp_path.iterdir()
    assert told == [f"{type(error).__name__}: {error} (traceback: {kept})"]
    assert "in app" in kept.read_text()


def _tiny(directory: Path, kind: str) -> Settings:
    path = write_model(directory)
    names = json.loads((path / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": template}))
    tree = {
        "model": {"path": str(path), "name": "tiny", "max_model_len": 256},
        "engine": {"kind": kind, "threads": 1, "kv_tokens": 4096, "corrupt_share": 0.1},
        "verifier": {"certificate_dir": None, "kv_tokens": 4096, "buckets": [16]},
    }
    return Settings.load(tree)


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_the_demonstration_runs_the_configured_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for vLLM: which engine is started, and that its candidates are verified."""
    started = []

    def engine(name: str) -> Any:
        def make(*arguments: Any) -> TorchEngine:
            started.append(name)
            if name == "torch":
                return TorchEngine(*arguments)
            (settings,) = arguments
            return TorchEngine(load_for(settings)[0], settings.engine)

        return make

    monkeypatch.setattr(vllm, "VllmEngine", engine("vllm"))
    monkeypatch.setattr("llm42.engine.torch.engine.TorchEngine", engine("torch"))
    settings = _tiny(tmp_path, kind)
    direct = settings.session.model_copy(update={"mode": "direct"})  # which it does not go by
    result = run_demo(settings.model_copy(update={"session": direct}), requests=2, load=2, tokens=12)
    assert started == [kind]
    assert (result.fast_path_products == "vLLM's") == (kind == "vllm")
    assert result.deterministic.diverged == result.deterministic.logprobs_diverged == 0
    assert result.deterministic.verified_tokens >= 4 * 12
    assert result.deterministic.rollbacks > 0, "the planted wrong candidates were not met"


def test_noise_that_fails_ends_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the load beyond the vocabulary ended it in silence, and nothing was compared under load."""
    settings = _tiny(tmp_path, "torch")
    monkeypatch.setattr("llm42.local.demo.min", lambda *_: 10**6, raising=False)
    with pytest.raises(LLM42Error, match="vocabulary"):
        run_demo(settings, requests=1, load=1, tokens=8)


def test_build_engine_hands_operators_to_the_torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Engine:
        def __init__(self, *arguments: Any) -> None:
            given.append(arguments)

        def start(self) -> Engine:
            return self

    monkeypatch.setattr("llm42.engine.torch.engine.TorchEngine", Engine)
    model, operators = SimpleNamespace(), SimpleNamespace()
    build.build_engine(Settings(), model, operators)  # type: ignore[arg-type]
    assert given == [(model, Settings().engine, operators)]
