"""The fast-path deployment: one engine, one decode-verify-rollback session per deterministic request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray import serve

from deployments.admission import Admission
from deployments.deltas import coalesce
from deployments.errors import ServiceUnavailable
from deployments.failover import as_loss
from deployments.http_app import Status
from deployments.ray_metrics import RayMetrics
from deployments.verifier_actor import node_id
from deployments.verifier_pool import VerifierPool
from llm42 import metrics as m
from llm42.config import Settings, engine_threads
from llm42.logs import configure
from llm42.protocol import Commit, Delta, Failure, LLM42Error, Request, VerifierUnavailable, Window
from llm42.tracing import make_tracer

REPORT_S = 1.0


def admission_for(settings: Settings) -> Admission:
    """As many places as the engine decodes together; the rest waits outside of it, by class."""
    engine, server = settings.engine, settings.server
    places = engine.vllm.max_num_seqs if engine.kind == "vllm" else engine.max_batch
    return Admission(places, server.max_queued, server.deterministic_share, settings.verifier.target_queue_s)


def devices_of(settings: Settings) -> float:
    """GPUs that a replica holds; without one, CPU threads of its engine."""
    if settings.model.device == "cpu":
        return engine_threads(settings.engine)
    parallel = settings.engine.vllm.tensor_parallel_size if settings.engine.kind == "vllm" else 1
    return parallel * settings.engine.gpus


class FastPath:
    """Owns an engine. Its health is its own engine's: verifiers may come and go without a restart here."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        self._settings = Settings.load(settings)
        telemetry, model = self._settings.telemetry, self._settings.model
        configure(telemetry, "fastpath")
        self._tracer = make_tracer(telemetry, "fastpath")
        self._metrics = RayMetrics([m.Scope.REPLICA], in_replica=True, model=model.name)
        self._replica, self._served = serve.get_replica_context().replica_tag, 0
        self._admission = admission_for(self._settings)
        self._pool = VerifierPool(self._settings, self._metrics, self._admission.observe)
        self._pool.start()  # verifiers certify while the model loads
        self._engine, self._generator = await asyncio.to_thread(self._build)
        if self._settings.server.ready_when == "certified":
            await self._pool.settled()
        self._reporter = asyncio.get_running_loop().create_task(self._report())

    def _build(self) -> tuple[Any, Any]:
        from llm42.driver import Generator
        from llm42.engine.build import build_engine
        from llm42.models.description import load_tokenizer

        tokenizer, engine = load_tokenizer(self._settings.model), build_engine(self._settings)
        parts = (self._settings, self._pool, self._metrics, self._tracer)
        return engine, Generator(engine, tokenizer, *parts)

    async def generate(
        self, request: Request, tokenizer: str | None = None, again: bool = False
    ) -> AsyncGenerator[Delta | LLM42Error, None]:
        """Streams a request's deltas; closing or cancelling the stream aborts the request.

        tokenizer: identity of the one that encoded the prompt. again: for the router, which then looks for
        room instead of a cached prefix. Typed errors are the last item instead of
        being raised: so they keep their type through Serve.
        """
        try:
            self._require_tokenizer(tokenizer)
            if request.deterministic:
                await self._pool.require_ready()
            async with self._admission.place(request.deterministic), aclosing(self._run(request)) as deltas:
                async for delta in deltas:
                    yield delta
            self._served += 1
        except LLM42Error as error:
            yield as_loss(error, self._engine.alive)

    async def _run(self, request: Request) -> AsyncGenerator[Delta, None]:
        source: AsyncGenerator[Delta, None] = self._generator.generate(request)
        if request.stop and not request.deterministic:  # the others' tokens come joined already
            source = coalesce(source, self._generator.pause_s(request))
        first = True
        async with aclosing(source) as deltas:
            async for delta in deltas:
                if first or delta.finish_reason is not None:
                    verifier = self._pool.asked(request.request_id)
                    delta = replace(delta, replica=self._replica, verifier=verifier)
                    first = False
                yield delta

    async def fingerprint(self) -> tuple[str, dict[str, Any]] | LLM42Error:
        """The verifiers' fingerprint and manifest; typed errors are returned, as in `generate`."""
        try:
            return await self._pool.manifest()
        except LLM42Error as error:
            return error

    async def replay(self, windows: list[Window]) -> list[Commit | Failure] | LLM42Error:
        """Audited windows, computed by a verifier without its cache."""
        limit = self._settings.session.verify_timeout_s
        try:
            await self._pool.require_ready()
            return await asyncio.wait_for(self._pool.verify(windows, cold=True), limit)
        except LLM42Error as error:
            return error
        except TimeoutError:
            return VerifierUnavailable(f"no answer from the verifier in {limit:g} s")

    def _require_tokenizer(self, identity: str | None) -> None:
        """Ids mean something only to the tokenizer that made them, which the fingerprint names."""
        if identity not in (None, self._generator.tokenizer.identity):
            raise ServiceUnavailable(
                "The ingress and this replica were started with different tokenizer files: deploy anew."
            )

    async def status(self) -> Status:
        """For /health: never waits for the engine or a verifier."""
        load, members = self._engine.load(), self._pool.members
        return Status(
            serving=self._engine.alive,
            replica=self._replica,
            node=node_id(),
            served=self._served,
            verifiers_ready=len(self._pool.ready),
            verifiers=len(members),
            fingerprint=self._pool.fingerprint,
            detail=self._pool.explain(),
            running=load.running,
            waiting=load.waiting,
            queued=sum(len(c.waiting) for c in self._admission.classes.values()),
            kv_used=load.kv_used,
            kv_total=load.kv_total,
            verifier_states=tuple(x.status.state if x.status else "unreachable" for x in members),
        )

    async def check_health(self) -> None:
        """Serve replaces this replica when its engine's loop has ended."""
        if not self._engine.alive:
            raise RuntimeError("the engine's loop has ended")

    async def _report(self) -> None:
        preempted, devices = 0, devices_of(self._settings)
        while True:
            load = self._engine.load()
            self._metrics.set(m.KV_USED, load.kv_used)
            self._metrics.set(m.KV_TOTAL, load.kv_total)
            self._metrics.set(m.FASTPATH_DEVICES, devices)
            self._metrics.inc(m.PREEMPTIONS, load.preemptions - preempted)
            preempted = load.preemptions
            self._metrics.set(m.WAITING, load.waiting)
            self._metrics.set(m.ADMITTED_LIMIT, self._admission.deterministic_limit)
            for deterministic, mode in zip((True, False), m.MODES, strict=True):
                mine = self._admission.classes[deterministic]
                self._metrics.set(m.RUNNING, mine.running, mode=mode)
                self._metrics.set(m.QUEUED, len(mine.waiting), mode=mode)
            await asyncio.sleep(REPORT_S)

    async def __del__(self) -> None:
        self._pool.close()
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._tracer.close)
