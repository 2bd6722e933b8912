"""Where no helm binary is to be had, what needs one is left out, and test_helm.py says why in one line."""

from __future__ import annotations

from pathlib import Path

from tests.chart import helm

WITHOUT = {"test_helm.py", "test_files.py", "test_readiness.py"}
collect_ignore: list[str] = []

try:
    helm.binary()
except helm.NoHelm:
    collect_ignore = [f.name for f in Path(__file__).parent.glob("test_*.py") if f.name not in WITHOUT]
