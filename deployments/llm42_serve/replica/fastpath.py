"""The fast-path deployment: one engine, one decode-verify-rollback session per deterministic request. In the
canonical layout it has no engine: verifiers decode what it is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray import serve

from llm42.api.backend import Status
from llm42.api.deltas import coalesce
from llm42.config import Settings
from llm42.engine.base import EngineLoad
from llm42.errors import LLM42Error, VerifierUnavailable, VersionSkew
from llm42.fingerprint.request import request_facts
from llm42.fingerprint.skew import Facts, require_agreement
from llm42.host.garbage import keep_what_is_there
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.telemetry import metrics as m
from llm42.telemetry.logs import configure
from llm42.telemetry.request_metrics import mode_of
from llm42.telemetry.tracing import make_tracer
from llm42_serve.ingress.failover import as_loss
from llm42_serve.ray_metrics import RayMetrics
from llm42_serve.replica.admission import Admission
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import node_id

REPORT_S = 1.0


def admission_for(settings: Settings) -> Admission:
    """As many places as are decoded together; the rest waits outside, by class."""
    engine, server, queue_s = settings.engine, settings.server, settings.verifier.target_queue_s
    limits = (server.max_queued, server.deterministic_share, queue_s)
    return Admission(engine.places, *limits, all_verified=not engine.decodes)


class FastPath:
    """Owns an engine. Its health is its own engine's: verifiers may come and go without a restart here."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        self._settings = Settings.load(settings)
        telemetry, model = self._settings.telemetry, self._settings.model
        configure(telemetry, "fastpath")
        self._tracer = make_tracer(telemetry, "fastpath")
        self._metrics = RayMetrics(m.Scope.REPLICA, in_replica=True, model=model.name)
        self._replica, self._served = serve.get_replica_context().replica_tag, 0
        self._admission = admission_for(self._settings)
        admission = self._admission
        self._pool = VerifierPool(self._settings, self._metrics, admission.observe, admission.look)
        self._pool.start()  # verifiers certify while the model loads
        self._engine, self._generator = await asyncio.to_thread(self._build)
        self._facts = request_facts(self._settings, self._generator.tokenizer)
        await self._pool.introduced()  # else it refuses what the replica before it was answering
        if self._settings.server.ready_when == "certified":
            await self._pool.settled()
        self._reporter = asyncio.get_running_loop().create_task(self._report())

    def _build(self) -> tuple[Any, Any]:
        from llm42.checkpoint.description import load_tokenizer
        from llm42.engine.build import build_engine
        from llm42.session.driver import Generator

        tokenizer, engine = load_tokenizer(self._settings.model), build_engine(self._settings)
        parts = (self._settings, self._pool, self._metrics, self._tracer)
        generator = Generator(engine, tokenizer, *parts)
        keep_what_is_there()
        return engine, generator

    async def generate(
        self, request: Request, facts: Facts | None = None, again: bool = False
    ) -> AsyncGenerator[Delta | LLM42Error, None]:
        """Streams a request's deltas; closing or cancelling the stream aborts the request.

        facts: of the process that made the request (llm42/fingerprint/request.py). again: for the router,
        which then looks for room instead of a cached prefix. Typed errors are the last item instead of being
        raised: so they keep their type through Serve.
        """
        try:
            if request.deterministic or not self._settings.engine.decodes:
                await self._pool.require_ready()
            if request.deterministic:
                agreed = self._agreed(facts)  # should other verifiers take over: they were not compared
                request = replace(request, fingerprint=request.fingerprint or agreed)
            place, first, arrived = self._admission.place(request.deterministic), True, time.monotonic()
            async with place, aclosing(self._deltas(request)) as deltas:
                waited_s = time.monotonic() - arrived
                self._metrics.observe(m.QUEUE_SECONDS, waited_s, mode=mode_of(request))
                async for delta in deltas:
                    if first or delta.finish_reason is not None:
                        delta, first = self._signed(request.request_id, delta), False
                    yield delta
            self._served += 1
        except LLM42Error as error:
            yield as_loss(error, self._engine.alive)
        finally:
            self._pool.forget(request.request_id)

    def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        source: AsyncGenerator[Delta, None] = self._generator.generate(request)
        settings = self._settings
        may_move = settings.session.mode == "auto" and not request.stream
        if request.deterministic:
            joins = not request.stream  # whoever reads along gets what is committed at once
        else:  # the others' tokens come joined already, unless a verifier may decode them
            joins = bool(request.stop) or not settings.engine.decodes or may_move
        return coalesce(source, self._generator.pause_s(request)) if joins else source

    def _signed(self, request_id: str, delta: Delta) -> Delta:
        """With who has computed it."""
        return replace(delta, replica=self._replica, verifier=self._pool.asked(request_id))

    async def fingerprint(self, facts: Facts | None = None) -> tuple[str, dict[str, Any]] | LLM42Error:
        """The verifiers' fingerprint and manifest; typed errors are returned, as in `generate`. facts: of who
        is going to make requests under it; None: they are only to be shown."""
        try:
            name, manifest = await self._pool.manifest()
            if facts is not None:
                require_agreement(manifest.get("request"), self._sides(facts))
            return name, manifest
        except LLM42Error as error:
            return error

    async def verify_cold(
        self, windows: list[Window], facts: Facts | None = None
    ) -> list[Commit | Failure] | LLM42Error:
        """Audited windows, computed by a verifier without its cache. facts: of who made them."""
        limit = self._settings.session.verify_timeout_s
        try:
            await self._pool.require_ready()
            self._agreed(facts)
            return await asyncio.wait_for(self._pool.verify_cold(windows), limit)
        except LLM42Error as error:
            return error
        except TimeoutError:
            return VerifierUnavailable(f"no answer from the verifier in {limit:g} s: send the request again")

    def _sides(self, facts: Facts | None) -> dict[str, Facts | None]:
        """Who contributes to an answer beside the verifiers."""
        return {"ingress": facts, "replica": self._facts}

    def _agreed(self, facts: Facts | None) -> str | None:
        """The fingerprint of the verifiers that are ready, if their manifest names what both sides make of a
        request. Raises VersionSkew, or VerifierUnavailable."""
        status = self._pool.ready[0].status if self._pool.ready else None
        if status is None:
            raise VerifierUnavailable(self._pool.explain())
        require_agreement(status.request, self._sides(facts))
        return status.fingerprint

    async def status(self, facts: Facts | None = None) -> Status:
        """For /health: never waits for the engine or a verifier. facts: of who asks."""
        load, members, skew = self._load(), self._pool.members, ""
        try:
            if self._pool.ready:
                self._agreed(facts)
        except VersionSkew as error:
            skew = str(error)
        return Status(
            serving=self._engine.alive and (self._settings.engine.decodes or bool(self._pool.ready)),
            replica=self._replica,
            node=node_id(),
            served=self._served,
            verifiers_ready=len(self._pool.ready),
            verifiers=len(members),
            fingerprint=self._pool.fingerprint,
            detail=self._pool.explain() or skew,
            skew=bool(skew),
            rollbacks_expected=getattr(self._engine, "facts", {}).get("rollbacks_expected", ""),
            running=load.running,
            waiting=load.waiting,
            queued=sum(len(c.waiting) for c in self._admission.classes.values()),
            kv_used=load.kv_used,
            kv_total=load.kv_total,
            verifier_states=tuple(x.status.state if x.status else "unreachable" for x in members),
        )

    async def near_status(self) -> Status:
        """For a gateway that looks at this machine (/metrics). Running is who has a place and does not wait
        for the engine; the KV is that of who decodes."""
        status, admitted = await self.status(), sum(c.running for c in self._admission.classes.values())
        running = max(0, admitted - status.waiting)
        if self._settings.engine.decodes:
            return replace(status, running=running)
        work = [member.status for member in self._pool.ready if member.status is not None]
        used, total = sum(w.kv_used for w in work), sum(w.kv_tokens for w in work)
        return replace(status, running=running, kv_used=used, kv_total=total)

    def _load(self) -> EngineLoad:
        """What is being decoded for this replica. KV that is not an engine's is the verifiers' to report."""
        if self._settings.engine.decodes:
            found: EngineLoad = self._engine.load()
            return found
        return EngineLoad(self._pool.followed, 0, 0, 0)

    async def check_health(self) -> None:
        """Raises RuntimeError when the engine's loop has ended: then Serve replaces this replica."""
        if not self._engine.alive:
            raise RuntimeError("the engine's loop has ended")

    async def _report(self) -> None:
        engine, cpu = self._settings.engine, self._settings.model.device == "cpu"
        preempted, devices = 0, engine.thread_count if cpu else engine.gpus_per_replica * engine.gpus
        while True:
            load = self._load()
            self._metrics.set(m.KV_USED, load.kv_used)
            self._metrics.set(m.KV_TOTAL, load.kv_total)
            self._metrics.set(m.FASTPATH_DEVICES, devices)
            self._metrics.set(m.REPLICA_TASKS, len(asyncio.all_tasks()))
            self._metrics.inc(m.PREEMPTIONS, load.preemptions - preempted)
            preempted = load.preemptions
            self._metrics.set(m.WAITING, load.waiting)
            self._metrics.set(m.ADMITTED_LIMIT, self._admission.limit)
            for way, expected in self._generator.ways.expected(self._pool).items():
                self._metrics.set(m.WAY_EXPECTED, expected, way=way)
            for deterministic, mode in zip((True, False), m.MODES, strict=True):
                mine = self._admission.classes[deterministic]
                self._metrics.set(m.RUNNING, mine.running, mode=mode)
                self._metrics.set(m.QUEUED, len(mine.waiting), mode=mode)
            await asyncio.sleep(REPORT_S)

    async def __del__(self) -> None:
        self._pool.close()
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._tracer.close)
