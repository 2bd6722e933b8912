"""One side of h200.py in a process of its own.

    python -m benchmarks.verify_mode.side vllm|ours OPTIONS REPLY_FD      (OPTIONS: JSON of `Options`)

vllm: vLLM untouched or, where ours has the torch engine, that one alone. ours: what a replica of the service
has (replica.py), with the verifier's actor in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.direct.engines import Asked
from benchmarks.direct.side import Side
from benchmarks.lib.sides import serve
from benchmarks.verify_mode.engines import Adapted, Counted, Untouched, facts_of
from benchmarks.verify_mode.loads import Meter, load_of, wanted
from benchmarks.verify_mode.options import Options, settings_of


class Flows(Side):
    """Also runs loads whose requests come as others end (loads.py), all of them best effort."""

    engine: Counted

    def __init__(self, make: Callable[[], Counted], facts: dict[str, Any]) -> None:
        super().__init__(make)
        self.ready |= facts

    def flow(self, load: dict[str, Any], seed: str) -> dict[str, Any]:
        """Tokens per second within the load's window."""
        what, engine = load_of(load), self.engine
        source, meter = wanted(what, seed, engine.vocab), Meter(what)
        free, spent = what.in_flight, time.process_time()
        while not meter.over:
            for _ in range(free):
                one = next(source)
                engine.add(Asked(list(one.prompt), one.tokens), {}, one.number + 1, True)
            free = engine.ended()
            meter.add(engine.new_tokens())
        spent = time.process_time() - spent
        engine.abandon()
        return meter.found() | {"client_cpu": spent / what.seconds}


def _beside(options: Options) -> Flows:
    """The side that ours is compared with."""
    if options.engine == "vllm":
        untouched = Untouched(options)
        return Flows(lambda: untouched, facts_of(untouched.engine.vllm_config))
    from llm42.engine.build import build_engine

    settings = settings_of(options, "verify")
    engine = build_engine(settings)
    return Flows(lambda: Adapted(engine, engine.model.config.vocab_size), {})  # type: ignore[attr-defined]


def _ours(options: Options) -> Side:
    from benchmarks.verify_mode.replica import OurSide, Replica

    replica = Replica(options)
    return OurSide(replica)


def main() -> None:
    """Answers until stdin ends."""
    kind, options, pipe = sys.argv[1], Options(**json.loads(sys.argv[2])), int(sys.argv[3])
    serve(lambda: _ours(options) if kind == "ours" else _beside(options), pipe)


if __name__ == "__main__":
    main()
