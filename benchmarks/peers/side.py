"""One system of h200.py at the level of engines, in a process of its own.

    python -m benchmarks.peers.side vllm|invariant|canonical|ours OPTIONS REPLY_FD

As benchmarks/verify_mode/side.py (OPTIONS: JSON of `Options`), and what the readers waited for. `invariant`
is vLLM in a process that was
started with VLLM_BATCH_INVARIANT=1. canonical and ours: replica.py has them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.direct.engines import Asked
from benchmarks.direct.side import Side
from benchmarks.lib.sides import serve
from benchmarks.peers.latency import Latencies
from benchmarks.verify_mode.engines import Adapted, Untouched, facts_of
from benchmarks.verify_mode.loads import Meter, load_of, wanted
from benchmarks.verify_mode.options import Options, settings_of
from benchmarks.verify_mode.side import Flows
from llm42.engine.base import EngineOutput
from llm42.engine.build import build_engine

Come = list[tuple[str, int, bool]]
"""Of which request, how many tokens, and whether these were its last."""


class TimedVllm(Untouched):
    """Says of each request what has come."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.come: Come = []
        step = self.engine.step

        def stepped() -> Any:
            outputs = step()
            self.come += [(o.request_id, len(o.outputs[0].token_ids), o.finished) for o in outputs]
            return outputs

        self.engine.step = stepped

    def last_name(self) -> str:
        """Of the request that was added last."""
        return str(self.count)


class TimedAdapted(Adapted):
    """The same of an engine of ours, which stands for vLLM where there is none."""

    def __init__(self, engine: Any, vocab: int) -> None:
        super().__init__(engine, vocab)
        self.come: Come = []
        self._added = 0

    def add(self, asked: Asked, sampling: Any, seed: int, watched: bool) -> None:
        """As Engine's."""
        super().add(asked, sampling, seed, watched)
        self._added += 1

    def last_name(self) -> str:
        """Of the request that was added last."""
        return f"adapted-{self._added - 1}"

    def _taken(self, output: EngineOutput) -> int:
        self.come.append((output.request_id, len(output.tokens), output.finish is not None))
        return super()._taken(output)


class TimedFlows(Flows):
    """vLLM as it comes, or batch-invariant."""

    engine: TimedVllm | TimedAdapted

    def flow(self, load: dict[str, Any], seed: str, mode: str = "") -> dict[str, Any]:
        """As Flows'; `waits` says what was waited for."""
        what, engine = load_of(load), self.engine
        source, meter = wanted(what, seed, engine.vocab), Meter(what)
        waits = Latencies(what.ramp_s, what.seconds)
        free, spent = what.in_flight, time.process_time()
        engine.come.clear()
        while not meter.over:
            for _ in range(free):
                one = next(source)
                engine.add(Asked(list(one.prompt), one.tokens), {}, one.number + 1, True)
                waits.started(engine.last_name(), one.deterministic)
            free = engine.ended()
            meter.add(engine.new_tokens())
            for name, tokens, last in engine.come:
                waits.came(name, tokens)
                if last:
                    waits.ended(name)
            engine.come.clear()
        spent = time.process_time() - spent
        engine.abandon()
        return meter.found() | {"client_cpu": spent / what.seconds, "waits": waits.found()}


def _vllm(options: Options) -> Flows:
    if options.engine == "vllm":
        untouched = TimedVllm(options)
        return TimedFlows(lambda: untouched, facts_of(untouched.engine.vllm_config))
    engine = build_engine(settings_of(options, "verify"))
    return TimedFlows(lambda: TimedAdapted(engine, engine.model.config.vocab_size), {})  # type: ignore[attr-defined]


def _ours(kind: str, options: Options) -> Side:
    # it brings Ray, which vLLM's processes do without, as in `vllm serve`
    from benchmarks.peers.replica import CanonicalReplica, OurSide, TimedReplica

    return OurSide(CanonicalReplica(options) if kind == "canonical" else TimedReplica(options))


def main() -> None:
    """Answers until stdin ends."""
    kind, options, pipe = sys.argv[1], Options(**json.loads(sys.argv[2])), int(sys.argv[3])
    serve(lambda: _ours(kind, options) if kind in ("canonical", "ours") else _vllm(options), pipe)


if __name__ == "__main__":
    main()
