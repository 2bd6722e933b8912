"""Public definitions say what they are, and name the errors that they raise themselves. Controls: planted
definitions that do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("llm42", "deployments/llm42_serve", "kernels/llm42_kernels")
OF_NO_USER = frozenset({"AssertionError", "NotImplementedError", "Exit"})
"""Invariants, abstract methods, and the way in which a command ends."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions and classes without an underscore, with those inside classes, and constructors. The setter of
    a property is described where the property is."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            yield from public(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function) and _is_described(node):
            yield prefix + node.name, node


def _is_described(node: Function) -> bool:
    setter = any(ast.unparse(d).endswith(".setter") for d in node.decorator_list)
    return not setter and (not node.name.startswith("_") or node.name == "__init__")


def raised(node: ast.AST) -> Iterator[str]:
    """Names of what a function's own statements raise and do not catch."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            called = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(called).rpartition(".")[2]
            if name[:1].isupper():
                yield name
        elif isinstance(child, ast.Try):
            caught = {ast.unparse(h.type) if h.type else "Exception" for h in child.handlers}
            inside = ast.Module([*child.body], [])
            yield from (name for name in raised(inside) if not caught & {name, "Exception"})
            rest: list[ast.stmt] = [*child.orelse, *child.finalbody]
            yield from raised(ast.Module([*rest, *(s for h in child.handlers for s in h.body)], []))
        else:
            yield from raised(child)


def lacking(source: str) -> list[str]:
    """What the docstrings of a module's public definitions do not say."""
    tree, found = ast.parse(source), []
    if tree.body and ast.get_docstring(tree) is None:
        found.append("the module has none")
    for name, node in public(tree.body):
        text = ast.get_docstring(node) or ""
        if not text and not name.endswith("__init__"):
            found.append(f"{name} has none")
        if isinstance(node, Function):
            errors = sorted(set(raised(node)) - OF_NO_USER)
            found += [f"{name} does not name {error}" for error in errors if error not in text]
    return found


def test_public_definitions_have_docstrings_that_name_their_errors() -> None:
    files = [file for source in SOURCES for file in sorted((ROOT / source).rglob("*.py"))]
    assert len(files) > 150
    assert {f.relative_to(ROOT).as_posix(): said for f in files if (said := lacking(f.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(): ...", "f has none"),
        ("class A:\n    '''It.'''\n    def g(self): ...", "A.g has none"),
        ("def f():\n    '''It.'''\n    raise KeyError(1)", "f does not name KeyError"),
        (
            "class A:\n    '''It.'''\n    def __init__(self):\n        raise x.Bad",
            "A.__init__ does not name Bad",
        ),
        (
            "def f():\n    '''It.'''\n    try:\n        raise B()\n    except C:\n        pass",
            "f does not name B",
        ),
        ("def f():\n    '''Raises B.'''\n    raise B", ""),
        ("def f():\n    '''It.'''\n    try:\n        raise B\n    except B:\n        raise", ""),
        ("def _f(): raise B", ""),
        ("def f():\n    '''It.'''\n    def inner():\n        raise B", ""),
    ],
)
def test_what_is_not_said_is_found(source: str, said: str) -> None:
    """The control, and that what is said passes."""
    assert lacking(f"'''A module.'''\n{source}") == ([said] if said else [])
