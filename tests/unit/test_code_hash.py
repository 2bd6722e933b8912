"""The code hash: what code means counts, in every version of Python alike; how it is written does not."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from llm42.fingerprint import source, syntax
from llm42.fingerprint.source import NOT_IN_AN_OUTPUT, PACKAGES, code_hash, folder_of, source_hash
from llm42.fingerprint.syntax import meaning

ROOTS = [folder_of(package) for package in PACKAGES]

PLAIN = """
import numpy as np
from .near import thing as other

@decorated(1)
class Model(Base, key=2):
    limit: int | None = 4

    async def run(self, x, /, *rest, scale=0.5, **more) -> "str":
        with open(x) as file, other:
            return [a * scale for a in rest if a > 1 and not x]
"""
SAME = """
# a comment
'''A docstring.'''
import numpy as np

from .near import (
    thing as other,
)


@decorated(1)
class Model(
    Base,
    key=2,
):
    '''What it is.'''

    limit: int | None = 4
    '''What this is.'''

    async def run(self, x, /, *rest, scale=.5, **more) -> 'str':
        '''What it does.'''
        pass
        with (open(x) as file, other):
            return [
                (a * scale)  # why
                for a in rest
                if a > 1 and not x
            ]
"""


def test_how_it_is_written_does_not_count() -> None:
    assert meaning(PLAIN.encode()) == meaning(SAME.encode())
    assert meaning(b"def f():\n    '''Only this.'''\n") == meaning(b"def f(): ...")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.5", "0.25"),
        ("limit: int | None = 4", "limit: int | None = 4.0"),
        ("= 4", "= True"),
        ("a * scale", "a + scale"),
        ("a > 1", "a >= 1"),
        ("and not", "or not"),
        ("scale=0.5", "scale"),
        ("decorated(1)", "decorated(2)"),
        ("@decorated(1)\n", ""),
        ("key=2", "kei=2"),
        ("int | None", "int"),
        ("x, /, *rest", "x, *rest"),
        ("async def run", "def run"),
        ("for a in", "for b in"),
        ("numpy as np", "numpy"),
        (".near", "near"),
        ('"str"', '"Str"'),
        ("return ", "yield "),
        ("[a * scale", "[(a, scale)"),
    ],
)
def test_what_it_means_does(old: str, new: str) -> None:
    assert old in PLAIN
    assert meaning(PLAIN.replace(old, new, 1).encode()) != meaning(PLAIN.encode())


PAIRS: dict[str, tuple[str, str]] = {
    "f-string's literal": ("f'a{x}b'", "f'a{x}c'"),
    "f-string's width": ("f'{x:{w}.3f}'", "f'{x:{w}.4f}'"),
    "f-string's conversion": ("f'{x!r}'", "f'{x!s}'"),
    "f-string that names its expression": ("f'{x=}'", "f'{y=}'"),
    "string and bytes": ("x = 'a'", "x = b'a'"),
    "string that looks like structure": ("('a', 'b')", "('a,b',)"),
    "sign of zero": ("x = -0.0", "x = 0.0"),
    "None in a dict": ("{**a, 'b': c}", "{'b': c, **a}"),
    "value returned": ("def f(): return None", "def f(): return"),
    "default of a keyword": ("lambda *, a, b=1: a", "lambda *, a=1, b: a"),
    "slice's ends": ("x[1:]", "x[:1]"),
    "pattern": ("match x:\n case [A(b=1), *_]: y", "match x:\n case [A(b=2), *_]: y"),
    "pattern's singleton": ("match x:\n case None: y", "match x:\n case True: y"),
    "pattern's name": ("match x:\n case {'k': v, **rest}: y", "match x:\n case {'k': v}: y"),
    "else": ("for a in b: c\nelse: d", "for a in b: c\nd"),
    "group of exceptions": ("try: a\nexcept* B: c", "try: a\nexcept B: c"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_differ(name: str) -> None:
    one, other = PAIRS[name]
    assert meaning(one.encode()) != meaning(other.encode())


def test_an_f_string_in_pieces_is_the_whole() -> None:
    assert meaning(b"f'a{x}' 'b' f'c{y:}'") == meaning(b"f'a{x}bc{y}'")


def test_a_kernel_is_source_too() -> None:
    kernel = (
        b"@triton.jit\ndef k(p, N: tl.constexpr):\n    '''Doc.'''\n    acc = tl.zeros((N,), tl.float32)\n"
    )
    assert meaning(kernel.replace(b"    '''Doc.'''\n", b"    # words\n")) == meaning(kernel)
    assert meaning(kernel.replace(b"float32", b"float16")) != meaning(kernel)


GOLDEN = {
    PLAIN: "119402374e6d5b48",
    "f'{{a{x!r:>{w}.{p}}}}' f\"b{y = }\" 'c\\N{BULLET}\\ud800'": "f7a43455aa36c9df",
    "match a:\n case [1, -2.5, *r] | {'k': b'x', **m} if r: pass\n case P(q, z=None): u": "2740dfae90fa6f53",
    "x: int | None = 10**100 + 0x7f; y = 1e400, 2j, ...; del x, y[0]; (z) = yield": "7a50edd67bb9dbd0",
}
"""Source, and the beginning of its hash: what was promised under it must not go because Python changes."""


@pytest.mark.parametrize(("text", "expected"), GOLDEN.items())
def test_the_hash_is_pinned(text: str, expected: str) -> None:
    assert meaning(text.encode())[:16] == expected


def _interpreters() -> Iterator[str]:
    """Other Pythons of this machine that the project supports."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in ("3.11", "3.12", "3.13"):
        found = [*sorted(versions.glob(f"{minor}.*/bin/python")), shutil.which(f"python{minor}")]
        yield from [str(path) for path in found if path][:1]


_HASH_ALL = """
import hashlib, pathlib, runpy, sys
meaning = runpy.run_path(sys.argv[1])["meaning"]
for file in sys.argv[2:]:
    print(meaning(pathlib.Path(file).read_bytes()))
"""


def test_every_version_of_python_says_the_same(tmp_path: Path) -> None:
    """Of all code of this project, and of the snippets."""
    files = [file for root in ROOTS for file in sorted(root.rglob("*.py"))]
    for number, text in enumerate([*GOLDEN, *(text for pair in PAIRS.values() for text in pair)]):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(text)
    ours = [meaning(file.read_bytes()) for file in files]
    seen = set()
    for python in _interpreters():
        version = subprocess.check_output(
            [python, "-c", "import sys; print(sys.version_info[:2])"], text=True
        )
        told = subprocess.run(
            [python, "-c", _HASH_ALL, str(syntax.__file__), *map(str, files)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.split() == ours, version
        seen.add(version)
    if len(seen - {f"{sys.version_info[:2]}\n"}) == 0:
        pytest.skip("no other Python of 3.11 to 3.13 is installed here")


def copy_of_packages(directory: Path) -> list[Path]:
    """The packages' source in another place."""
    return [Path(shutil.copytree(root, directory / root.name)) for root in ROOTS]


def test_where_it_lies_does_not_count_and_a_new_file_does(tmp_path: Path) -> None:
    roots = copy_of_packages(tmp_path)
    before = source_hash(roots, NOT_IN_AN_OUTPUT)
    assert before == code_hash()
    new = roots[0] / "models" / "new.py"
    new.write_text("x = 1\n")
    with_new = source_hash(roots, NOT_IN_AN_OUTPUT)
    new.rename(new.with_name("newer.py"))
    assert len({before, with_new, source_hash(roots, NOT_IN_AN_OUTPUT)}) == 3
    new.with_name("newer.py").unlink()
    (roots[0] / "engine" / "new.py").write_text("x = 1\n")
    assert source_hash(roots, NOT_IN_AN_OUTPUT) == before, "engines only propose"


def test_every_module_that_makes_an_output_counts(tmp_path: Path) -> None:
    """One statement more in each, in turn, among them those that were once left out."""
    roots = copy_of_packages(tmp_path)
    hashes, hashed, others = [source_hash(roots, NOT_IN_AN_OUTPUT)], set[str](), 0
    for file in (file for root in roots for file in sorted(root.rglob("*.py"))):
        name, text = file.relative_to(tmp_path).as_posix(), file.read_text()
        file.write_text(f"{text}\n# a comment\n")
        assert source_hash(roots, NOT_IN_AN_OUTPUT) == hashes[0], name
        file.write_text(f"{text}\n_changed = 1\n")
        found = source_hash(roots, NOT_IN_AN_OUTPUT)
        file.write_text(text)
        if found == hashes[0]:
            others += 1
        else:
            hashes.append(found)
            hashed.add(name)
    assert len(set(hashes)) == 1 + len(hashed)
    assert others > 20
    once_left_out = {f"llm42/api/{n}.py" for n in ("logprobs", "render", "deltas", "body_limits")}
    assert hashed >= once_left_out | {
        "llm42/receipt.py",
        "llm42/session/verify_call.py",
        "llm42/session/inbox.py",
        "llm42_serve/ingress/failover.py",
    }
    kernels = {p.relative_to(tmp_path).as_posix() for p in roots[2].rglob("*.py")}
    assert hashed >= kernels


USED_BY_WHAT_COUNTS = {
    *("llm42/__init__.py", "llm42/errors.py", "llm42/config/__init__.py", "llm42/validation.py"),
    *("llm42/telemetry/__init__.py", "llm42/telemetry/logs.py"),
    *("llm42/telemetry/metrics.py", "llm42/telemetry/tracing.py"),
    *("llm42/telemetry/request_metrics.py", "llm42/engine/base.py", "llm42/engine/build.py"),
    *("llm42/api/audit_routes.py", "llm42/api/errors.py", "llm42/api/keys.py"),
    *("llm42/api/docs_page.py", "llm42/api/text_routes.py"),
    *("llm42_serve/verifiers/names.py", "llm42_serve/verifiers/supervisor.py", "llm42_serve/ray_metrics.py"),
    "llm42_serve/verifiers/membership.py",
    "llm42/host/garbage.py",
    *("llm42_serve/replica/admission.py", "llm42_serve/replica/spot_check.py"),
    *("llm42_serve/replica/supervisor_link.py", "llm42_serve/placement.py"),
    *("llm42_serve/replica/crowding.py", "llm42_serve/verifiers/load.py"),
    *("llm42_serve/verifiers/watch.py", "llm42_serve/ingress/router.py"),
    *("llm42/session/policy.py", "llm42/session/ways.py", "llm42/step_times.py"),
    *("llm42/session/promises.py", "llm42/session/standing.py"),
    *("llm42/session/load.py", "llm42/session/rounds.py"),
}
"""What does not count and is imported by what does, the fingerprint itself aside: looked at one by one."""


def test_nothing_is_left_out_without_a_reason_or_in_vain() -> None:
    """Each pattern names something; what counts imports no more of it than was looked at."""
    names = {f.relative_to(root.parent).as_posix(): f for root in ROOTS for f in root.rglob("*.py")}
    for pattern, reason in NOT_IN_AN_OUTPUT.items():
        assert any(fnmatchcase(name, pattern) for name in names), pattern
        assert reason
    left_out = {name for name in names if any(fnmatchcase(name, p) for p in NOT_IN_AN_OUTPUT)}
    used = {i for name in names.keys() - left_out for i in _imports(names[name]) & left_out}
    used = {name for name in used if not name.startswith("llm42/fingerprint/")}
    assert used <= USED_BY_WHAT_COUNTS, "can it change an output now?"


def _imports(file: Path) -> set[str]:
    """Names of the files that a module imports, as far as they are ours."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    paths = {name.replace(".", "/") for name in found}
    return {f"{path}.py" for path in paths} | {f"{path}/__init__.py" for path in paths}


def test_the_hash_is_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are changed under a running process do not change what it computes."""
    before = code_hash()
    monkeypatch.setattr(source, "meaning", lambda _: "another")
    assert code_hash() == before
    assert source_hash(ROOTS, NOT_IN_AN_OUTPUT) != before, "the control"
