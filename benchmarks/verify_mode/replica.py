"""What a fast-path replica of the service has: engine, driver and sessions, and the pool that talks to the
supervisor and the verifier's actor of a private Ray cluster. Without HTTP, Serve and admission.

A generator for each mode over the same engine and the same verifier, one at a time. The event loop of a
replica runs in a thread of its own, all the time: the pool lives there.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import threading
import time
import traceback
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from benchmarks.direct.actor import start_ray
from benchmarks.direct.side import Side
from benchmarks.verify_mode.engines import Adapted
from benchmarks.verify_mode.loads import Load, Meter, Wanted, load_of, wanted
from benchmarks.verify_mode.options import Options, settings_of
from benchmarks.verify_mode.warmed import Prompts, Watched
from llm42.checkpoint.description import load_tokenizer
from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.engine.build import build_engine
from llm42.protocol import Request, RequestStats
from llm42.session.driver import Generator
from llm42.session.load import Load as Load_
from llm42.session.load import Progress, Way
from llm42.session.policy import choose_best_effort
from llm42.step_times import VerifierLoad
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica.verifier_pool import VerifierPool

MODES = ("verify", "direct", "auto")
READY_S, SETTLED_S, PLANS_S, STAYED = 400.0, 10.0, 1.0, 8
COUNTERS = (
    "steps", "rows", "padding_rows", "windows", "decoded", "cached_rows", "preemptions", "step_s", "queue_s",
)  # fmt: skip


@dataclass
class Seen:
    """What the clients of one run saw."""

    meter: Meter
    requests: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Ended, by class."""
    tokens: int = 0
    """Of the deterministic ones that ended."""
    stats: dict[str, int] = field(default_factory=lambda: dict.fromkeys(asdict(RequestStats()), 0))
    """The same, summed."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of deterministic answers, by the request: equal in every mode."""
    running: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def ended(self, name: str, one: Wanted, tokens: list[int], stats: RequestStats | None) -> None:
        """One request is over. name: what says which answer it has to have."""
        if len(tokens) != one.tokens:
            raise RuntimeError(f"{len(tokens)} tokens of {one.tokens}")
        self.requests[one.deterministic] += 1
        if not one.deterministic:
            return
        self.tokens += len(tokens)
        digest = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
        if self.digests.setdefault(name, digest) != digest:
            raise RuntimeError(f"{name} has had another answer before")
        for key, value in asdict(stats or RequestStats()).items():
            self.stats[key] += value

    def found(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.meter.found() | {
            "requests": self.requests[False] + self.requests[True],
            "deterministic_requests": self.requests[True], "committed": self.tokens, "stats": self.stats,
            "digests": self.digests, "deterministic_running": self.running[True],
            "running": sum(self.running.values()),
        }  # fmt: skip


class Replica:
    """Raises RuntimeError, with what the verifier says, when that does not become ready."""

    modes: tuple[str, ...] = MODES

    def settings(self, options: Options, mode: str) -> Settings:
        """Of each of its modes."""
        return settings_of(options, mode)

    def built(self, settings: Settings) -> Engine:
        """What decodes."""
        return build_engine(settings)

    def __init__(self, options: Options) -> None:
        from ray._private.async_compat import get_new_event_loop  # uvloop, as in an actor

        began, verified = time.monotonic(), options.verifier_kv_tokens > 0
        self.loop, self.count, self.pool = get_new_event_loop(), 0, None
        threading.Thread(target=self.loop.run_forever, name="replica", daemon=True).start()
        settings = self.settings(options, "auto")
        tokenizer = load_tokenizer(settings.model)
        if verified:
            start_ray(argparse.Namespace(cpu=options.cpu))
            self.pool = self.run(self._pool(settings))  # the verifier starts while the engine does
        self.engine = self.built(settings)
        self.watched = Watched(self.engine)
        facts = getattr(self.engine, "facts", {})
        self.vocab = int(facts.get("vocab_size", 0)) or self.engine.model.config.vocab_size  # type: ignore[attr-defined]
        self.ready: dict[str, Any] = {"facts": facts, "engine_s": round(time.monotonic() - began, 1)}
        self.generators: dict[str, Generator] = {}
        self.stayed: list[list[Any]] = []
        if self.pool is not None:
            self.run(self._settled(self.pool))
            self.ready["verifier_s"] = round(time.monotonic() - began, 1)
            self.ready["fingerprint"] = self.pool.fingerprint
            for mode in self.modes:
                parts = (cast(Engine, self.watched), tokenizer, self.settings(options, mode), self.pool)
                self.generators[mode] = Generator(*parts)
            self.generators["auto"].ways.decide_best_effort = self._decided

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        """In the replica's event loop."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result()

    async def _pool(self, settings: Any) -> VerifierPool:
        pool = VerifierPool(settings, Metrics())
        pool.start()
        return pool

    async def _settled(self, pool: VerifierPool) -> None:
        async with asyncio.timeout(READY_S):
            await pool.settled()
        if not pool.ready:
            raise RuntimeError(pool.explain())

    async def flow(self, load: Load, mode: str, seed: str) -> dict[str, Any]:
        """One load in one mode; what still runs at its end is dropped. `warmed` is verify, with deterministic
        prompts in the engine's cache."""
        assert self.pool is not None
        generator, salt = self.generators["verify" if mode == "warmed" else mode], f"{mode}-{seed}"
        prompts = Prompts(load, seed, self.vocab, mode == "warmed")
        await asyncio.gather(*(self._warm(generator, prompt, salt) for prompt in prompts.all))
        before, preempted = await self._stats(), self.engine.load().preemptions
        self.watched.take()
        seen, source = Seen(Meter(load)), wanted(load, seed, self.vocab)
        spent = time.process_time()
        clients = [
            asyncio.create_task(self._client(generator, source, seen, salt, prompts))
            for _ in range(load.in_flight)
        ]
        plans = asyncio.create_task(self._plans(generator, told := list[list[Any]]()))
        try:
            done, _ = await asyncio.wait(clients, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
            for client in done:
                client.result()  # raises what it raised
            found = seen.found() | {"replica_cpu": (time.process_time() - spent) / load.seconds}
            after = await self._stats()
            found["verifier"] = {name: after[name] - before[name] for name in COUNTERS if name in after}
            found["engine_prompts"] = self.watched.take()
            found["engine_preemptions"] = self.engine.load().preemptions - preempted
            found["expected"] = generator.ways.expected(self.pool)
            found["plans"], found["stayed"] = told, self.stayed
            self.stayed = []
        finally:
            plans.cancel()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        left = await self._left()
        return found | {"quiet": not left, "left": left}

    async def _plans(self, generator: Generator, told: list[list[Any]]) -> None:
        """Every second: when, the plan, requests in progress, the tokens per second that the model expects of
        each plan, by what it is corrected, and what has changed of what the plan is made of."""
        began, ways, pool = time.monotonic(), generator.ways, self.pool
        before, last = ways.backoff.came_back, dict[str, Any]()
        assert pool is not None
        while not ways.pinned:
            await asyncio.sleep(PLANS_S)
            standing, rounds = ways._standing, ways._rounds
            count, at = ways.best_effort + len(ways.deterministic), time.monotonic() - began
            off = {plan: round(x, 3) for plan, x in standing._off.items()}
            expected = [round(count / x) for x in rounds] if rounds is not None else None
            seen = of_verifier(pool.load(None)) | of_engine(self.engine) | {
                "deterministic": len(ways.deterministic), "promised": ways.promises.total,
                "coming": ways.promises.coming, "came_back": ways.backoff.came_back - before,
                "kept": ways.backoff.holds(time.monotonic()), "tokens": ways.done.tokens,
                "ended": ways.done.ended, "returned": dict(ways.returns),
            }  # fmt: skip
            changed = {name: value for name, value in seen.items() if last.get(name) != value}
            told.append([round(at, 1), standing.plan, count, expected, off, changed])
            last = seen

    def _decided(self, request: Progress, load: Load_) -> Way:
        """As the policy decides; writes down why one stays although the plan is that all move."""
        way = choose_best_effort(request, load)
        if way == "verify" and load.moves and len(self.stayed) < STAYED:
            verifier, rounds = load.verifier, load.rounds
            assert verifier is not None
            of = [] if rounds is None else [round(1e3 * x, 2) for x in rounds]
            self.stayed.append([
                request.way, request.length, request.left, load.is_known, load.deterministic, of,
                verifier.direct, verifier.kv_free, round(load.promised), load.coming, load.prompt_row_s,
                verifier.prompt_row_s,
            ])  # fmt: skip
        return way

    async def _warm(self, generator: Generator, prompt: tuple[int, ...], salt: str) -> None:
        self.count += 1
        request = Request(f"{salt}-{self.count}", prompt, 1, seeded=False, cache_salt=salt)
        async with aclosing(generator.generate(request)) as deltas:
            async for _ in deltas:
                pass

    async def _client(
        self, generator: Generator, source: Iterator[Wanted], seen: Seen, salt: str, prompts: Prompts
    ) -> None:
        """One request after the other. The salt: another mode's run of the same prompts finds none of them in
        a cache."""
        while not seen.meter.over:
            one = next(source)
            self.count += 1
            seen.running[one.deterministic] += 1
            tokens, stats = list[int](), None
            with prompts.of(one) as (name, prompt, apart):
                request = Request(
                    f"{salt}-{self.count}", prompt, one.tokens, deterministic=one.deterministic, seeded=False,
                    cache_salt=salt + apart,
                )  # fmt: skip
                async with aclosing(generator.generate(request)) as deltas:
                    async for delta in deltas:
                        seen.meter.add(len(delta.token_ids), one.deterministic)
                        tokens += delta.token_ids
                        stats = delta.stats or stats
            seen.running[one.deterministic] -= 1
            seen.ended(name, one, tokens, stats)

    async def _stats(self) -> dict[str, Any]:
        assert self.pool is not None
        found: dict[str, Any] = await self.pool.ready[0].handle.stats.remote()
        return found

    async def _left(self) -> dict[str, int]:
        """Waits until nothing is left of a run; where that takes too long, what it is."""
        assert self.pool is not None
        end, busy = time.monotonic() + SETTLED_S, dict[str, int]()
        while time.monotonic() < end:
            load, stats = self.engine.load(), await self._stats()
            busy = {"engine running": load.running, "engine waiting": load.waiting}
            busy |= {"followed": self.pool.followed}
            busy |= {f"verifier {name}": int(stats[name]) for name in ("direct", "active", "waiting")}
            if not any(busy.values()):
                return {}
            await asyncio.sleep(0.02)
        return busy

    def close(self) -> None:
        """Ends the cluster, with the verifier, and the engine."""
        if self.pool is not None:
            import ray

            self.loop.call_soon_threadsafe(self.pool.close)
            ray.shutdown()
        self.engine.close()


def of_verifier(found: VerifierLoad | None) -> dict[str, Any]:
    """What the replica knows of its verifier."""
    return {} if found is None else {
        "direct": found.direct, "kv_free": found.kv_free, "places": found.places,
        "waited_s": round(found.waited_s, 3), "prompt_row_us": round(found.prompt_row_s * 1e6, 1),
        "decode_ms": in_ms(found.decode_steps.times),
    }  # fmt: skip


def of_engine(engine: Engine) -> dict[str, Any]:
    """The same of its own steps."""
    fast = engine.times.costs
    return {
        "engine": engine.load().running, "fast_row_us": round(fast.row_s * 1e6, 1),
        "fast_ms": in_ms(fast.times),
    }  # fmt: skip


def in_ms(times: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Requests, and the milliseconds of a step with so many."""
    return [[round(count), round(1e3 * seconds, 1)] for count, seconds in times]


class OurSide(Side):
    """Takes the orders: loads by the replica, steps by its engine alone."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(lambda: Adapted(replica.engine, replica.vocab))
        self.replica = replica
        self.ready |= replica.ready

    def flow(self, load: dict[str, Any], mode: str, seed: str) -> dict[str, Any]:
        """One load in one mode. One that fails is no reason to boot again."""
        try:
            found: dict[str, Any] = self.replica.run(self.replica.flow(load_of(load), mode, seed))
        except Exception as error:
            traceback.print_exc()
            return {"failed": repr(error)[:1000]}
        return found

    def close(self) -> dict[str, Any]:
        """Ends what it has started."""
        self.replica.close()
        return {"closed": True}
