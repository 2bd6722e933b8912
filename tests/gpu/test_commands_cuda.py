"""The commands on a GPU as a user types them: each a process of its own, started with the workspace that a
shell leaves cuBLAS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands.lab import QUESTION, plain_record
from benchmarks.lib.random_model import LLAMA_8B, write_random
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.certify.plants_cuda import PLANTS
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

Reply = dict[str, Any]


def run(*arguments: str, expected: int = 0) -> Reply:
    """`llm42 ...`: the JSON object that it prints."""
    theirs = {k: v for k, v in os.environ.items() if k not in CUBLAS_ENVIRONMENT}
    command = [sys.executable, "-m", "llm42", *arguments]
    done = subprocess.run(command, env=theirs, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == expected, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    last = (done.stdout.strip().splitlines() or ["{}"])[-1]
    reply: Reply = json.loads(last) if last.startswith("{") else {}
    return reply


@pytest.fixture(scope="module")
def model() -> str:
    path = Path(Settings().model.path).absolute()
    if not path.exists():
        pytest.skip(f"no model at {path}")
    return str(path)


@pytest.fixture(scope="module")
def config(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("commands")
    file = directory / "settings.json"
    where = {"certificate_dir": str(directory / "certificates")}
    file.write_text(json.dumps({"model": {"path": model, "device": "cuda"}, "verifier": where}))
    return str(file)


@pytest.fixture(scope="module")
def answer(config: str) -> Reply:
    words = ("generate", QUESTION, "--max-tokens", "48", "--temperature", "0.8", "--seed", "7", "--json")
    return run(*words, "-c", config)


def test_certify_passes_on_this_gpu(config: str) -> None:
    reply = run("certify", "--json", "-c", config)
    assert reply["passed"]
    assert reply["buckets"] == list(Settings.load({"model": {"device": "cuda"}}).verifier.buckets)
    assert reply["providers"]["linear"] in ("cublas", "triton"), "a GPU's providers"


@pytest.mark.parametrize("plant", [name for name in PLANTS if name != "split-k"])
def test_a_plant_is_caught(plant: str, config: str) -> None:
    reply = run("certify", "--json", "--plant", plant, "-c", config, expected=1)
    assert (reply["passed"], reply["plants"]) == (False, [plant])


def test_cublas_as_it_comes_is_caught(model: str, config: str, tmp_path: Path) -> None:
    """At the shapes of an 8B model it splits K for small steps; the same model passes without workspace."""
    shape = replace(LLAMA_8B, num_layers=1, vocab_size=49152)
    path = write_random(shape, Tokenizer.load(model), tmp_path / "wide")
    file = tmp_path / "wide.json"
    tree = {"model": {"path": str(path), "device": "cuda"}, "verifier": {"certificate_dir": None}}
    file.write_text(json.dumps(tree))
    assert run("certify", "--json", "-c", str(file))["providers"]["linear"] == "cublas"
    reply = run("certify", "--json", "--plant", "split-k", "-c", str(file), expected=1)
    assert reply["operator"] == "linear"


def test_generate_gives_one_answer(answer: Reply, config: str) -> None:
    words = ("generate", QUESTION, "--max-tokens", "48", "--temperature", "0.8", "--json", "-c", config)
    again, other = run(*words, "--seed", "7"), run(*words, "--seed", "8")
    for field in ("text", "token_ids", "finish_reason", "system_fingerprint"):
        assert again[field] == answer[field]
    assert other["token_ids"] != answer["token_ids"], "the control"


@pytest.mark.parametrize("altered", [False, True])
def test_an_audit_confirms_it_and_nothing_else(
    altered: bool, answer: Reply, model: str, config: str, tmp_path: Path
) -> None:
    record = plain_record("answer", model, answer, 0.8)
    record["output"][7] += altered
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    reply = run("audit", str(file), "--json", "-c", config, expected=int(altered))
    assert reply["confirmed"] == 1 - altered


def test_the_demonstration_runs_on_the_gpu(config: str) -> None:
    reply = run("demo", "--requests", "4", "--load", "4", "--tokens", "48", "--json", "-c", config)
    assert reply["deterministic_diverged"] == reply["deterministic"]["logprobs_diverged"] == 0
    assert reply["deterministic"]["verified_tokens"] > 0
    assert "GPU" in reply["numerics"]


def test_affinity_is_measured_on_the_gpu(config: str) -> None:
    reply = run("affinity", "--requests", "4", "--tokens", "32", "--json", "-c", config)
    assert {load["load"] for load in reply["loads"]} == {"decode", "mixed"}
    for load in reply["loads"]:
        assert load["tokens"] > 0
        assert load["mismatches_per_1000"] < 100, "the two sides compute different models"
