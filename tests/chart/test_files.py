"""What the chart says of other files: versions, the image, the figures of docs/operations.md."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llm42.checkpoint.fetch import FILE_NAME
from llm42.config import Settings
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


def stage(name: str) -> str:
    """The instructions of one stage, comments left out."""
    (found,) = [s for s in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:] if f" AS {name}\n" in s]
    return "\n".join(line for line in found.splitlines() if not line.startswith("#"))


def constraints(name: str) -> dict[str, str]:
    lines = (helm.ROOT / name).read_text().splitlines()
    return dict(x.split("==") for x in lines if x and not x.startswith("#"))


def test_every_stage_comes_from_one_base_that_can_be_given_by_digest() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    own = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    assert {b for b in bases if b not in own} == {"${BASE}"}
    (base,) = re.findall(r"^ARG BASE=(\S+)", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11-\S+", base), "constraints-gpu.txt is for Python 3.11"


def test_the_gpu_image_is_pinned() -> None:
    pins = constraints("constraints-gpu.txt")
    calls = re.findall(r"pip install (.*)", stage("build-gpu"))
    assert len(calls) == 2 and all("-c constraints-gpu.txt" in c for c in calls)
    assert not re.search(r"==", stage("build-gpu")), "versions stand in one place"
    assert pins["ray"] == constraints("constraints.txt")["ray"] == VALUES["rayVersion"]
    assert (pins["vllm"], pins["torch"]) == ("0.26.0", "2.11.0"), "what ran on the H200"
    assert all(
        v.startswith("13.0.") for n, v in pins.items() if n in ("nvidia-cuda-runtime", "nvidia-cuda-nvcc")
    )
    project = tomllib.loads((helm.ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), wanted


def test_the_sampler_that_needs_nvcc_is_off() -> None:
    """vLLM's FlashInfer sampler is compiled at start; the chart's variable is in test_pods.py."""
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in stage("gpu")
    assert "nvcc" not in "".join(re.findall(r"apt-get install (.*)", DOCKERFILE))


def test_a_login_shell_finds_ray(tmp_path: Path) -> None:
    """Debian's /etc/profile sets PATH anew and then reads profile.d."""
    (line,) = re.findall(r"echo '(PATH=[^']*)' > /etc/profile.d/\S+\.sh", stage("runtime"))
    profile = tmp_path / "profile"
    profile.write_text(f"PATH=/usr/bin:/bin; export PATH\n{line}\n")
    command = ["bash", "-c", f". {profile}; printenv PATH"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("/opt/llm42/venv/bin:")
    links = re.search(r"ln -s (.*) /usr/local/bin/", stage("runtime"))
    assert links is not None
    assert {Path(x).name for x in links[1].split()} == {"ray", "serve"}


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="not in a virtual environment")
def test_python_is_not_linked_because_a_link_is_not_the_environments(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    done = subprocess.run(
        [tmp_path / "python", "-c", "import sys; print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) != Path(sys.prefix)


def test_the_index_of_cpu_builds_is_an_argument() -> None:
    """No host is named anywhere, so it cannot be the default; torch's call alone takes it."""
    calls = re.findall(r"pip install (.*)", stage("build-cpu"))
    assert ["TORCH_PIP_ARGS" in c for c in calls] == [True, False]
    assert "://" not in DOCKERFILE


def test_what_the_image_copies_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (helm.ROOT / source).exists(), source
    kept = set((helm.ROOT / ".dockerignore").read_text().split())
    copied = {
        s for x in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for s in x.split()[:-1]
    }
    assert copied <= {k.strip("!/") for k in kept}, ".dockerignore hides it"


def test_the_sizing_table_is_the_arithmetic() -> None:
    """docs/operations.md: w = 1, rates from the recorded benchmark."""
    figures = json.loads((helm.ROOT / "benchmarks" / "results" / "h200-verifier.json").read_text())["figures"]
    windows, prompts = (figures[f"scheduled_{n}tok_s"]["value"] for n in ("", "prefill_"))
    page = (helm.ROOT / "docs" / "operations.md").read_text()
    assert f"D is {windows:,.0f} and F is {prompts:,.0f}" in page
    assert f"certifies in {figures['certify_8b_s']['value']:.0f} s" in page
    rows = re.findall(r"^\| ([\d,]+) / ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        prompt, output, full, planned = (int(x.replace(",", "")) for x in row)
        rate = 1 / (1 / windows + prompt / output / prompts)
        assert (full, planned) == (round(rate, -2), round(0.7 * rate, -2))


def test_the_example_of_sizing_adds_up() -> None:
    page = (helm.ROOT / "docs" / "operations.md").read_text()
    table = dict(re.findall(r"^\| ([\d,]+ / [\d,]+) \|.*\| ([\d,]+) \|$", page, re.MULTILINE))
    one = int(table["1,024 / 256"].replace(",", ""))
    assert f"5,300 / 24,000 = {one / 24000:.2f}" in page
    assert [math.ceil(share * 24000 / one) for share in (0.5, 1)] == [3, 5], "three and five verifiers"


def test_the_chart_packages_what_the_pages_name() -> None:
    for page in (helm.ROOT / "docs" / "operations.md", helm.CHART / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for name in re.findall(r"examples/([\w-]+\.yaml)", page.read_text()):
            assert (helm.CHART / "examples" / name).exists()
    settings = Settings().model_dump()
    operations = (helm.ROOT / "docs" / "operations.md").read_text()
    named = re.findall(r"`(server|session)\.(\w+)`", operations)
    assert named
    for section, name in named:
        assert name in settings[section], f"{section}.{name}"
