"""Planted violations: operators broken on purpose, which prove that certification can fail. Each plant breaks
one property that a real kernel might break. Those of a device: plants_cpu.py, plants_cuda.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class Plant:
    """run: the broken operator; its first argument is the working one, the others are an operator's."""

    operator: str
    run: Callable[..., Any]


def broken(plants: Mapping[str, Plant], names: Iterable[str], operator: str, working: Any) -> Any:
    """`working`, an implementation of `operator`, with those of the named plants that are this operator's."""
    for name in names:
        if plants[name].operator == operator:
            working = partial(plants[name].run, working)
    return working
