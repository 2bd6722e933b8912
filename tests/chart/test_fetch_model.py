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

from tests.chart import helm

SCRIPT = helm.CHART / "files" / "fetch_model.py"
STAND_IN = """
import json
from huggingface_hub.errors import HfHubHTTPError
def snapshot_download(repo, **options):
    if repo == "gated/model":
        raise HfHubHTTPError("401")
    return json.dumps([repo, options])
"""


def fetch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = tmp_path / "huggingface_hub"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "errors.py").write_text("class HfHubHTTPError(Exception): pass")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_charts_arguments_reach_the_download(tmp_path: Path) -> None:
    templates = helm.pod_templates(helm.render(helm.example("gpu-4-plus-1")))
    (container,) = templates["verifier"]["spec"]["initContainers"]
    done = fetch(tmp_path, *container["args"])
    repo, options = json.loads(done.stdout)
    revision = options["revision"]
    assert (repo, options["local_dir"]) == ("meta-llama/Llama-3.1-8B-Instruct", f"/models/{revision}")
    assert options["allow_patterns"] == ["*.json", "*.safetensors"]
    assert set(options) <= set(inspect.signature(huggingface_hub.snapshot_download).parameters)


def test_a_gated_model_is_one_clear_error(tmp_path: Path) -> None:
    assert issubclass(huggingface_hub.errors.HfHubHTTPError, Exception)
    done = fetch(tmp_path, "gated/model", "--revision", "x", "--directory", str(tmp_path))
    assert done.returncode == 1
    assert "model.huggingface.tokenSecret.name" in done.stderr
    assert "Traceback" not in done.stderr
