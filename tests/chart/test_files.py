"""What the chart says of other files: versions, the image, the figures of docs/operations.md."""

from __future__ import annotations

import re
import tomllib

import yaml

from llm42.models.fetch import FILE_NAME
from tests.chart import helm

DOCKERFILE = (helm.ROOT / "Dockerfile").read_text()
VALUES = yaml.safe_load((helm.CHART / "values.yaml").read_text())


def test_versions_agree() -> None:
    project = tomllib.loads((helm.ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    pins = dict(x.split("==") for x in (helm.ROOT / "constraints.txt").read_text().split() if "==" in x)
    assert VALUES["rayVersion"] == pins["ray"]
    assert f"torch=={pins['torch']}" in DOCKERFILE


def test_the_image_is_what_the_chart_expects() -> None:
    users = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    user = f"{VALUES['podSecurityContext']['runAsUser']}:{VALUES['podSecurityContext']['runAsGroup']}"
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        users = re.findall(r"^USER (.*)$", stage, re.MULTILINE)
        assert not users or users[-1] == user, "a stage that ends as root"
    assert f"useradd --uid {user.split(':')[0]}" in DOCKERFILE
    folder = re.search(r"fetch (\S+)", DOCKERFILE)
    assert folder is not None
    assert VALUES["model"]["path"] == f"{folder[1]}/{FILE_NAME}"
    for tool in ("wget",):
        assert re.search(rf"install .*\b{tool}\b", DOCKERFILE), "KubeRay's probes call it"


def test_what_the_image_copies_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (helm.ROOT / source).exists(), source
    kept = set((helm.ROOT / ".dockerignore").read_text().split())
    copied = {
        s for x in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for s in x.split()[:-1]
    }
    assert copied <= {k.strip("!/") for k in kept}, ".dockerignore hides it"
