"""The architecture: who may import whom. Read from the sources, without importing anything; each rule has a
control, a small tree that breaks it.

Imports inside functions count like any other. Imports under TYPE_CHECKING count for the layers, because a
type from above is knowledge of what is above; they do not count for circles, because they never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {"llm42": "", "llm42_serve": "deployments", "llm42_kernels": "kernels"}
"""Our packages -> the folder each lies in."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target, as a dotted name."""

    module: str
    line: int
    name: str
    type_only: bool


class Tree:
    """The modules of a source tree, and what each imports."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, Path] = {}
        for package, place in PLACES.items():
            for file in sorted((root / place / package).rglob("*.py")):
                parts = file.relative_to(root / place).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        self.imports = [i for name, file in self.files.items() for i in self._imports(name, file)]

    def _imports(self, module: str, file: Path) -> Iterator[Import]:
        tree = ast.parse(file.read_text())
        guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
        type_only = {id(child) for node in guarded for part in node.body for child in ast.walk(part)}
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(tree):
            for name in _targets(node, package):
                yield Import(module, node.lineno, name, id(node) in type_only)  # type: ignore[attr-defined]

    def uses(self, found: Import) -> set[str]:
        """The modules of this tree that an import runs: its target, and the packages above the target that
        are not already being imported because the importer lies in them."""
        name = found.name
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        targets = {name} if name else set()
        while name := name.rpartition(".")[0]:
            if not f"{found.module}.".startswith(f"{name}."):
                targets.add(name)
        return targets - {found.module}

    def graph(self) -> dict[str, set[str]]:
        """Module -> the modules that it imports when it runs."""
        graph: dict[str, set[str]] = {name: set() for name in self.files}
        for found in self.imports:
            if not found.type_only:
                graph[found.module] |= self.uses(found)
        return graph


def _targets(node: ast.AST, package: str) -> list[str]:
    """What a statement imports. package: what a relative import starts from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def _within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules of `who` import nothing of `what`, with the exception of `but`."""

    who: str
    what: tuple[str, ...]
    breaks: tuple[str, str]
    """The control: a file and its source, which the rule must report."""
    but: tuple[str, ...] = ()
    not_in: str = "-"
    """A package of `who` that the rule is not about."""

    def broken(self, tree: Tree) -> list[str]:
        """The imports that break it."""
        return [
            f"{found.module}:{found.line} imports {found.name}"
            for found in tree.imports
            if _within(found.module, self.who)
            and not _within(found.module, self.not_in)
            and any(_within(found.name, what) for what in self.what)
            and not any(_within(found.name, but) for but in self.but)
        ]


RULES = {
    "the library does not know Ray": Rule(
        "llm42", ("ray",), ("llm42/text/tokenizer.py", "def f():\n    from ray.serve import handle")
    ),
    "the library does not know the service": Rule(
        "llm42", ("llm42_serve",), ("llm42/local/demo.py", "import llm42_serve.app as a"), not_in="llm42.cli"
    ),
    "kernels know nothing of ours": Rule(
        "llm42_kernels",
        ("llm42", "llm42_serve", "benchmarks", "tests"),
        ("kernels/llm42_kernels/linear_cpu.py", "from llm42 import protocol"),
    ),
    "a session knows an engine by its interface, and verifiers not at all": Rule(
        "llm42.session",
        ("llm42.verifier", "llm42.engine"),
        ("llm42/session/driver.py", "from llm42.engine import base, build"),
        but=("llm42.engine.base",),
    ),
    "the state machine has no clocks, threads or I/O": Rule(
        "llm42.session.machine",
        ("time", "asyncio", "threading", "concurrent", "socket", "os", "pathlib"),
        ("llm42/session/machine.py", "from time import monotonic"),
    ),
    "only its adapter imports vLLM": Rule(
        "llm42", ("vllm",), ("llm42/engine/build.py", "__import__('vllm')"), not_in="llm42.engine.vllm"
    ),
    "HTTP knows nothing of Ray": Rule(
        "llm42.api",
        ("ray", "llm42_serve"),
        ("llm42/api/app.py", "if TYPE_CHECKING:\n    from ray.serve.handle import DeploymentHandle"),
    ),
    "the product does not use its tests or benchmarks": Rule(
        "llm42", ("tests", "benchmarks"), ("llm42/cli/main.py", "from tests import support")
    ),
}


@cache
def ours() -> Tree:
    return Tree(ROOT)


def planted(root: Path, files: dict[str, str]) -> Tree:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source + "\n")
    return Tree(root)


def test_all_modules_are_read() -> None:
    tree = ours()
    assert len(tree.files) > 150
    assert {name.partition(".")[0] for name in tree.files} == set(PLACES)
    assert len(tree.imports) > 1000


@pytest.mark.parametrize("name", RULES)
def test_layers(name: str) -> None:
    assert RULES[name].broken(ours()) == []


@pytest.mark.parametrize("name", RULES)
def test_a_planted_import_is_found(name: str, tmp_path: Path) -> None:
    """The control of each rule: one import too many, and only that one is reported."""
    file, source = RULES[name].breaks
    (told,) = RULES[name].broken(planted(tmp_path, {file: f"import json\n{source}"}))
    module = file.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
    assert told.startswith(f"{module}:")


def service_users(tree: Tree) -> set[str]:
    """Modules of the library that import the service."""
    return {i.module for i in tree.imports if _within(i.module, "llm42") and _within(i.name, "llm42_serve")}


def test_only_the_serve_command_looks_up_at_the_service() -> None:
    users = service_users(ours())
    assert len(users) <= 1
    assert all(_within(user, "llm42.cli") for user in users)


def test_a_second_one_is_found(tmp_path: Path) -> None:
    """The control."""
    lazy = "def f():\n    from llm42_serve.launch import Service"
    tree = planted(tmp_path, {"llm42/cli/main.py": lazy, "llm42/cli/other.py": lazy})
    assert service_users(tree) == {"llm42.cli.main", "llm42.cli.other"}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle among the nodes, if there is one: its nodes, the first one again at the end."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between what lies directly in llm42, be it a package or a module."""
    joined: dict[str, set[str]] = {}
    for module, used in graph.items():
        if _within(module, "llm42") and module != "llm42":
            own = ".".join(module.split(".")[:2])
            others = {".".join(name.split(".")[:2]) for name in used if _within(name, "llm42")}
            joined.setdefault(own, set()).update(others - {own, "llm42"})
    return joined


def test_no_file_imports_itself_through_others() -> None:
    assert circle(ours().graph()) == []


def test_no_circles_between_the_packages_of_the_library() -> None:
    graph = packages(ours().graph())
    assert {"llm42.session", "llm42.verifier", "llm42.protocol"} <= graph.keys()
    assert circle(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "from llm42.audit.b import x",
        "from llm42.audit import b",
        "from . import b",
        "from .b import x",
        "import llm42.audit.b",
        "def f():\n    from llm42.audit.b import x",
    ],
)
def test_a_circle_is_found(source: str, tmp_path: Path) -> None:
    """The control, in all the ways in which an import may be written."""
    files = {"llm42/__init__.py": "", "llm42/audit/__init__.py": "", "llm42/audit/a.py": source}
    tree = planted(tmp_path, files | {"llm42/audit/b.py": "from llm42.audit.a import y"})
    assert set(circle(tree.graph())) == {"llm42.audit.a", "llm42.audit.b"}
    guarded = "if TYPE_CHECKING:\n    from llm42.audit.b import x"
    assert circle(planted(tmp_path, {"llm42/audit/a.py": guarded}).graph()) == [], "it never runs"


def test_a_circle_through_a_package_is_found(tmp_path: Path) -> None:
    """The control: importing a module runs the packages above it first."""
    files = {"llm42/__init__.py": "", "llm42/audit/__init__.py": "from llm42.text import a"}
    files |= {"llm42/audit/b.py": "", "llm42/text/__init__.py": "", "llm42/text/a.py": "import llm42.audit.b"}
    assert set(circle(planted(tmp_path, files).graph())) == {"llm42.audit", "llm42.text.a"}


def test_a_circle_between_packages_is_found(tmp_path: Path) -> None:
    """The control: no circle between files, and one between packages."""
    files = {f"llm42/{name}.py": "" for name in ("__init__", "audit/__init__", "text/__init__", "text/d")}
    files |= {"llm42/audit/a.py": "", "llm42/audit/b.py": "from llm42.text.d import x"}
    graph = planted(tmp_path, files | {"llm42/text/c.py": "from llm42.audit.a import y"}).graph()
    assert circle(graph) == []
    assert set(circle(packages(graph))) == {"llm42.audit", "llm42.text"}


def crowd(root: Path) -> int:
    """How many modules lie in the library's root."""
    return len(list((root / "llm42").glob("*.py")))


def test_the_root_stays_small(tmp_path: Path) -> None:
    assert crowd(ROOT) <= 12
    planted(tmp_path, {f"llm42/m{number}.py": "" for number in range(13)})
    assert crowd(tmp_path) == 13, "the control"
