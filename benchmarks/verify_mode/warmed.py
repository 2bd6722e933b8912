"""Deterministic prompts that are in the engine's cache before they come, and never in the verifier's: an
upper bound of what it gains when the engine takes a prompt's KV from the verifier.

There are as many prompts as deterministic requests at a time, so that they need no KV beside these. Each is
used again as soon as its request has ended, and is still in the engine's cache. To the verifier each request
has a salt of its own, so that it computes every prompt.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.verify_mode.loads import Load, Wanted, is_deterministic
from llm42.engine.base import Engine, EngineOutput, Sink
from llm42.protocol import Request

APART = "/"
"""In a salt: what comes after it is the verifier's alone."""


class Prompts:
    """Which of them a request takes: the one that was used last, and one in use only if all are. Without
    `warmed` each request has its own."""

    def __init__(self, load: Load, seed: str, vocab: int, warmed: bool) -> None:
        count = sum(is_deterministic(n, load.percent) for n in range(load.in_flight))
        count = max(1, count) if warmed else 0
        rng = random.Random(f"warmed {seed}")
        lengths = [rng.choice(load.prompts) for _ in range(count)]
        self.all = [tuple(rng.choices(range(3, vocab), k=length)) for length in lengths]
        self._free, self._users = list(range(count)), Counter[int]()
        self._round = itertools.cycle(range(count))

    @contextmanager
    def of(self, one: Wanted) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """While a request runs: what its answer depends on, its prompt, and what its salt ends with."""
        if not self.all or not one.deterministic:
            yield str(one.number), one.prompt, ""
            return
        number = self._free.pop() if self._free else next(self._round)
        self._users[number] += 1
        try:
            yield f"warmed {number} {one.tokens}", self.all[number], f"{APART}{one.number}"
        finally:
            self._users[number] -= 1
            if not self._users[number]:
                self._free.append(number)


class Watched:
    """An engine that never sees the verifier's part of a salt, and says what it found of deterministic
    prompts in its cache. All else is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.told = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        """As Engine's."""
        salt = request.cache_salt.partition(APART)[0]
        told = self._telling(len(request.prompt), sink) if request.deterministic else sink
        self._engine.submit(replace(request, cache_salt=salt), told, limit)

    def take(self) -> dict[str, int]:
        """Prompt tokens since the last call, and those of them that the engine had in its cache."""
        told, self.told = self.told, Counter()
        return {name: told[name] for name in ("tokens", "cached")}

    def _telling(self, length: int, sink: Sink) -> Sink:
        def tell(output: EngineOutput) -> None:
            if output.cached_tokens is not None:
                self.told["tokens"] += length
                self.told["cached"] += output.cached_tokens
            sink(output)

        return tell
