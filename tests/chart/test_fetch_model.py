"""The download script against a stand-in for huggingface_hub: there is no network in tests."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import huggingface_hub.utils
import pytest

from tests.chart import helm
from tests.support.patience import PATIENCE_S

SCRIPT = helm.CHART / "files" / "fetch_model.py"
FILES = {"config.json": "{}", "a.safetensors": "weights", "sub/b.safetensors": "more", "LICENSE": "text"}
STAND_IN = """
import fnmatch, json, os, pathlib
from huggingface_hub.errors import HfHubHTTPError
HERE = pathlib.Path(__file__).parent
FILES = json.loads((HERE / "files.json").read_text())
def told(call, *details):
    with (HERE / "calls").open("a") as calls:
        calls.write(json.dumps([call, *details]) + "\\n")
    if os.environ.get("HUB") == "down":
        raise ConnectionError("no route to host")
class Sibling:
    def __init__(self, name):
        self.rfilename, self.size = name, len(FILES[name])
class Info:
    siblings = [Sibling(name) for name in FILES]
class HfApi:
    def model_info(self, repo, *, revision, files_metadata):
        told("model_info", repo, revision)
        if repo == "gated/model":
            raise HfHubHTTPError("401")
        return Info
def snapshot_download(repo, **options):
    told("snapshot_download", repo, options)
    for name, text in FILES.items():
        if any(fnmatch.fnmatch(name, p) for p in options["allow_patterns"] or ["*"]):
            file = pathlib.Path(options["local_dir"]) / name
            if os.environ.get("HUB") == "loses" and name == "a.safetensors" or file.exists():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
"""
UTILS = """
import fnmatch
def filter_repo_objects(items, allow_patterns=None):
    return [i for i in items if any(fnmatch.fnmatch(i, p) for p in allow_patterns or ["*"])]
"""


class Hub:
    """A directory to download to, and the stand-in that is asked."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "model"
        self.package = tmp_path / "huggingface_hub"
        self.package.mkdir()
        (self.package / "__init__.py").write_text(STAND_IN)
        (self.package / "utils.py").write_text(UTILS)
        (self.package / "errors.py").write_text("class HfHubHTTPError(Exception): pass")
        (self.package / "files.json").write_text(json.dumps(FILES))

    def fetch(self, *more: str, repo: str = "a/b", revision: str = "r1", hub: str = "up") -> str:
        """What the script says; it must end well."""
        done = self.run(*more, repo=repo, revision=revision, hub=hub)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(
        self, *more: str, repo: str = "a/b", revision: str = "r1", hub: str = "up"
    ) -> subprocess.CompletedProcess[str]:
        """One start of the script."""
        return subprocess.run(
            self.command(*more, repo=repo, revision=revision),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment(hub),
        )

    def command(self, *more: str, repo: str = "a/b", revision: str = "r1") -> list[str]:
        """Its command line."""
        own = [repo, f"--revision={revision}", f"--directory={self.directory}"]
        return [sys.executable, str(SCRIPT), *own, *more]

    def environment(self, hub: str) -> dict[str, str]:
        """With the stand-in before the real package."""
        return os.environ | {"PYTHONPATH": str(self.package.parent), "HUB": hub}

    def calls(self) -> list[list[object]]:
        """What the Hub was asked since the last look."""
        log = self.package / "calls"
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return found


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


def test_the_charts_arguments_reach_the_download(hub: Hub) -> None:
    values = "model: {huggingface: {job: {enabled: false}}}"
    templates = helm.pod_templates(helm.render(helm.example("gpu-4-plus-1"), values=values))
    (container,) = templates["verifier"]["spec"]["initContainers"]
    arguments = [a for a in container["args"] if not a.startswith("--directory")]
    command = [sys.executable, str(SCRIPT), *arguments, f"--directory={hub.directory}"]
    subprocess.run(command, check=True, env=hub.environment("up"), capture_output=True)
    (_, (_, repo, options)) = hub.calls()
    assert isinstance(options, dict)
    assert f"--directory=/models/{options['revision']}" in container["args"]
    assert repo == "meta-llama/Llama-3.1-8B-Instruct"
    assert options["allow_patterns"] == ["*.json", "*.safetensors"]
    assert {f.name for f in hub.directory.rglob("*.*")} == {
        "config.json",
        "a.safetensors",
        "b.safetensors",
        ".llm42-complete.json",
    }


def test_the_stand_in_is_like_the_real_one() -> None:
    def parameters(function: object) -> set[str]:
        return set(inspect.signature(function).parameters)  # type: ignore[arg-type]

    assert {"revision", "local_dir", "allow_patterns"} <= parameters(huggingface_hub.snapshot_download)
    assert {"revision", "files_metadata"} <= parameters(huggingface_hub.HfApi.model_info)
    found = huggingface_hub.utils.filter_repo_objects(list(FILES), allow_patterns=["*.safetensors"])
    assert list(found) == ["a.safetensors", "sub/b.safetensors"]
    assert issubclass(huggingface_hub.errors.HfHubHTTPError, Exception)


def test_a_complete_directory_is_used_without_the_network(hub: Hub) -> None:
    assert hub.fetch().strip() == str(hub.directory)
    assert [c[0] for c in hub.calls()] == ["model_info", "snapshot_download"]
    assert hub.fetch(hub="down").strip() == str(hub.directory)
    assert not hub.calls(), "a restart asks nobody"


def test_what_no_mark_covers_is_not_complete(hub: Hub) -> None:
    """A broken first download and then an outage; huggingface_hub itself would take what lies there."""
    hub.directory.mkdir()
    (hub.directory / "config.json").write_text(FILES["config.json"])
    done = hub.run(hub="down")
    assert done.returncode == 1
    assert "could not be downloaded: ConnectionError: no route to host" in done.stderr
    assert "Traceback" not in done.stderr
    hub.fetch()
    hub.fetch(hub="down")


def test_a_download_that_misses_a_file_is_not_marked(hub: Hub) -> None:
    done = hub.run(hub="loses")
    assert done.returncode == 1
    assert "not complete after the download: a.safetensors" in done.stderr
    assert hub.run(hub="down").returncode == 1, "the control: no mark"


@pytest.mark.parametrize("damage", ["short", "missing", "mark"])
def test_a_broken_directory_never_passes_as_complete(hub: Hub, damage: str) -> None:
    hub.fetch()
    hub.calls()
    hub.fetch(hub="down")  # the control: whole, it passes
    victim = hub.directory / (".llm42-complete.json" if damage == "mark" else "a.safetensors")
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_text(victim.read_text()[:3])
    assert hub.run(hub="down").returncode == 1
    hub.fetch()
    assert {str(f.relative_to(hub.directory)) for f in hub.directory.rglob("*") if f.is_file()} >= set(FILES)
    assert (hub.directory / "a.safetensors").read_text() == FILES["a.safetensors"], "damage is mended"


def test_a_mark_is_of_one_commit_and_one_choice_of_files(hub: Hub) -> None:
    hub.fetch("--allow=*.json")
    hub.fetch("--allow=*.json", hub="down")
    assert hub.run("--allow=*.json", "--allow=*.safetensors", hub="down").returncode == 1
    assert hub.run("--allow=*.json", revision="r2", hub="down").returncode == 1


def test_patterns_that_name_nothing_are_an_error(hub: Hub) -> None:
    done = hub.run("--allow=*.gguf")
    assert done.returncode == 1
    assert "allowPatterns" in done.stderr


def test_a_gated_model_is_one_clear_error(hub: Hub) -> None:
    done = hub.run(repo="gated/model")
    assert done.returncode == 1
    assert "model.huggingface.tokenSecret.name" in done.stderr
    assert "Traceback" not in done.stderr


def test_pods_wait_for_the_mark_of_another(hub: Hub) -> None:
    waiting = subprocess.Popen(
        hub.command("--wait"), env=hub.environment("down"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert waiting.stdout is not None
        assert "waiting for a/b" in waiting.stdout.readline()
        assert waiting.poll() is None
        assert not hub.calls(), "who waits asks nobody"
        hub.fetch()
        assert waiting.wait(timeout=PATIENCE_S) == 0
        assert waiting.stdout.read().strip() == str(hub.directory)
    finally:
        waiting.kill()
        waiting.communicate()
