"""The supervisor of the verifiers: one named, detached actor that creates, adopts, watches, scales and
condemns them, and publishes who is there.

Any fast-path replica may create it (`get_if_exists` makes that a race nobody loses). Its death costs nothing
but time: verifiers are named and detached, so the next supervisor adopts them, and replicas go on with the
members they know. It ends itself when no replica has asked for a while, and so do verifiers when no
supervisor has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from deployments.actors import get_or_create_verifier, verifier_names
from deployments.ray_metrics import actor_metrics
from deployments.scaling import Scaler
from deployments.verifier_actor import LEASE_S, VerifierStatus
from llm42 import metrics as m
from llm42.config import Settings
from llm42.fingerprint import differing_fields
from llm42.logs import configure

log = logging.getLogger(__name__)
WATCH_S = 1.0
STATUS_TIMEOUT_S = 5.0
MISSES_ALLOWED = 3
PIN_S = 30.0
"""The pool keeps its fingerprint this long after its last verifier that had it is gone."""
CONDEMNED_PAUSE_S = 10.0
"""A condemned verifier is created anew after this time, doubled with each further one of its name."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One verifier as published. `actor_id` changes when the actor is created anew under its name."""

    name: str
    actor_id: str
    status: VerifierStatus | None


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is there. Members with another fingerprint than the pool's have the state "mixed"."""

    members: tuple[MemberInfo, ...] = ()
    fingerprint: str | None = None
    condemned: int = 0
    pid: int = 0


@dataclass(slots=True)
class Watched:
    """A verifier in the supervisor's eyes."""

    name: str
    handle: Any = None
    status: VerifierStatus | None = None
    missed: int = 0
    condemned: int = 0
    not_before: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    """Counters of the last look, to tell what has happened since."""
    mixed: str = ""
    """How its manifest differs from the pool's, once that has been found out."""

    @property
    def actor_id(self) -> str:
        """Identity of the present actor; empty while there is none."""
        return self.handle._actor_id.hex() if self.handle is not None else ""


class Supervisor:
    """The actor's class. Its event loop is its only thread."""

    def __init__(self, settings: dict[str, Any], model_identity: str, lease_s: float = LEASE_S / 2) -> None:
        self._settings, self._identity = Settings.load(settings), model_identity
        self._lease_s, self._renewed = lease_s, time.monotonic()
        server, verifier = self._settings.server, self._settings.verifier
        self._scaler = Scaler(
            server.verifiers, server.max_verifiers, verifier.target_queue_s, verifier.scale_down_s
        )
        self._watched = [
            Watched(name) for name in verifier_names(self._settings, model_identity, self._scaler.most)
        ]
        self._fingerprint: str | None = None
        self._unpinned_since: float | None = None
        self._condemned = 0
        configure(self._settings.telemetry, "supervisor")
        self._metrics = actor_metrics(m.Scope.SUPERVISOR, model=self._settings.model.name)
        self._task = asyncio.get_event_loop().create_task(self._run())

    # ---- called by replicas
    # --------------------------------------------------------------------------------------

    async def membership(self) -> Membership:
        """Who is there; asking renews the lease."""
        self._renewed = time.monotonic()
        members = tuple(MemberInfo(w.name, w.actor_id, self._published(w)) for w in self._wanted)
        return Membership(members, self._fingerprint, self._condemned, os.getpid())

    async def condemn(self, name: str, actor_id: str, reason: str) -> None:
        """Removes a verifier that was found to be wrong; a new one takes its place after a pause."""
        for watched in self._watched:
            if watched.name == name and watched.actor_id == actor_id and watched.handle is not None:
                log.error("%s is condemned: %s", name, reason)
                self._condemned += 1
                self._metrics.inc(m.CONDEMNED)
                watched.condemned += 1
                pause = CONDEMNED_PAUSE_S * 2 ** (watched.condemned - 1)
                watched.not_before = time.monotonic() + pause
                handle, watched.handle, watched.status = watched.handle, None, None
                ray.kill(handle, no_restart=True)

    # ---- the watch
    # ---------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> list[Watched]:
        return self._watched[: self._scaler.wanted]

    async def _run(self) -> None:
        while time.monotonic() - self._renewed < self._lease_s:
            try:
                await asyncio.gather(*(self._refresh(w) for w in self._wanted))
                self._pin()
                await self._explain_mixed()
                self._scale()
                self._report()
            except Exception:  # whatever it is, watching must go on
                log.exception("a look at the verifiers failed")
            await asyncio.sleep(min(WATCH_S, self._lease_s / 4))
        # its verifiers end by their own leases: another supervisor may be asking for them too
        log.warning("no replica has asked for %.0f s: the supervisor ends", self._lease_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _refresh(self, watched: Watched) -> None:
        """One status call; a member that has died is created anew."""
        if time.monotonic() < watched.not_before:
            return
        try:
            if watched.handle is None:
                watched.handle = await asyncio.to_thread(
                    get_or_create_verifier, watched.name, self._settings, self._identity
                )
                watched.mixed = ""
            watched.status = await asyncio.wait_for(watched.handle.status.remote(), STATUS_TIMEOUT_S)
            watched.missed = 0
        except TimeoutError:
            watched.missed += 1  # busy, perhaps: not a reason to turn requests away at once
            if watched.missed >= MISSES_ALLOWED:
                log.warning("%s has not answered %d times", watched.name, watched.missed)
                watched.status = None
        except ActorDiedError as error:
            log.warning("%s has died and is created again: %s", watched.name, error)
            watched.handle = watched.status = None
            self._metrics.inc(m.VERIFIER_DEATHS)
        except Exception as error:
            log.warning("%s does not answer: %s", watched.name, error)
            watched.status = None

    def _pin(self) -> None:
        """The pool's fingerprint: the most common one at first, then kept while anyone has it."""
        found = Counter(w.status.fingerprint for w in self._wanted if w.status and w.status.fingerprint)
        if self._fingerprint in found:
            self._unpinned_since = None
        elif found:
            now = time.monotonic()
            self._unpinned_since = self._unpinned_since or now
            if self._fingerprint is None or now - self._unpinned_since > PIN_S:
                self._fingerprint, self._unpinned_since = found.most_common(1)[0][0], None

    def _published(self, watched: Watched) -> VerifierStatus | None:
        status = watched.status
        if status is None or status.state != "ready" or status.fingerprint == self._fingerprint:
            return status
        detail = f"{watched.name} has another fingerprint than the pool's{watched.mixed}"
        return replace(status, state="mixed", detail=detail)

    async def _explain_mixed(self) -> None:
        """Finds out, once for each, in which fields a refused verifier differs."""
        mixed = [w for w in self._wanted if not w.mixed and (s := self._published(w)) and s.state == "mixed"]
        ours = [w for w in self._wanted if w.status and w.status.fingerprint == self._fingerprint]
        if not mixed or not ours:
            return
        reference = await asyncio.wait_for(ours[0].handle.manifest.remote(), STATUS_TIMEOUT_S)
        for watched in mixed:
            manifest = await asyncio.wait_for(watched.handle.manifest.remote(), STATUS_TIMEOUT_S)
            watched.mixed = f" ({', '.join(differing_fields(reference, manifest))} differ)"
            log.error("%s is refused%s", watched.name, watched.mixed)

    def _scale(self) -> None:
        windows = queue_s = 0.0
        busy, ready = False, 0
        for watched in self._wanted:
            status = watched.status
            if status is None or status.state != "ready":
                continue
            before, watched.seen = watched.seen, {"windows": status.windows, "queue_s": status.queue_s}
            windows += status.windows - before.get("windows", status.windows)
            queue_s += status.queue_s - before.get("queue_s", status.queue_s)
            busy |= status.waiting + status.active > 0
            ready += 1
        was = self._scaler.wanted
        mean = queue_s / windows if windows > 0 else 0.0
        wanted = self._scaler.look(time.monotonic(), mean, busy or windows > 0, ready)
        if wanted != was:
            log.info("verifiers wanted: %d instead of %d (mean queue %.2f s)", wanted, was, mean)
        for watched in self._watched[wanted:was]:
            # no longer asked for its state, it ends by its lease, after what is in flight
            watched.handle = watched.status = None

    def _report(self) -> None:
        published = [self._published(w) for w in self._wanted]
        states = Counter(status.state if status else "unreachable" for status in published)
        for state in m.STATE.values:
            self._metrics.set(m.VERIFIERS, states[state], state=state)
        self._metrics.set(m.VERIFIERS_WANTED, len(published))
