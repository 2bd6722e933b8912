"""What side.py has of ours, which brings Ray: replicas whose readers say what they waited for.

canonical: a replica without a fast path, whose verifier decodes all, best effort too. ours: a replica with
vLLM and a verifier; its modes are auto and verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.latency import Latencies
from benchmarks.verify_mode.loads import Load, Wanted
from benchmarks.verify_mode.options import Options, settings_of
from benchmarks.verify_mode.replica import OurSide as OurSide
from benchmarks.verify_mode.replica import Replica, Seen
from benchmarks.verify_mode.warmed import Prompts
from llm42.checkpoint.description import read_config
from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.engine.none import NoEngine
from llm42.protocol import Request


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
