"""The garbage collector of processes that serve."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

import llm42_serve
from llm42.host.garbage import keep_what_is_there


def test_what_is_there_is_looked_at_no_more() -> None:
    before = gc.get_freeze_count()
    there = [[number] for number in range(1000)]
    try:
        keep_what_is_there()
        assert gc.get_freeze_count() - before >= len(there)
        assert not any(each is there for each in gc.get_objects())
        later = [[]]
        assert any(each is later for each in gc.get_objects()), "what comes later is collected as ever"
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("module", ["ingress/ingress.py", "replica/fastpath.py", "verifiers/actor.py"])
def test_all_that_serve_do_so_once_they_are_built(module: str) -> None:
    """Each calls it as the last thing of its building; a real one takes a cluster."""
    tree = ast.parse((Path(llm42_serve.__file__).parent / module).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == keep_what_is_there.__name__
    ]
    assert len(calls) == 1
