"""One format for every benchmark's result: benchmarks/results/NAME.json, written and checked here."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = ("torch", "triton", "ray", "vllm", "numpy", "transformers")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number; `target` may be None (reported only)."""

    value: float
    unit: str
    target: float | None = None
    better: Literal["higher", "lower"] = "lower"

    @property
    def met(self) -> bool:
        """Whether the target is reached; a figure without one is always met."""
        if self.target is None:
            return True
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def machine() -> dict[str, Any]:
    """The machine as a reader needs to know it."""
    from llm42.fingerprint.device import device_facts

    facts = {"cpu": device_facts("cpu", 1)["name"], "cores": _cores(), "python": platform.python_version()}
    import torch

    if torch.cuda.is_available():
        facts["gpu"] = device_facts("cuda", 0)
    return facts


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """A benchmark's options as a result shows them: without the places of files."""
    return {key: value for key, value in vars(args).items() if not isinstance(value, Path)}


def report(name: str, figures: Mapping[str, Figure], raw: Any, directory: Path | None = None) -> Path:
    """Writes and re-reads NAME.json. Raises ValueError if what it wrote does not validate."""
    document = {
        "machine": machine(),
        "versions": {lib: _version(lib) for lib in LIBRARIES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "figures": {key: {**asdict(f), "met": f.met} for key, f in figures.items()},
        "raw": raw,
    }
    path = (directory or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    validate(json.loads(path.read_text()))
    return path


def validate(document: Mapping[str, Any]) -> None:
    """Raises ValueError naming what is missing or inconsistent.

    A file that joins several runs has them in `raw["runs"]`. Its figures may name theirs: `run`, from 1 on.
    """
    for key in ("machine", "versions", "date", "command", "figures", "raw"):
        if key not in document:
            raise ValueError(f"a result lacks {key!r}")
    for key, f in document["figures"].items():
        if set(f) - {"run"} != {"value", "unit", "target", "better", "met"}:
            raise ValueError(f"figure {key} has the fields {sorted(f)}")
        if f["met"] != Figure(f["value"], f["unit"], f["target"], f["better"]).met:
            raise ValueError(f"figure {key} says met={f['met']}, which its target contradicts")


def _cores() -> int:
    import os

    return os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
