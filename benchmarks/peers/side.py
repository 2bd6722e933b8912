"""One system of h200.py at the level of engines, in a process of its own.

    python -m benchmarks.peers.side vllm|invariant|canonical|ours OPTIONS REPLY_FD

As benchmarks/verify_mode/side.py (OPTIONS: JSON of `Options`), and what the readers waited for. `invariant`
is vLLM in a process that was
started with VLLM_BATCH_INVARIANT=1. canonical: a replica without a fast path, whose verifier decodes all,
best effort too. ours: a replica with vLLM and a verifier; its modes are auto and verify.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.direct.engines import Asked
from benchmarks.lib.sides import serve
from benchmarks.peers.latency import Latencies
from benchmarks.verify_mode.engines import Adapted, Untouched, facts_of
from benchmarks.verify_mode.loads import Load, Meter, Wanted, load_of, wanted
from benchmarks.verify_mode.options import Options, settings_of
from benchmarks.verify_mode.replica import OurSide, Replica, Seen
from benchmarks.verify_mode.side import Flows
from benchmarks.verify_mode.warmed import Prompts
from llm42.checkpoint.description import read_config
from llm42.config import Settings
from llm42.engine.base import Engine, EngineOutput
from llm42.engine.build import build_engine
from llm42.engine.none import NoEngine
from llm42.protocol import Request

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


class TimedReplica(Replica):
    """With waits. All requests of a canonical one are decoded by its verifier, as the load has them."""

    def __init__(self, options: Options) -> None:
        self._waits = Latencies(0.0, 0.0)
        super().__init__(options)

    async def flow(self, load: Load, mode: str, seed: str) -> dict[str, Any]:
        """As Replica's."""
        self._waits = Latencies(load.ramp_s, load.seconds)
        found = await super().flow(load, mode, seed)
        return found | {"waits": self._waits.found(), "client_cpu": found.get("replica_cpu", 0.0)}

    async def _client(
        self, generator: Any, source: Iterator[Wanted], seen: Seen, salt: str, prompts: Prompts
    ) -> None:
        waits = self._waits
        while not seen.meter.over:
            one = next(source)
            self.count += 1
            name, seen.running[one.deterministic] = (
                f"{salt}-{self.count}",
                seen.running[one.deterministic] + 1,
            )
            tokens, stats = list[int](), None
            request = Request(
                name, one.prompt, one.tokens, deterministic=one.deterministic, seeded=False, cache_salt=salt
            )
            waits.started(name, one.deterministic)
            async with aclosing(generator.generate(request)) as deltas:
                async for delta in deltas:
                    seen.meter.add(len(delta.token_ids), one.deterministic)
                    waits.came(name, len(delta.token_ids))
                    tokens += delta.token_ids
                    stats = delta.stats or stats
            waits.ended(name)
            seen.running[one.deterministic] -= 1
            seen.ended(str(one.number), one, tokens, stats)


class _Known(NoEngine):
    """Says what a loaded model would."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.facts = {"vocab_size": read_config(Path(settings.model.path)).vocab_size}


class CanonicalReplica(TimedReplica):
    """Without a fast path: it has one mode, whatever is asked for."""

    modes = ("direct",)

    def settings(self, options: Options, mode: str) -> Settings:
        """As Replica's."""
        tree = settings_of(replace(options, engine="torch"), "verify").model_dump(
            mode="json", exclude_unset=True
        )
        tree["engine"] = {"kind": "canonical", "canonical": {"max_num_seqs": options.max_requests}}
        tree["session"] = {"mode": "direct"}
        return Settings.load(tree)

    def built(self, settings: Settings) -> Engine:
        """As Replica's: nothing decodes beside the verifier."""
        return _Known(settings)


def _vllm(options: Options) -> Flows:
    if options.engine == "vllm":
        untouched = TimedVllm(options)
        return TimedFlows(lambda: untouched, facts_of(untouched.engine.vllm_config))
    engine = build_engine(settings_of(options, "verify"))
    return TimedFlows(lambda: TimedAdapted(engine, engine.model.config.vocab_size), {})  # type: ignore[attr-defined]


def _ours(kind: str, options: Options) -> OurSide:
    return OurSide(CanonicalReplica(options) if kind == "canonical" else TimedReplica(options))


def main() -> None:
    """Answers until stdin ends."""
    kind, options, pipe = sys.argv[1], Options(**json.loads(sys.argv[2])), int(sys.argv[3])
    serve(lambda: _ours(kind, options) if kind in ("canonical", "ours") else _vllm(options), pipe)


if __name__ == "__main__":
    main()
