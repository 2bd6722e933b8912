"""helm/generate.py as a module: the folder is not a package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.chart.helm import ROOT


def load() -> ModuleType:
    """A fresh copy, whose globals a test may change."""
    spec = importlib.util.spec_from_file_location("chart_generate", ROOT / "helm" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
