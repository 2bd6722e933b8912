"""The scripts in helm/ as modules: the folder is not a package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.chart.helm import ROOT


def load(name: str = "generate") -> ModuleType:
    """A fresh copy, whose globals a test may change."""
    spec = importlib.util.spec_from_file_location(f"chart_{name}", ROOT / "helm" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
