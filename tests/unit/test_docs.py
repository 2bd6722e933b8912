"""The documentation and the code agree: links, names and paths exist, the rules have their evidence, every
module has its line in docs/structure.md. Each check has a control, a small tree with a planted fault."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm42.config import Settings

ROOT = Path(__file__).parents[2]
SOURCES = ("llm42", "deployments/llm42_serve", "kernels/llm42_kernels")
FOLDERS = ("llm42", "deployments", "kernels", "helm", "tests", "benchmarks", "docs")
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.*-])[\w/-]+\.(?:py|md)\b")
"""A file of the repository, as prose and docstrings name it: its path, or the end of it."""


def pages(root: Path) -> list[Path]:
    """Every page of the documentation."""
    return [
        *root.glob("*.md"),
        *(p for d in ("docs", "helm", "benchmarks") for p in (root / d).rglob("*.md")),
    ]


def links(page: Path) -> Iterator[tuple[str, str, Path, str]]:
    """(label, link, file that it leads to, fragment) of a page's relative links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for label, link in LINK.findall(text):
        if "://" not in link and not link.startswith("mailto:"):
            path, _, fragment = link.partition("#")
            yield label, link, (page.parent / path).resolve() if path else page, fragment


def headings(page: Path) -> set[str]:
    """A page's headings, as fragments of links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in found}


def defined(file: Path) -> dict[str, int]:
    """Names that a module defines, those in its classes with the class's name before them -> their lines."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name, node.lineno
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from ((prefix + t.id, node.lineno) for t in targets if isinstance(t, ast.Name))

    return dict(inside(ast.parse(file.read_text()).body, ""))


def faults(root: Path) -> list[str]:
    """Links that lead nowhere, names that their file does not define, files that are not there."""
    found = []
    for page in pages(root):
        for label, link, file, fragment in links(page):
            where = f"{page.relative_to(root)}: {link}"
            if not file.exists():
                found.append(f"{where} leads nowhere")
            elif fragment and file.suffix == ".md" and fragment not in headings(file):
                found.append(f"{where} has no such heading")
            elif label.startswith("`") and file.suffix == ".py":
                name = label.strip("`")
                line = defined(file).get(name)
                if line is None and not str(file).endswith(name):
                    found.append(f"{where} does not define {name}")
                elif fragment not in ("", f"L{line}"):
                    found.append(f"{where}: {name} is in line {line}")
    there = [f"/{f.relative_to(root).as_posix()}" for d in FOLDERS for f in (root / d).rglob("*.*")]
    there += [f"/{file.name}" for file in root.glob("*.*")]
    for file in [*pages(root), *(f for source in SOURCES for f in (root / source).rglob("*.py"))]:
        for name in FILE.findall(LINK.sub("", file.read_text())):
            if not any(path.endswith(f"/{name}") for path in there):
                found.append(f"{file.relative_to(root)} names {name}, which is not there")
    return found


def test_links_names_and_paths_exist() -> None:
    assert faults(ROOT) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a page](docs/gone.md)", "leads nowhere"),
        ("[a part](docs/page.md#lost)", "no such heading"),
        ("[`Session.lost`](llm42/machine.py)", "does not define Session.lost"),
        ("[`Session.commit`](llm42/machine.py#L3)", "Session.commit is in line 4"),
        ("It is in `llm42/gone.py`.", "names llm42/gone.py"),
        ("[`Session.commit`](llm42/machine.py) [x](docs/page.md#the-rule) `llm42/machine.py`", ""),
        ("[`LIMIT`](llm42/machine.py#L1) [`machine.py`](llm42/machine.py) [x](https://example.org)", ""),
    ],
)
def test_a_planted_fault_is_found(text: str, fault: str, tmp_path: Path) -> None:
    """The control, and that what is right passes."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# A page\n\n## The rule\n")
    (tmp_path / "llm42").mkdir()
    source = "LIMIT = 1\n\nclass Session:\n    def commit(self): ...\n"
    (tmp_path / "llm42" / "machine.py").write_text(source)
    (tmp_path / "README.md").write_text(text + "\n")
    found = faults(tmp_path)
    assert len(found) == bool(fault)
    assert all(fault in line for line in found)


def unlisted(folder: Path) -> set[str]:
    """Pages that no README.md links, of their own folder or of one above it in `folder`."""
    found = set()
    for page in set(folder.rglob("*.md")) - {folder / "README.md"}:
        indexes = (up / "README.md" for up in page.parents if up.is_relative_to(folder))
        listed = {file for index in indexes if index.exists() for _, _, file, _ in links(index)}
        if page.resolve() not in listed:
            found.add(page.relative_to(folder).as_posix())
    return found


def test_the_index_has_every_page() -> None:
    assert unlisted(ROOT / "docs") == set()


def test_a_page_that_the_index_lacks_is_found(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "part").mkdir()
    for page in ("README.md", "a.md", "b.md", "part/README.md", "part/c.md", "part/d.md"):
        (tmp_path / page).write_text("")
    (tmp_path / "README.md").write_text("[a](a.md) [part](part/README.md)")
    (tmp_path / "part" / "README.md").write_text("[c](c.md)")
    assert unlisted(tmp_path) == {"b.md", "part/d.md"}


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    _, _, text = page.read_text().partition(f"\n{heading}\n")
    lines = text[text.index("\n|") :].strip().splitlines()
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def without_evidence(rows: list[list[str]]) -> list[str]:
    """Rules of which the enforcing code, the test or the control is not linked."""
    bad = []
    for row in rows:
        linked = [LINK.findall(cell) for cell in row]
        in_code = len(row) == 4 and any(link.startswith("../") for _, link in linked[1])
        in_tests = [cell and all(link.startswith("../tests/") for _, link in cell) for cell in linked[2:]]
        same = {label for label, _ in linked[-1]} & {label for label, _ in linked[-2]}
        if not (in_code and len(in_tests) == 2 and all(in_tests)) or same:
            bad.append(row[0])
    return bad


def test_every_rule_has_its_line_its_test_and_its_control() -> None:
    assert (
        "only verified tokens leave the server](docs/determinism.md#the-rules)"
        in (ROOT / "README.md").read_text()
    )
    rows = rows_of(ROOT / "docs" / "determinism.md", "## The rules")
    assert len(rows) >= 10
    assert without_evidence(rows) == []


@pytest.mark.parametrize("missing", [None, 1, 2, 3])
def test_a_rule_without_evidence_is_found(missing: int | None, tmp_path: Path) -> None:
    """The control."""
    row = ["A rule.", "[`f`](../llm42/a.py)", "[`test_f`](../tests/a.py)", "[`test_control`](../tests/a.py)"]
    if missing is not None:
        row[missing] = "somewhere"
    table = (
        f"# Page\n\n## The rules\n\nText.\n\n| a | b | c | d |\n|---|---|---|---|\n| {' | '.join(row)} |\n"
    )
    (tmp_path / "page.md").write_text(f"{table}\nMore.\n")
    rows = rows_of(tmp_path / "page.md", "## The rules")
    assert without_evidence(rows) == ([] if missing is None else ["A rule."])


def wrong_defaults(page: Path) -> list[str]:
    """Settings whose default, in brackets behind the name, is not the one in force."""
    tree, bad = Settings().model_dump(), []
    for name, told in re.findall(r"`(\w+(?:\.\w+)+)` \(([\w.]+)(?: s)?\)", page.read_text()):
        value: Any = tree
        for part in name.split("."):
            value = value[part]
        if (str(value).lower() if isinstance(value, bool) else f"{value:g}") != told:
            bad.append(f"{name} is {value}, not {told}")
    return bad


def test_the_defaults_in_the_table_of_repetitions_are_right() -> None:
    page = ROOT / "docs" / "structure.md"
    assert page.read_text().count(" s)") > 8
    assert wrong_defaults(page) == []


def test_a_wrong_default_is_found(tmp_path: Path) -> None:
    """The control."""
    told = "`server.failover_s` (61 s) `session.verify_attempts` (4) `server.resume_best_effort` (true)"
    (tmp_path / "page.md").write_text(told)
    found = wrong_defaults(tmp_path / "page.md")
    assert [line.split()[0] for line in found] == ["server.failover_s", "server.resume_best_effort"]


def modules(root: Path) -> set[str]:
    """Every module of the product but package files that hold nothing beyond a docstring."""
    files = [file for source in SOURCES for file in (root / source).rglob("*.py")]
    return {
        file.relative_to(root).as_posix()
        for file in files
        if file.name != "__init__.py" or len(ast.parse(file.read_text()).body) > 1
    }


def named(page: Path) -> list[str]:
    """The modules that a page's tables describe: under a heading with a folder, a row with a file in it."""
    folder, found = "", list[str]()
    for line in page.read_text().splitlines():
        if title := re.match(r"#+ .*?`([\w/]+)/`", line):
            folder = title[1]
        elif line.startswith("#"):
            folder = ""
        elif folder and (row := re.match(r"\| `([\w/]+\.py)` \| [^|]*\w[^|]* \|$", line)):
            found.append(f"{folder}/{row[1]}")
    return found


def test_every_module_has_its_line_in_the_structure_page() -> None:
    described = named(ROOT / "docs" / "structure.md")
    assert sorted(described) == sorted(modules(ROOT))


def test_a_module_without_a_line_and_a_line_without_a_module_are_found(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "llm42" / "text").mkdir(parents=True)
    for name, source in {"a": "x = 1", "text/b": "", "text/__init__": '"""Text."""'}.items():
        (tmp_path / "llm42" / f"{name}.py").write_text(source)
    page = tmp_path / "structure.md"
    page.write_text(
        "### `llm42/`\n\n| file | what |\n|---|---|\n| `a.py` | This. |\n"
        "### Texts, in `llm42/text/`\n\n| `b.py` | |\n| `c.py` | That. |\n"
        "## More\n\n| `d.py` | No folder. |\n"
    )
    assert modules(tmp_path) == {"llm42/a.py", "llm42/text/b.py"}
    assert named(page) == ["llm42/a.py", "llm42/text/c.py"]


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "picture.py"))["picture"]()
    assert (ROOT / "docs" / "structure.svg").read_text() == drawn, "run python docs/picture.py"
    assert "prefers-color-scheme: dark" in drawn
    for name in ("Ingress", "Fast path", "Verifier", "Supervisor", "Request", "Window", "Commit", "Delta"):
        assert f">{name}</text>" in drawn
