"""Runs tests/interpreter in processes of their own: Triton's interpreter is chosen when Triton is
imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "interpreter"


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("cases_*.py")))
def test_cases(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES / name)]
    run = subprocess.run(
        [*command, "-o", "python_files=cases_*.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=CASES.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
