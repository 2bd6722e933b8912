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
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RuntimeEnvSetupError

from llm42.config import Settings
from llm42.telemetry import metrics as m
from llm42.telemetry.logs import configure, event
from llm42_serve.ray_metrics import actor_metrics
from llm42_serve.verifiers.actor import VerifierStatus, node_id
from llm42_serve.verifiers.leaving import DrainWatch, end_softly
from llm42_serve.verifiers.load import Limits
from llm42_serve.verifiers.membership import MemberInfo, Membership, PoolFingerprint
from llm42_serve.verifiers.names import (
    existing_verifiers,
    get_actor,
    get_or_create_verifier,
    is_pending,
    verifier_names,
)
from llm42_serve.verifiers.roster import Roster
from llm42_serve.verifiers.scaling import Scaler, look_at
from llm42_serve.verifiers.watch import Watched, log_change

log = logging.getLogger(__name__)
WATCH_S = 1.0
STATUS_TIMEOUT_S = 5.0
FIRST_LOOK_S = 2.0
"""A new supervisor lets replicas wait so long for its first look, which is less than they wait for an answer:
they go on with what its predecessor has reported."""
START_FAILED = (RuntimeEnvSetupError, ActorUnschedulableError)
"""Ray's words for an actor that never came to be; it is dead, but these are no RayActorErrors."""
START_PAUSE_S = 10.0
"""Between such a start and the next one."""
HOST_S = 15.0
"""A node from which no replica has asked for so long has none."""
CONDEMNED_PAUSE_S = 10.0
"""A condemned verifier is created anew after this time, doubled with each further one of its name."""


class Supervisor:
    """The actor's class. Its event loop is its only thread."""

    def __init__(self, settings: dict[str, Any], model_identity: str, lease_s: float | None = None) -> None:
        self._settings, self._identity = Settings.load(settings), model_identity
        watch = self._settings.watch
        self._lease_s, self._renewed = lease_s or watch.lease_s / 2, time.monotonic()
        self._node = node_id()
        self._pause_s = min(WATCH_S, self._lease_s / 4)
        server, verifier = self._settings.server, self._settings.verifier
        most, limits = server.max_verifiers, Limits.of(verifier)
        self._scaler = Scaler(server.verifiers, most, limits, verifier.scale_down_s)
        self._roster = Roster(self._watched_for, self._scaler.wanted, self._scaler.most)
        self._drains = DrainWatch(watch.drain_check_s)
        self._hosts: dict[str, float] = {}
        """When the last fast-path replica of a node has asked."""
        self._pool = PoolFingerprint()
        self._condemned = 0
        self._all_tried = asyncio.Event()
        """Every wanted verifier has been asked, with or without an answer."""
        self._fresh_status = False
        """Whether a verifier has answered since the last time that the scaler looked."""
        configure(self._settings.telemetry, "supervisor")
        event(log, "supervisor starts", pid=os.getpid(), verifiers=[w.name for w in self._wanted])
        self._metrics = actor_metrics(m.Scope.SUPERVISOR, model=self._settings.model.name)
        self._task = asyncio.get_event_loop().create_task(self._run())

    async def membership(self, node: str = "") -> Membership:
        """Who is there; asking renews the lease. node: that of the fast-path replica that asks."""
        self._renewed = self._hosts[node] = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._all_tried.wait()
        return Membership(self._infos(), self._pool.fingerprint, self._condemned, os.getpid())

    async def members(self) -> tuple[MemberInfo, ...]:
        """The verifiers, for somebody who looks on: the lease is not renewed. Waits until all were asked, for
        of others nothing is known."""
        await self._all_tried.wait()
        return self._infos()

    def _infos(self) -> tuple[MemberInfo, ...]:
        now, published = time.monotonic(), self._pool.published
        return tuple(MemberInfo(w.name, w.actor_id, published(w), now - w.asked) for w in self._wanted)

    async def condemn(self, name: str, actor_id: str, reason: str) -> bool:
        """Removes a verifier that was found to be wrong; a new one takes its place after a pause. May be
        repeated. Returns whether it is gone; else it is to be asked again."""
        for watched in self._watched:
            if watched.name != name:
                continue
            handle = watched.handle
            if handle is None and not watched.wanted:
                handle = await asyncio.to_thread(_found, name)  # it may still have requests to end
            elif handle is None:
                return False  # of a wanted one it is not known yet who bears its name
            if handle is not None and handle._actor_id.hex() == actor_id:
                log.error("%s is condemned: %s", name, reason)
                self._condemned += 1
                self._metrics.inc(m.CONDEMNED)
                watched.condemned += 1
                pause = CONDEMNED_PAUSE_S * 2 ** (watched.condemned - 1)
                watched.not_before = time.monotonic() + pause
                await self._kill(watched, handle)
        return True

    @property
    def _watched(self) -> list[Watched]:
        return self._roster.watched

    @property
    def _wanted(self) -> list[Watched]:
        return self._roster.wanted

    def _watched_for(self, number: int) -> Watched:
        name = verifier_names(self._settings, self._identity, number + 1)[-1]
        return Watched(name, self._settings.watch)

    async def _run(self) -> None:
        await self._adopt()
        tasks = [asyncio.create_task(self._drains.run())]
        try:
            while time.monotonic() - self._renewed < self._lease_s and not self._must_leave():
                try:
                    if self._fresh_status:  # a look without any would be taken for an empty queue
                        self._fresh_status = False
                        self._scale()
                    self._arrange()
                    self._report()
                except Exception:  # whatever it is, watching must go on
                    log.exception("a look at the verifiers failed")
                new = range(len(tasks) - 1, len(self._watched))
                tasks += [asyncio.create_task(self._watch(self._watched[number])) for number in new]
                await asyncio.sleep(self._pause_s)
        finally:
            for task in tasks:
                task.cancel()
        # its verifiers end by their own leases: another supervisor may be asking for them too
        silence = f"no replica has asked for {self._lease_s:.0f} s"
        log.warning("%s: the supervisor ends", "its node is drained" if self._must_leave() else silence)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _adopt(self) -> None:
        """The verifiers of a predecessor, as many as it had in the end."""
        try:
            found = await asyncio.to_thread(existing_verifiers, self._settings, self._identity)
        except Exception:
            log.exception("verifiers of a predecessor are not looked for")
            return
        self._roster.adopt(found)
        self._scaler.adopt(len(found))

    def _must_leave(self) -> bool:
        """Whether its own node is drained and has no verifier that it must look after: replicas create
        another one, elsewhere, which adopts the rest."""
        mine = any(w.node == self._node for w in self._watched if w.wanted or w.ending)
        return self._node in self._drains.nodes and not mine

    def _arrange(self) -> None:
        """Who is wanted, by number and by node."""
        now = time.monotonic()
        leaving = self._roster.arrange(now, self._scaler.wanted, self._drains.nodes, self._hosts_now(now))
        for watched in leaving:
            event(log, "verifier's node is drained", verifier=watched.name, node=watched.node)

    def _hosts_now(self, now: float) -> set[str]:
        return {node for node, asked in self._hosts.items() if now - asked < HOST_S}

    async def _watch(self, watched: Watched) -> None:
        """Looks after one verifier while it is wanted. Each has a loop of its own: one that does not answer
        makes what is known of the others no older."""
        while True:
            try:
                if watched.wanted:
                    await self._refresh(watched)
                    watched.tried = True
                    if all(w.tried for w in self._wanted):
                        self._all_tried.set()
                    if self._all_tried.is_set():  # the first to answer may be the odd one
                        self._pool.pin(time.monotonic(), self._wanted)
                    async with asyncio.timeout(STATUS_TIMEOUT_S):
                        await self._pool.explain(watched, self._wanted)
                if self._roster.may_leave(time.monotonic(), watched, self._ready()):
                    watched.wanted = False
                if not watched.wanted:
                    await self._give_up(watched)
            except Exception:
                log.exception("a look at %s failed", watched.name)
            await asyncio.sleep(self._pause_s)

    def _ready(self) -> int:
        """How many can be asked of those that stay."""
        published = map(self._pool.published, self._roster.staying)
        return sum(status is not None and status.state == "ready" for status in published)

    async def _give_up(self, watched: Watched) -> None:
        """No longer asked for its state, it ends by its lease, after what is in flight; on a node that is
        being drained sooner. One that Ray has found no place for has no lease, and would wait for ever."""
        handle, answered = watched.handle, watched.status is not None
        if handle is not None and not answered and await asyncio.to_thread(is_pending, handle):
            event(log, "verifier without a place is given up", verifier=watched.name)
            await self._kill(watched, handle)
        watched.handle = watched.status = watched.leave_by = None
        watched.tried = False
        if watched.node not in self._drains.nodes:
            return
        watched.ending = True
        try:
            handle = handle or await asyncio.to_thread(_found, watched.name)
            if handle is not None:
                await end_softly(handle)
                event(log, "verifier has left", verifier=watched.name, node=watched.node)
        finally:
            watched.ending, watched.node = False, ""

    async def _refresh(self, watched: Watched) -> None:
        """One status call; a member that has died is created anew."""
        if time.monotonic() < watched.not_before:
            return
        handle = watched.handle
        try:
            if handle is None:
                create = get_or_create_verifier
                handle = await asyncio.to_thread(create, watched.name, self._settings, self._identity)
                watched.adopt(handle)
                event(log, "verifier adopted or created", verifier=watched.name, actor_id=watched.actor_id)
            asked = time.monotonic()
            async with asyncio.timeout(STATUS_TIMEOUT_S):  # wait_for may swallow the end of the watch
                status = await handle.status.remote()
        except Exception as error:
            if watched.handle is handle:
                await self._unanswered(watched, error)
            return
        if watched.handle is handle:  # else it was condemned or given up meanwhile
            log_change(watched, status)
            if watched.record_answer(status, asked):
                self._metrics.inc(m.VERIFIER_DEATHS)
            self._fresh_status = True

    async def _unanswered(self, watched: Watched, error: Exception) -> None:
        """What a status call that failed says of its verifier."""
        if isinstance(error, ActorDiedError):
            log.warning("%s has died and is created again: %s", watched.name, error)
            watched.handle = watched.status = None
            self._metrics.inc(m.VERIFIER_DEATHS)
            return
        if isinstance(error, START_FAILED):
            log.error("%s could not be started; next try in %.0f s: %s", watched.name, START_PAUSE_S, error)
            detail = f"{type(error).__name__}: {error}"
            watched.handle, watched.status = None, VerifierStatus("failed", None, detail)
            watched.not_before = time.monotonic() + START_PAUSE_S
            return
        watched.record_miss(error)
        if watched.hung:
            log.error("%s has hung: it is killed and created again", watched.name)
            self._metrics.inc(m.VERIFIER_DEATHS)
            await self._kill(watched, watched.handle)

    async def _kill(self, watched: Watched, handle: Any) -> None:
        watched.handle = watched.status = None
        await asyncio.to_thread(ray.kill, handle, no_restart=True)

    def _scale(self) -> None:
        first_to_go = self._roster.first_to_go(self._hosts_now(time.monotonic()))
        seen = look_at(self._roster.staying, self._pool.published, first_to_go)
        was = self._scaler.wanted
        wanted = self._scaler.look(time.monotonic(), seen.ready, seen.left, seen.queue_s, seen.coming)
        if wanted != was:
            excess = [", ".join(self._scaler.limits.excess(status)) or "none" for status in seen.ready]
            reason = f"mean queue {seen.queue_s:.2f} s, too much of: {'; '.join(excess)}"
            log.info("verifiers wanted: %d instead of %d (%s)", wanted, was, reason)
            if wanted < was:
                log.info("%s is given up", first_to_go.name)

    def _report(self) -> None:
        published = [self._pool.published(w) for w in self._wanted]
        states = Counter(status.state if status else "unreachable" for status in published)
        for state in m.STATE.values:
            self._metrics.set(m.VERIFIERS, states[state], state=state)
        self._metrics.set(m.VERIFIERS_WANTED, self._scaler.wanted)


def _found(name: str) -> Any:
    """The handle of a named actor; None when there is none. Blocks like get_actor."""
    with suppress(ValueError):
        return get_actor(name)
    return None
