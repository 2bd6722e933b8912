"""The verifier as a plain Ray actor: named, detached, shared by fast-path replicas, ended by its lease."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import ray

from llm42.config import Settings
from llm42.errors import ModelFileError, VerifierUnavailable
from llm42.fingerprint.environment import UnsteadyKernels
from llm42.host.garbage import keep_what_is_there
from llm42.protocol import Commit, Failure, Window, across_releases
from llm42.step_times import NOTHING, Costs
from llm42.telemetry.logs import configure, event
from llm42.telemetry.metrics import VERIFIER_TASKS, Scope
from llm42.telemetry.request_metrics import VerifierReport
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.known_answers import golden_answers
from llm42.verifier.scheduler import Verifier
from llm42_serve.ray_metrics import actor_metrics
from llm42_serve.verifiers.load import StepTime
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Down, Up

log = logging.getLogger(__name__)
STALLED_S = 120.0
"""A step that has been running for this long will not end any more."""
REPORT_S = 1.0
LOOK_S = 1.0
"""Between two looks whether it is lost or over."""
DRAIN_S = 600.0
"""For so long after its lease a verifier goes on with what it has been asked for."""
RETRY_S, RETRY_MAX_S = 5.0, 60.0
"""Pause before the first and between the later tries of a start that failed."""

State = Literal["starting", "ready", "failed", "mixed"]


@across_releases
@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """What an actor says of itself. `detail`: what it is doing, or why certification failed."""

    state: State
    fingerprint: str | None = None
    detail: str = ""
    pid: int = 0
    windows: int = 0
    """Answered since the start."""
    queue_s: float = 0.0
    """Seconds that those windows waited, summed."""
    waiting: int = 0
    active: int = 0
    node: str = ""
    """Ray's id of the node it runs on."""
    request: Mapping[str, Any] | None = None
    """What its manifest says of the request side (llm42/fingerprint/request.py), when it is ready."""
    kv_tokens: int = 0
    """Its KV cache, in tokens, when it is ready; 0 of a release that did not say."""
    direct: int = 0
    """Requests that it decodes by itself, those too that wait for KV or for their prompt's rows."""
    places: int = 0
    """Rows of its largest step; 0 of a release that did not say."""
    kv_used: int = 0
    """KV that cannot be evicted, in tokens."""
    step_s: float = 0.0
    """Mean seconds of its steps since the last call in which requests were decoded."""
    waited_s: float = 0.0
    """How long windows have waited of late."""
    decode_steps: Costs = NOTHING
    """How long its steps take in which requests are decoded, by how many these are."""
    window_steps: Costs = NOTHING
    """How long the others take, by their rows."""
    yielding: int = 0
    """Of `direct`, those that give way to others."""
    yielding_kv: int = 0
    """What these hold of the KV, in tokens."""


def node_id() -> str:
    """Ray's id of this process's node; empty outside of Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def _lost(verifier: Verifier) -> str:
    """Why it will never answer again; empty while it may."""
    if not verifier.alive:
        return "the verifier's loop has ended"
    if verifier.stalled_s > STALLED_S:
        return f"a step has been running for {verifier.stalled_s:.0f} s"
    return ""


class VerifierActor:
    """Certifies in the background: creating it never blocks, and a failure can be read instead of looping.

    When nobody has asked how it is for `lease_s` it ends itself, with the work that it still has or DRAIN_S
    later: nothing is left on a device after the application has been deleted."""

    def __init__(
        self, settings: dict[str, Any], lease_s: float | None = None, model_identity: str | None = None
    ) -> None:
        self._settings = Settings.load(settings)
        self._lease_s = lease_s or self._settings.watch.lease_s
        self._model_identity = model_identity
        self._verifier: Verifier | None = None
        self._boxes: Outboxes | None = None
        self._failure, self._doing, self._step_time = "", "loading the model", StepTime()
        self._renewed = self._worked = time.monotonic()
        self._idle_looks = 0
        configure(self._settings.telemetry, "verifier")
        self._name = (ray.is_initialized() and ray.get_runtime_context().get_actor_name()) or "unnamed"
        event(log, "verifier starts", verifier=self._name, pid=os.getpid(), node=node_id())
        loop = asyncio.get_event_loop()
        self._tasks = [loop.create_task(self._start()), loop.create_task(self._expire())]

    async def _start(self) -> None:
        """Builds the verifier; a failure that may pass (files not there yet, no memory) is tried again."""
        pause, began = RETRY_S, time.monotonic()
        while self._verifier is None:
            try:
                self._verifier = await asyncio.to_thread(self._build)
                self._failure = ""
                seconds = round(time.monotonic() - began, 1)
                name = self._verifier.fingerprint
                event(log, "verifier is ready", verifier=self._name, fingerprint=name, seconds=seconds)
                self._tasks.append(asyncio.get_running_loop().create_task(self._report(self._verifier)))
            except (CertificationFailed, UnsteadyKernels) as error:
                log.exception("certification failed")
                self._failure = f"{type(error).__name__}: {error}"
                return
            except Exception as error:
                log.exception("the verifier could not start; next try in %.0f s", pause)
                self._failure = f"{type(error).__name__}: {error} (next try in {pause:.0f} s)"
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MAX_S)

    def _build(self) -> Verifier:
        from llm42.checkpoint.load import load_for, sampled_identity
        from llm42.verifier.build import build_verifier, certificate_for

        found = sampled_identity(self._settings.model.path)
        if self._model_identity not in (None, found):
            raise ModelFileError(
                f"{self._settings.model.path} has changed since the replicas were started: deploy again"
            )
        model, tokenizer = load_for(self._settings)
        began = time.monotonic()
        certificate = certificate_for(self._settings, model, tokenizer, progress=self._certifying)
        seconds = round(time.monotonic() - began, 1)
        event(log, "verifier has certified", verifier=self._name, seconds=seconds, kept=certificate.cached)
        verifier = build_verifier(self._settings, model, tokenizer, certificate, self._certifying).start()
        keep_what_is_there()
        return verifier

    def _certifying(self, operator: str) -> None:
        self._doing = f"certifying {operator}"

    async def _report(self, verifier: Verifier) -> None:
        metrics = actor_metrics(Scope.VERIFIER, model=self._settings.model.name, verifier=self._name)
        report = VerifierReport(verifier, self._settings, metrics)
        while True:
            report.report()
            metrics.set(VERIFIER_TASKS, len(asyncio.all_tasks()))
            await asyncio.sleep(REPORT_S)

    async def _expire(self) -> None:
        pause_s = min(LOOK_S, self._lease_s / 10)
        while not self._over(2 * pause_s):
            await asyncio.sleep(pause_s)
            if self._verifier is not None and (lost := _lost(self._verifier)):
                log.error("%s: the process ends, so that Ray starts it anew", lost)
                os._exit(1)
        log.warning("no fast-path replica has asked for %.0f s: the verifier ends itself", self._lease_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _over(self, taken_s: float) -> bool:
        """Whether it may end: nobody asks for it, and what it was asked for has been answered. taken_s: how
        long the last answers may take to be fetched. Without their replica, requests run out of credit."""
        now, verifier = time.monotonic(), self._verifier
        if verifier is not None and (stats := verifier.stats()).direct + stats.active + stats.waiting:
            self._worked, self._idle_looks = now, 0
        else:
            self._idle_looks += 1
        # two looks: between them this loop has run, so that it could give the last answers
        quiet = self._idle_looks > 1 and now - self._worked >= taken_s
        drained = quiet or now - self._renewed >= self._lease_s + DRAIN_S
        return drained and now - self._renewed >= self._lease_s

    async def status(self) -> VerifierStatus:
        """The state; asking renews the lease."""
        self._renewed = time.monotonic()
        if self._verifier is None:
            state: State = "failed" if self._failure else "starting"
            doing = self._failure or self._doing
            return VerifierStatus(state, None, doing, os.getpid(), node=node_id())
        if lost := _lost(self._verifier):
            return VerifierStatus("failed", None, lost, os.getpid(), node=node_id())
        self._verifier.forget_idle(self._settings.verifier.idle_s)
        if self._boxes is not None:
            self._boxes.forget_silent(self._settings.verifier.idle_s)
        stats, name = self._verifier.stats(), self._verifier.fingerprint
        counters = (stats.windows, stats.queue_s, stats.waiting, stats.active, node_id())
        facts, load = self._verifier.manifest.get("request"), self._verifier.load()
        return VerifierStatus(
            "ready",
            name,
            "",
            os.getpid(),
            *counters,
            facts,
            self._verifier.kv_tokens,
            stats.direct,
            self._verifier.places,
            self._verifier.kv_used_tokens,
            self._step_time.mean_s(stats.decode_steps, stats.decode_s, self._verifier.stalled_s),
            load.waited_s,
            load.decode_steps,
            load.window_steps,
            stats.yielding,
            stats.yielding_kv,
        )

    async def verify_cold(self, windows: list[Window]) -> list[Commit | Failure]:
        """Answers in order, everything computed anew (audits). Pure, so a caller may repeat it. Raises
        VerifierUnavailable or Overloaded."""
        return await self._ready().verify(windows, cold=True)

    async def exchange(self, up: Up) -> Down:
        """A replica's call about its requests; answered when something is due. Raises VerifierUnavailable."""
        if self._boxes is None:
            self._boxes = Outboxes(self._ready())
        return await self._boxes.exchange(up)

    async def self_test(self) -> bool:
        """Whether the known answers that the fingerprint names are still what is computed."""
        verifier = self._ready()
        return bool(await golden_answers(verifier) == verifier.manifest["golden"])

    def _ready(self) -> Verifier:
        if self._verifier is None:
            raise VerifierUnavailable(self._failure or "the verifier is still certifying this machine")
        return self._verifier

    async def manifest(self) -> dict[str, Any]:
        """What the fingerprint hashes; empty while there is none."""
        return dict(self._verifier.manifest) if self._verifier else {}

    async def stats(self) -> dict[str, Any]:
        """The verifier's counters."""
        return asdict(self._verifier.stats()) if self._verifier else {}
