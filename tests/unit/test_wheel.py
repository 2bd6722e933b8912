"""A wheel is built, installed into a new environment, and started there, as a user without a clone has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("llm42", "llm42_kernels", "llm42_serve")
IN_THE_WHEEL = """
import importlib, importlib.metadata as m
for name in ("llm42", "llm42_kernels", "llm42_serve"):
    print(importlib.import_module(name).__file__)
import llm42, llm42.config, llm42_serve.app
print(m.version("llm42"), llm42.__version__)
"""


def _source(target: Path) -> Path:
    """What a wheel is made of, without what was built in the clone."""
    for name in ("llm42", "kernels", "deployments"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


def _run(*command: str | Path, limit_s: float = 600) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of the clone."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel. pip gets the tools that build it, setuptools, as `make` gets packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = _source(folder / "source")
    done = _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source)
    if done.returncode and "setuptools" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("the wheel's build tools cannot be had here")
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("llm42-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a new environment with the wheel and nothing of the clone.

    What the wheel depends on is not installed again, as torch alone is most of a gigabyte: the environment
    sees the packages of this one, but not its links into the clone (`.pth` files are not followed there).
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    done = _run(
        sys.executable,
        *("-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps", "--no-index"),
        wheel,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    beside = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    (packages / "beside.pth").write_text(beside)
    return folder / "bin"


@pytest.mark.slow
def test_a_wheel_has_our_names_only_and_says_that_it_is_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


@pytest.mark.slow
def test_an_installed_wheel_starts(installed: Path) -> None:
    packages = installed.parent / "lib"
    done = _run(installed / "python", "-c", IN_THE_WHEEL)
    assert done.returncode == 0, done.stderr
    *files, versions = done.stdout.splitlines()
    assert all(Path(file).is_relative_to(packages) for file in files), files
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert versions.split() == [declared, declared]
    helped = _run(installed / "llm42", "--help")
    assert helped.returncode == 0, helped.stderr
    assert all(command in helped.stdout for command in ("serve", "certify", "generate"))


@pytest.mark.slow
def test_control_without_the_wheel_nothing_is_found(installed: Path) -> None:
    """Of the environment beside it nothing of ours is seen, so the test above was of the wheel."""
    code = "import sys; sys.path[:] = [p for p in sys.path if {!r} not in p]; import torch; import llm42"
    done = _run(installed / "python", "-c", code.format(str(installed.parent)))
    assert done.returncode != 0
    assert "No module named 'llm42'" in done.stderr


def test_every_place_has_the_same_version() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == declared
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()


def test_make_help_lists_every_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = (line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    done = subprocess.run(["make", "-s", "-C", ROOT, "help"], capture_output=True, text=True, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert listed == set(phony.split()[1:])
