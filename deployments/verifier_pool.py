"""The verifiers as a fast-path replica sees them: who is there, whom to ask, what a failing call becomes.

The supervisor (supervisor.py) says who is there; a replica that cannot reach it creates it anew and goes on
with the members it knows. Calls are plain actor calls; the reply is an object ref, awaited.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from deployments.actors import get_actor, get_or_create_supervisor
from deployments.audit import Auditor
from deployments.supervisor import MemberInfo, Membership
from deployments.verifier_actor import VerifierStatus
from llm42.config import Settings
from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.metrics import VERIFIERS_READY, Metrics
from llm42.models.load import sampled_identity
from llm42.protocol import Commit, Failure, LLM42Error, VerifierUnavailable, Window

log = logging.getLogger(__name__)
WATCH_S = 0.5
LOOK_S = 1.0
MEMBERSHIP_TIMEOUT_S = 3.0
MISSES_ALLOWED = 3
"""Membership calls in a row that a supervisor may leave unanswered before another one is created."""
RETRY_PAUSE_S = 0.1
AVOID_S = 5.0
"""How long a verifier whose call failed is only a last resort."""
AFFINITY_TOKENS = 64
"""Requests that share this many first tokens prefer the same verifier, whose cache then holds them."""

Answer = Commit | Failure


@dataclass(slots=True)
class Member:
    """One verifier of the pool."""

    name: str
    actor_id: str = ""
    handle: Any = None
    status: VerifierStatus | None = None
    in_flight: int = 0
    avoid_until: float = 0.0
    """A verify call failed a moment ago: others are chosen first."""

    @property
    def ready(self) -> bool:
        """Whether it can be asked: certified, with the pool's fingerprint, and its handle is known."""
        return self.status is not None and self.status.state == "ready" and self.handle is not None


class VerifierPool:
    """A `VerifierClient` over the actors. One per fast-path replica; belongs to its event loop."""

    def __init__(
        self, settings: Settings, metrics: Metrics, observe: Callable[[float], None] = lambda _: None
    ) -> None:
        """observe: is told how long each committed window waited for its verifier, in seconds."""
        self._settings, self._metrics, self._observe = settings, metrics, observe
        self._model_identity = sampled_identity(settings.model.path)
        self.members: list[Member] = []
        self.fingerprint: str | None = None
        self._supervisor: Any = None
        self._missed = 0
        self._asked: dict[str, str] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None
        log_values = settings.telemetry.log_prompts
        self._auditor = Auditor(self, settings.verifier.audit_share, metrics, log_values)

    def start(self) -> None:
        """Begins watching; a supervisor that is missing is created."""
        if self._settings.server.verifiers > 0:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stops watching; the actors live on until their leases end."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._auditor.close()

    @property
    def ready(self) -> list[Member]:
        """Members that can be asked."""
        return [m for m in self.members if m.ready]

    async def require_ready(self) -> None:
        """Raises VerifierUnavailable, with the reason, when no verifier can answer now.

        What the last look said may be old, so a refusal looks again first (all callers together).
        """
        if not self.ready and self._settings.server.verifiers > 0:
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self.refresh())
            await asyncio.wait([self._look], timeout=LOOK_S)
        if not self.ready:
            raise VerifierUnavailable(self.explain())

    async def settled(self) -> bool:
        """Waits until a verifier is ready, or every one has failed for now; whether one is ready."""
        while self._settings.server.verifiers > 0:
            states = [m.status.state if m.status else "unknown" for m in self.members]
            if self.ready or (states and all(state == "failed" for state in states)):
                break
            await asyncio.sleep(RETRY_PAUSE_S)
        return bool(self.ready)

    def explain(self) -> str:
        """Why deterministic requests cannot be served; empty when they can."""
        if self.ready:
            return ""
        if self._settings.server.verifiers == 0:
            return "Deterministic requests are switched off here (server.verifiers is 0)."
        reasons = {m.status.detail or m.status.state for m in self.members if m.status}
        return "No verifier is ready: " + ("; ".join(sorted(reasons)) or "not reachable") + "."

    async def verify(self, windows: Sequence[Window], cold: bool = False) -> list[Answer]:
        """One try: commits (or final failures) in order. VerifierUnavailable or Overloaded may be retried.
        cold: for replays of stored answers; computed without the cache.

        A verifier that died is replaced within seconds, so this waits for one to be ready; the caller bounds
        the wait (session.verify_timeout_s).
        """
        member = await self._ready_member(windows[0])
        member.in_flight += len(windows)
        if not cold:
            self._asked.update(dict.fromkeys((w.request_id for w in windows), member.name))
        began, answered = time.monotonic(), False
        try:
            answers: list[Answer] = await member.handle.verify.remote(list(windows), cold)
            answered = True
        except asyncio.CancelledError:
            # the client has gone, or nothing came in time; only the second is the verifier's doing
            answered = time.monotonic() - began < self._settings.session.verify_timeout_s - 1.0
            raise
        except RayActorError as error:
            member.status = None  # not chosen again until the supervisor has heard from it
            raise VerifierUnavailable(f"{member.name}: {type(error).__name__}") from error
        except RayTaskError as error:
            if isinstance(error.cause, LLM42Error):
                raise error.cause from error
            raise
        except RayError as error:  # the cluster's trouble, not the window's
            raise VerifierUnavailable(f"{member.name}: {type(error).__name__}") from error
        finally:
            member.in_flight -= len(windows)
            if not answered:
                member.avoid_until = time.monotonic() + AVOID_S
        if cold:
            return answers
        for answer in answers:
            if isinstance(answer, Commit):
                self._observe(answer.timings.queue_s)
        self._auditor.consider(member, windows, answers)
        return answers

    def release(self, request_id: str) -> None:
        """Tells the verifiers that a request is over; nothing waits for it."""
        self._asked.pop(request_id, None)
        for member in self.ready:
            member.handle.release.remote(request_id)

    def asked(self, request_id: str) -> str:
        """The verifier that was asked last for a request that is not over; empty when none was."""
        return self._asked.get(request_id, "")

    async def manifest(self) -> tuple[str, dict[str, Any]]:
        """The pool's fingerprint, and what it hashes. Raises VerifierUnavailable."""
        await self.require_ready()
        member = self.ready[0]
        try:
            found = await asyncio.wait_for(member.handle.manifest.remote(), MEMBERSHIP_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            raise VerifierUnavailable(f"{member.name}: {type(error).__name__}") from error
        return fingerprint_of(found), found

    async def condemn(self, member: Member, reason: str) -> None:
        """Has the supervisor remove a verifier that was found to be wrong; from now on it is not asked."""
        member.status = None
        if self._supervisor is not None:
            await self._supervisor.condemn.remote(member.name, member.actor_id, reason)

    async def _ready_member(self, window: Window) -> Member:
        while (member := self._choose(window)) is None:
            if self.members and all(
                m.status is not None and m.status.state == "failed" for m in self.members
            ):
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
                await self.refresh()
                self._metrics.set(VERIFIERS_READY, len(self.ready))
            except Exception:  # whatever it is, watching must go on
                log.exception("a look at the verifiers failed")
            await asyncio.sleep(WATCH_S)

    async def refresh(self) -> None:
        """Asks the supervisor who is there; one that has died is created anew."""
        try:
            if self._supervisor is None:
                self._supervisor = await asyncio.to_thread(
                    get_or_create_supervisor, self._settings, self._model_identity
                )
            call = self._supervisor.membership.remote()
            membership: Membership = await asyncio.wait_for(call, MEMBERSHIP_TIMEOUT_S)
            self._missed = 0
        except TimeoutError:
            self._missed += 1
            if self._missed >= MISSES_ALLOWED:
                self._supervisor, self._missed = None, 0
            return
        except ActorDiedError:
            self._supervisor = None
            return
        except RayActorError as error:
            log.warning("the supervisor does not answer: %s", type(error).__name__)
            return
        self.fingerprint = membership.fingerprint
        known = {m.name: m for m in self.members}
        self.members = [await self._updated(known.get(info.name), info) for info in membership.members]

    async def _updated(self, member: Member | None, info: MemberInfo) -> Member:
        """The member as published. A handle belongs to one actor: after a death it is resolved afresh."""
        member = member or Member(info.name)
        member.status = info.status
        if member.actor_id != info.actor_id or (member.handle is None and info.actor_id):
            try:
                member.handle = await asyncio.to_thread(get_actor, info.name) if info.actor_id else None
                member.actor_id = member.handle._actor_id.hex() if member.handle is not None else ""
            except ValueError:  # between two actors of that name
                member.handle, member.actor_id = None, ""
        return member
