"""The verifiers as a fast-path replica sees them: created if missing, watched, chosen per request.

Any replica may create or re-create an actor (`get_if_exists` makes that a race nobody loses), so there is no
supervisor whose death could matter. Calls are plain actor calls; the reply is an object ref, awaited.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from deployments.verifier_actor import VerifierActor, VerifierStatus
from kernels.linear import CUBLAS_ENVIRONMENT
from llm42.config import Settings
from llm42.fingerprint import code_hash
from llm42.metrics import VERIFIERS_READY, Metrics
from llm42.models.load import sampled_identity
from llm42.protocol import Commit, Failure, LLM42Error, VerifierUnavailable, Window

log = logging.getLogger(__name__)
NAMESPACE = "llm42"
WATCH_S = 1.0
LOOK_S = 1.0
STATUS_TIMEOUT_S = 5.0
MISSES_ALLOWED = 3
RETRY_PAUSE_S = 0.25
AVOID_S = 5.0
"""How long a verifier whose call failed is only a last resort."""
AFFINITY_TOKENS = 64
"""Requests that share this many first tokens prefer the same verifier, whose cache then holds them."""

Answer = Commit | Failure


@dataclass(slots=True)
class Member:
    """One verifier of the pool."""

    name: str
    handle: Any = None
    status: VerifierStatus | None = None
    in_flight: int = 0
    missed: int = 0
    """Status calls in a row without an answer."""
    avoid_until: float = 0.0
    """A verify call failed a moment ago: others are chosen first."""

    @property
    def ready(self) -> bool:
        """Whether it answered its last status call as certified."""
        return self.status is not None and self.status.state == "ready"


def actor_names(settings: Settings, model_identity: str) -> list[str]:
    """Names of the pool's actors; other settings of model or verifier, other model files or other code give
    other names, hence new actors: a new release never meets the verifiers of an old one."""
    sections = (settings.model, settings.verifier)
    key = json.dumps([code_hash(), model_identity, *(s.model_dump(mode="json") for s in sections)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    return [f"verifier-{digest}-{i}" for i in range(settings.server.verifiers)]


def get_or_create(name: str, settings: Settings, model_identity: str) -> Any:
    """The named actor's handle. Blocks for a call to the cluster's control store."""
    threads = str(settings.verifier.threads)
    env = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    options: dict[str, Any] = {"num_cpus": 0.1, "runtime_env": {"env_vars": env}}
    if settings.model.device == "cuda":
        env |= CUBLAS_ENVIRONMENT  # read when CUDA starts: it must be there before the actor is
        options["num_gpus"] = settings.verifier.gpus
    actor = ray.remote(VerifierActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=1000,
        **options,
    )
    return actor.remote(settings.model_dump(mode="json"), model_identity=model_identity)


class VerifierPool:
    """A `VerifierClient` over the actors. One per fast-path replica; belongs to its event loop."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._model_identity = sampled_identity(settings.model.path)
        self.members = [Member(name) for name in actor_names(settings, self._model_identity)]
        self._watcher: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins watching; verifiers that are missing are created."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stops watching; the actors live on until their lease ends."""
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def ready(self) -> list[Member]:
        """Certified members with one fingerprint: that of the first ready one. Others are left out."""
        members = [m for m in self.members if m.ready]
        return [m for m in members if m.status and m.status.fingerprint == self.fingerprint]

    @property
    def fingerprint(self) -> str | None:
        """What the pool answers with; None while no verifier is ready."""
        return next((m.status.fingerprint for m in self.members if m.ready and m.status), None)

    async def require_ready(self) -> None:
        """Raises VerifierUnavailable, with the reason, when no verifier can answer now.

        What the last look said may be a second old, so a refusal looks again first (all callers together).
        """
        if not self.ready and self.members:
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self._refresh_all())
            await asyncio.wait([self._look], timeout=LOOK_S)
        if not self.ready:
            raise VerifierUnavailable(self.explain())

    def explain(self) -> str:
        """Why deterministic requests cannot be served; empty when they can."""
        if self.ready:
            return ""
        if not self.members:
            return "Deterministic requests are switched off here (server.verifiers is 0)."
        reasons = {m.status.detail or m.status.state for m in self.members if m.status}
        return "No verifier is ready: " + ("; ".join(sorted(reasons)) or "not reachable") + "."

    async def verify(self, windows: Sequence[Window]) -> list[Answer]:
        """One try: commits (or final failures) in order. VerifierUnavailable or Overloaded may be retried.

        A verifier that died is replaced within seconds, so this waits for one to be ready; the caller bounds
        the wait (session.verify_timeout_s).
        """
        member = await self._ready_member(windows[0])
        member.in_flight += len(windows)
        began, answered = time.monotonic(), False
        try:
            answers: list[Answer] = await member.handle.verify.remote(list(windows))
            answered = True
            return answers
        except asyncio.CancelledError:
            # the client has gone, or nothing came in time; only the second is the verifier's doing
            answered = time.monotonic() - began < self._settings.session.verify_timeout_s - WATCH_S
            raise
        except RayActorError as error:
            member.status = None  # not chosen again until the watcher has heard from it
            raise VerifierUnavailable(f"{member.name}: {type(error).__name__}") from error
        except RayTaskError as error:
            if isinstance(error.cause, LLM42Error):
                raise error.cause from error
            raise
        finally:
            member.in_flight -= len(windows)
            if not answered:
                member.avoid_until = time.monotonic() + AVOID_S

    def release(self, request_id: str) -> None:
        """Tells the verifiers that a request is over; nothing waits for it."""
        for member in self.ready:
            member.handle.release.remote(request_id)

    async def _ready_member(self, window: Window) -> Member:
        while (member := self._choose(window)) is None:
            if all(m.status is not None and m.status.state == "failed" for m in self.members):
                raise VerifierUnavailable(self.explain())
            await asyncio.sleep(RETRY_PAUSE_S)
        return member

    def _choose(self, window: Window) -> Member | None:
        """Prefix affinity by rendezvous hashing, unless the preferred one has clearly more to do."""
        now, candidates = time.monotonic(), self.ready
        if not candidates:
            return None
        candidates = [m for m in candidates if m.avoid_until <= now] or candidates
        prefix = repr(window.tokens[: min(window.prompt_len, AFFINITY_TOKENS)]).encode()
        preferred = max(candidates, key=lambda m: hashlib.blake2b(prefix, key=m.name.encode()).digest())
        idlest = min(candidates, key=lambda m: m.in_flight)
        return idlest if preferred.in_flight > 2 * idlest.in_flight + 4 else preferred

    async def _watch(self) -> None:
        while True:
            try:
                await self._refresh_all()
                self._metrics.set(VERIFIERS_READY, len(self.ready))
            except Exception:  # whatever it is, watching must go on
                log.exception("a look at the verifiers failed")
            await asyncio.sleep(WATCH_S)

    async def _refresh_all(self) -> None:
        await asyncio.gather(*(self._refresh(m) for m in self.members))

    async def _refresh(self, member: Member) -> None:
        """One status call; a member that has died is created anew."""
        try:
            if member.handle is None:
                member.handle = await asyncio.to_thread(
                    get_or_create, member.name, self._settings, self._model_identity
                )
            member.status = await asyncio.wait_for(member.handle.status.remote(), STATUS_TIMEOUT_S)
            member.missed = 0
        except TimeoutError:
            member.missed += 1  # busy, perhaps: not a reason to turn requests away at once
            if member.missed >= MISSES_ALLOWED:
                log.warning("%s has not answered %d times", member.name, member.missed)
                member.status = None
        except ActorDiedError as error:
            log.warning("%s has died and is created again: %s", member.name, error)
            member.handle = member.status = None
        except Exception as error:
            log.warning("%s does not answer: %s", member.name, error)
            member.status = None
