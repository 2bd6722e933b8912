"""The verifiers as a fast-path replica sees them: who is there, whom to ask, what a failing call becomes.

The supervisor (supervisor.py) says who is there; a replica that cannot reach it creates it anew and goes on
with the members it knows. What requests want goes through following.py; calls are plain actor calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from llm42.checkpoint.load import sampled_identity
from llm42.config import Settings
from llm42.errors import VerifierUnavailable
from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.protocol import Commit, Failure, Request, Window
from llm42.session.interfaces import Sink
from llm42.step_times import VerifierLoad
from llm42.telemetry.metrics import VERIFIERS_READY, Metrics
from llm42_serve.placement import PREFIX_TOKENS, is_busy, preferred
from llm42_serve.replica.crowding import Crowding
from llm42_serve.replica.following import Following
from llm42_serve.replica.member import AVOID_S, Member, errors_of, unreachable
from llm42_serve.replica.spot_check import Auditor
from llm42_serve.replica.supervisor_link import SupervisorLink
from llm42_serve.verifiers.load import Limits
from llm42_serve.verifiers.membership import MemberInfo
from llm42_serve.verifiers.names import get_actor

log = logging.getLogger(__name__)
Answer = Commit | Failure
WATCH_S = 0.5
LOOK_S, FIRST_LOOK_S = 1.0, 10.0
"""How long a request waits for a look at the verifiers before it is refused. Those that come first to a new
replica wait longer while it has heard of none yet: they may have been there for hours."""
FIRST_ANSWER_S = 60.0
"""How long a new replica waits for the supervisor's first answer before it serves; on a busy machine the
supervisor's process takes its time."""
MANIFEST_TIMEOUT_S = 3.0
RETRY_PAUSE_S = 0.1


class VerifierPool:
    """A `VerifierClient` over the actors. One per fast-path replica; belongs to its event loop."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        observe: Callable[[float], None] = lambda _: None,
        look: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """observe: is told how long each committed window waited for its verifier, in seconds; infinity for
        one that was refused because too many waited. look: is told, with each news of the verifiers, whether
        each that is ready has too much to do."""
        self._settings, self._metrics, self._observe = settings, metrics, observe
        self._crowding = Crowding(Limits.of(settings.verifier), look)
        self._model_identity = sampled_identity(settings.model.path)
        self.members: list[Member] = []
        self.fingerprint: str | None = None
        self._supervisor = SupervisorLink(settings, self._model_identity)
        self._condemned: dict[str, str] = {}
        """Why, by actor id. They are never asked again, whatever the supervisor says."""
        self._unconfirmed: dict[str, str] = {}
        """Names of those that may be there still, by actor id."""
        self._asked: dict[str, str] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._look: asyncio.Task[None] | None = None
        self._serves_since, self._heard = time.monotonic(), False
        """Since when requests may come, and whether any verifier's status was ever known here."""
        self._answered = False
        """Whether the supervisor has answered."""
        log_values = settings.telemetry.log_prompts
        self._auditor = Auditor(self, settings.verifier.audit_share, metrics, log_values)
        self._following = Following(self, settings.session, observe, self._auditor.kept)

    def start(self) -> None:
        """Begins watching; a supervisor that is missing is created."""
        if self._settings.server.verifiers > 0:
            self._watchers = [asyncio.create_task(self._watch()), asyncio.create_task(self._judge())]

    def close(self) -> None:
        """Stops watching; the actors live on until their leases end."""
        for watcher in self._watchers:
            watcher.cancel()
        self._following.close()
        self._auditor.close()

    @property
    def ready(self) -> list[Member]:
        """Members that can be asked."""
        return [m for m in self.members if m.ready]

    @property
    def kv_tokens(self) -> int | None:
        """As llm42/session/interfaces.py has it, of those that are ready and say it."""
        return max((m.status.kv_tokens for m in self.ready if m.status), default=0) or None

    @property
    def followed(self) -> int:
        """Requests of this replica that verifiers decode by themselves."""
        return len(self._following)

    async def require_ready(self) -> None:
        """Raises VerifierUnavailable, with the reason, when no verifier can answer now.

        What the last look said may be old, so a refusal looks again first (all callers together).
        """
        if not self.ready and self._settings.server.verifiers > 0:
            await self._look_again(time.monotonic())
        if not self.ready:
            raise VerifierUnavailable(self.explain())

    async def _look_again(self, began: float) -> None:
        while True:
            until = max(began + LOOK_S, 0.0 if self._heard else self._serves_since + FIRST_LOOK_S)
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self.refresh())
            await asyncio.wait([self._look], timeout=max(0.0, until - time.monotonic()))
            if self._heard or time.monotonic() >= until:
                return
            await asyncio.sleep(RETRY_PAUSE_S)

    async def introduced(self) -> None:
        """Waits until the state of a verifier is known, whatever it is; for a while, as there may be none. A
        replica that has heard of none would refuse what the one that it replaces was answering."""
        began = time.monotonic()
        while self._settings.server.verifiers > 0 and not self._heard:
            if time.monotonic() - began >= (FIRST_LOOK_S if self._answered else FIRST_ANSWER_S):
                break
            await asyncio.sleep(RETRY_PAUSE_S)
        self._serves_since = time.monotonic()

    async def settled(self) -> bool:
        """Waits until a verifier is ready, or every one has failed for now; whether one is ready."""
        while self._settings.server.verifiers > 0 and not self.ready and not self._all_failed:
            await asyncio.sleep(RETRY_PAUSE_S)
        return bool(self.ready)

    @property
    def _all_failed(self) -> bool:
        return bool(self.members) and all(m.status and m.status.state == "failed" for m in self.members)

    def explain(self) -> str:
        """Why what a verifier computes cannot be had; empty when it can."""
        if self.ready:
            return ""
        if self._settings.server.verifiers == 0:
            return "Deterministic requests are switched off here (server.verifiers is 0)."
        reasons = {m.status.detail or m.status.state for m in self.members if m.status}
        silent = "they do not answer" if self.members else "nothing is known of them yet"
        return "No verifier is ready: " + ("; ".join(sorted(reasons)) or silent) + "."

    def verify(self, windows: Sequence[Window]) -> Awaitable[list[Answer]]:
        """One try: commits (or final failures) in order. VerifierUnavailable or Overloaded may be retried.

        A verifier that died is replaced within seconds, so this waits for one to be ready; the caller bounds
        the wait (session.verify_timeout_s).
        """
        return self._answers([(window, self._following.verified(window)) for window in windows])

    async def _answers(
        self, asked: Sequence[tuple[Window, Awaitable[tuple[Member, Answer]]]]
    ) -> list[Answer]:
        return list(await asyncio.gather(*(self._verified(window, answer) for window, answer in asked)))

    async def _verified(self, window: Window, asked: Awaitable[tuple[Member, Answer]]) -> Answer:
        member, answer = await asked
        self._auditor.consider(member, [window], [answer])
        return answer

    async def verify_cold(self, windows: Sequence[Window]) -> list[Answer]:
        """Windows of stored answers, by one verifier without its cache. Raises as `verify`."""
        member, limit_s = await self.ready_member(windows[0]), self._settings.session.verify_timeout_s
        began, failed = time.monotonic(), True
        member.in_flight += len(windows)
        try:
            with errors_of(member):
                answers: list[Answer] = await member.handle.verify_cold.remote(list(windows))
            failed = False
            return answers
        except asyncio.CancelledError:
            failed = time.monotonic() - began >= limit_s / 2
            raise
        finally:
            member.in_flight -= len(windows)
            if failed:
                member.avoid_until = time.monotonic() + AVOID_S

    def follow(self, window: Window, sink: Sink) -> None:
        """As llm42/session/interfaces.py has it: one try, which waits for a verifier to be ready."""
        self._following.follow(window, sink)

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        """As llm42/session/interfaces.py has it. `told` is not called: the verifier answers the sink."""
        self._following.renew(request_id, until)

    def progressed_s(self, request_id: str) -> float:
        """As llm42/session/interfaces.py has it."""
        return self._following.progressed_s(request_id)

    def stop(self, request_id: str) -> None:
        """As llm42/session/interfaces.py has it."""
        self._following.stop(request_id)

    @property
    def worked_s(self) -> float:
        """As llm42/session/interfaces.py has it."""
        return self._following.worked_s

    def beside(self, worked_s: Callable[[], float]) -> None:
        """As llm42/session/interfaces.py has it."""
        self._following.beside = worked_s

    def load(self, request: Request | None) -> VerifierLoad | None:
        """As llm42/session/interfaces.py has it: by its last answer to this replica or, if that is older, by
        the last look at the verifiers."""
        member = None if request is None else self._following.place_of(request.request_id)
        member = member or self._preferred(() if request is None else request.prompt[:PREFIX_TOKENS])
        status = None if member is None else member.status
        if member is None or status is None:
            return None
        kv_free = status.kv_tokens - status.kv_used
        direct, waited_s = status.direct, status.waited_s
        told, at = self._following.told(member)
        if told is not None and at > member.told_at:
            kv_free, direct, waited_s = told.kv_free, told.direct, told.waited_s
        return VerifierLoad(
            status.decode_steps,
            status.window_steps,
            direct,
            max(0, direct - member.decoded.most),
            status.places,
            status.kv_tokens,
            max(0, kv_free),
            waited_s,
            1.0 / max(1, len(self.ready)),
            1 if told is None else told.replicas,
        )

    def note(self, request_id: str, member: Member) -> None:
        """Remembers whom a request was sent to."""
        self._asked[request_id] = member.name

    def release(self, request_id: str) -> None:
        """Tells the request's verifier that it is over; nothing waits for it."""
        self._following.release(request_id)
        self._auditor.ended(request_id)

    def asked(self, request_id: str) -> str:
        """The verifier that was asked last for a request, also when that is over; empty when none was."""
        return self._asked.get(request_id, "")

    def forget(self, request_id: str) -> None:
        """Its reply has been given: nobody wants to know any more who was asked."""
        self._asked.pop(request_id, None)

    async def manifest(self) -> tuple[str, dict[str, Any]]:
        """The pool's fingerprint, and what it hashes. Raises VerifierUnavailable."""
        await self.require_ready()
        member = self.ready[0]
        try:
            found = await asyncio.wait_for(member.handle.manifest.remote(), MANIFEST_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            raise VerifierUnavailable(unreachable(member, error)) from error
        if not found:
            raise VerifierUnavailable(f"{member.name} has started anew and has no fingerprint yet")
        return fingerprint_of(found), found

    async def condemn(self, member: Member, reason: str) -> None:
        """Has the supervisor remove a verifier that was found to be wrong; from now on it is not asked, and
        what it decodes for this replica goes on elsewhere. Each refresh repeats this until the supervisor
        says that it is gone, and while it is still published."""
        self._condemned[member.actor_id] = reason
        self._unconfirmed[member.actor_id] = member.name
        member.status = None
        self._following.cut(member.actor_id, VerifierUnavailable(f"{member.name} is condemned"))
        await self._condemn(member.name, member.actor_id)

    async def _condemn(self, name: str, actor_id: str) -> None:
        if await self._supervisor.condemn(name, actor_id, self._condemned[actor_id]):
            self._unconfirmed.pop(actor_id, None)

    async def ready_member(self, window: Window) -> Member:
        """The one to ask, as soon as one is ready. Raises VerifierUnavailable when all have failed."""
        while (member := self._choose(window)) is None:
            if self._all_failed:
                raise VerifierUnavailable(self.explain())
            await asyncio.sleep(RETRY_PAUSE_S)
        return member

    def _choose(self, window: Window) -> Member | None:
        known, length = window.tokens, min(window.prompt_len, PREFIX_TOKENS)
        if window.score:  # its candidates are given: the prompt itself, or an answer that is looked at again
            known, length = known + window.candidates[:PREFIX_TOKENS], PREFIX_TOKENS
        return self._preferred(known[:length])

    def _preferred(self, prefix: tuple[int, ...]) -> Member | None:
        """The one that the prefix prefers, unless it is busy; then the idlest. One that has just failed a
        request, or has more to do than it should, whoever it is for, only where there is no other."""
        now, candidates = time.monotonic(), self.ready
        if not candidates:
            return None
        candidates = [m for m in candidates if m.avoid_until <= now] or candidates
        candidates = [m for m in candidates if not self._crowding.excess(m)] or candidates
        held = {m.name: m.in_flight for m in candidates}
        first = preferred(prefix, held)
        if is_busy(first, held):
            return min(candidates, key=lambda m: m.in_flight)
        return next(m for m in candidates if m.name == first)

    async def _watch(self) -> None:
        while True:
            try:
                await self.refresh()
                self._metrics.set(VERIFIERS_READY, len(self.ready))
            except Exception:  # whatever it is, watching must go on
                log.exception("a look at the verifiers failed")
            await asyncio.sleep(WATCH_S)

    async def _judge(self) -> None:
        """Not by the watch: however long a look is held up, what is known grows old."""
        while True:
            try:
                self._crowding.judge(self.ready)
            except Exception:
                log.exception("what is known of the verifiers could not be judged")
            await asyncio.sleep(WATCH_S)

    async def refresh(self) -> None:
        """Asks the supervisor who is there."""
        asked = time.monotonic()
        membership = await self._supervisor.membership()
        if membership is None:
            return
        self.fingerprint, self._answered = membership.fingerprint, True
        known = {m.name: m for m in self.members}
        self.members = [
            await self._updated(known.get(info.name), info, asked - info.age_s) for info in membership.members
        ]
        self._heard = self._heard or any(m.status for m in self.members)
        # one that scaling has given up is not published, and may work on for others
        found = {info.actor_id: info.name for info in membership.members if info.actor_id in self._condemned}
        for actor_id, name in (self._unconfirmed | found).items():
            await self._condemn(name, actor_id)

    async def _updated(self, member: Member | None, info: MemberInfo, asked_at: float) -> Member:
        """The member as published. A handle belongs to one actor: after a death it is resolved afresh.

        asked_at: a time on this process's clock before which the supervisor cannot have asked for the status.
        """
        member = member or Member(info.name)
        if member.actor_id != info.actor_id or (member.handle is None and info.actor_id):
            try:
                member.handle = await asyncio.to_thread(get_actor, info.name) if info.actor_id else None
                member.actor_id = member.handle._actor_id.hex() if member.handle is not None else ""
            except ValueError:  # between two actors of that name
                member.handle, member.actor_id = None, ""
            member.failed_at = -math.inf
        of_another = member.actor_id != info.actor_id
        out_of_date = asked_at <= member.failed_at
        useless = of_another or out_of_date or info.actor_id in self._condemned
        member.status, member.told_at = None if useless else info.status, asked_at
        return member
