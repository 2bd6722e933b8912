"""The names that an installation takes: ours are no one else's, and what tests use is no run-time
dependency."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "deployments")]
IMPORT_ALL = """
import importlib, importlib.abc, json, pkgutil, sys
blocked = json.loads(sys.argv[1])
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not to be found", name=name)
sys.meta_path.insert(0, Block())
import llm42_serve.launch
llm42_serve.launch.prepare_environment()
count, missing = 0, {}
for package in ("llm42", "llm42_kernels", "llm42_serve"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if found.name.endswith("__main__"):
            continue  # it runs
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            missing[found.name] = error.name
        count += 1
others = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
print(json.dumps({"count": count, "missing": missing, "loaded": others}))
"""
BESIDE = """
import transformers
from transformers import LlamaForCausalLM
import kernels, llm42_kernels, llm42_kernels.linear_cpu
assert transformers.utils.is_kernels_available(), "the distribution was not noticed"
print(kernels.__file__, llm42_kernels.__file__, sep="\\n")
"""


def _python(code: str, *arguments: str, paths: list[str]) -> subprocess.CompletedProcess[str]:
    theirs = [path for path in (os.environ.get("PYTHONPATH"),) if path]  # packages may be there as well
    path = os.pathsep.join([*paths, *theirs])
    environment = os.environ | {"PYTHONPATH": path, "USE_HUB_KERNELS": "YES"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)


def _missing(*blocked: str) -> dict[str, str]:
    """Product modules that cannot be imported without some packages -> what they miss."""
    done = _python(IMPORT_ALL, json.dumps(blocked), paths=PATHS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["count"] > 100
    found: dict[str, str] = told["missing"]
    return found


def test_no_product_module_needs_transformers() -> None:
    optional = {"vllm", "triton"}  # what only a GPU, or an extra, brings
    assert set(_missing("transformers", "accelerate").values()) <= optional


def test_an_ingress_loads_no_torch() -> None:
    """It takes two seconds of CPU and 150 MB; a replica, which computes, does."""
    code = "import sys, llm42_serve.{0}.{1}; print('torch' in sys.modules)"
    loads = [
        _python(code.format(*of), paths=PATHS) for of in (("ingress", "ingress"), ("replica", "fastpath"))
    ]
    assert [done.stdout.strip() for done in loads] == ["False", "True"], loads[0].stderr


def test_a_package_that_is_needed_is_missed() -> None:
    """The control."""
    assert "prometheus_client" in _missing("prometheus_client").values()


def test_run_time_dependencies_are_what_the_product_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [d for d in project["dependencies"] if d.startswith(("transformers", "accelerate"))]
    assert [d for d in project["optional-dependencies"]["test"] if d.startswith("transformers")]


def test_no_other_distribution_has_our_names() -> None:
    for name in ("llm42", "llm42_kernels"):
        assert set(packages_distributions().get(name, ["llm42"])) == {"llm42"}


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real distribution `kernels`. transformers uses it from some version on: where the package index
    has older ones only, the copy says that it is that version."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"`pip install kernels` failed here: {done.stderr.strip().splitlines()[-1]}")
    (metadata,) = target.glob("kernels-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    told = [f"Version: {import_utils.KERNELS_MIN_VERSION}" if x.startswith("Version: ") else x for x in lines]
    metadata.write_text("\n".join(told) + "\n")
    return target


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["in front", "behind"])
def test_it_lives_beside_the_distribution_kernels(distribution: Path, first: bool) -> None:
    paths = [str(distribution), *PATHS] if first else [*PATHS, str(distribution)]
    done = _python(BESIDE, paths=paths)
    assert done.returncode == 0, done.stderr
    theirs, ours = map(Path, done.stdout.splitlines())
    assert theirs == distribution / "kernels" / "__init__.py"
    assert ours == ROOT / "kernels" / "llm42_kernels" / "__init__.py"


@pytest.mark.slow
def test_a_package_of_that_name_in_front_would_break_it(distribution: Path, tmp_path: Path) -> None:
    """The control: what the folder was when it was a package."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    done = _python(BESIDE, paths=[str(tmp_path), *PATHS, str(distribution)])
    assert done.returncode != 0
    assert "from 'kernels'" in done.stderr
