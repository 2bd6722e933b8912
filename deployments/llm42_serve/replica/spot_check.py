"""Audits: a share of the computed rows is computed again, from a cold cache, by another verifier, and
compared bit by bit: this share of the windows, each alone, and of the answers that verifiers decode by
themselves, each whole, at its end.

A difference means that a verifier is wrong: its memory, its machine, or a kernel that is not what
certification saw. A third verifier says which one; without a third, the known answers of each
(llm42/verifier/known_answers.py) do. The odd one out is condemned. What it had committed before cannot
be recalled: docs/determinism.md states the exposure.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llm42.protocol import Commit, Failure, Window
from llm42.telemetry import metrics as m
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica.kept_answers import KeptAnswers, Part

if TYPE_CHECKING:
    from llm42_serve.replica.member import Member
    from llm42_serve.replica.verifier_pool import VerifierPool

log = logging.getLogger(__name__)
MAX_RUNNING = 2
"""Audits at once; while they run, what would be audited is not: auditing never becomes a backlog."""
TIMEOUT_S = 60.0


def same_answer(a: Commit | Failure, b: Commit | Failure) -> bool:
    """Equality of what a client could see: tokens and the bits of the log-probabilities."""
    if isinstance(a, Failure) or isinstance(b, Failure):
        return type(a) is type(b)
    return (a.accepted, a.next_token, a.logprobs) == (b.accepted, b.next_token, b.logprobs)


def kind_of(window: Window, a: Commit | Failure, b: Commit | Failure) -> str:
    """What differs and where, without a word of what the answers say."""
    if isinstance(a, Failure) or isinstance(b, Failure):
        return "one of them refused it"
    for place, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=False), len(window.tokens)):
        for name in ("token", "logprob", "top"):
            if getattr(x, name) != getattr(y, name):
                return f"{name} at position {place}"
    return "how many candidates stand"


def comparable(answers: Iterable[Commit | Failure]) -> bool:
    """Whether all come from one fingerprint: else two healthy verifiers may differ, as around a change of the
    pool's fingerprint."""
    return len({a.fingerprint for a in answers if isinstance(a, Commit)}) <= 1


class Auditor:
    """One per pool; belongs to its event loop."""

    def __init__(self, pool: VerifierPool, share: float, metrics: Metrics, log_values: bool = False) -> None:
        """log_values: a difference is logged with the tokens and log-probabilities of both sides, which are
        what a user was told (telemetry.log_prompts)."""
        self._pool, self._share, self._metrics, self._log_values = pool, share, metrics, log_values
        self._running: set[asyncio.Task[None]] = set()
        self.kept = KeptAnswers(share)
        """Of requests that are decoded by verifiers."""
        self._random = random.Random()

    def consider(
        self, member: Member, windows: Sequence[Window], answers: Sequence[Commit | Failure]
    ) -> None:
        """Starts an audit of these answers, or not. Returns at once."""
        if self._random.random() < self._share:
            self._start(lambda: self.audit(member, list(windows), list(answers)))

    def ended(self, request_id: str) -> None:
        """A request is over: starts an audit of what verifiers have decoded of it, if it was chosen when it
        began. Returns at once."""
        if parts := self.kept.end(request_id):
            self._start(lambda: self._audit_parts(parts))

    def _start(self, audit: Callable[[], Awaitable[None]]) -> None:
        if len(self._running) >= MAX_RUNNING:
            return
        task = asyncio.get_running_loop().create_task(self._guarded(audit()))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Ends what runs."""
        for task in self._running:
            task.cancel()

    async def _guarded(self, audit: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(audit, TIMEOUT_S)
        except Exception as error:  # a verifier that died or is busy: no finding
            log.info("an audit did not finish: %s: %s", type(error).__name__, error)

    async def _audit_parts(self, parts: Sequence[Part]) -> None:
        """Each against others than who has decoded it, unless that one is gone."""
        for part in parts:
            if part.member.actor_id == part.actor_id:
                window, claimed = part.claim()
                await self.audit(part.member, [window], [claimed])

    async def audit(self, member: Member, windows: list[Window], answers: list[Commit | Failure]) -> None:
        """Computes the windows again, on another verifier where there is one, and acts on a difference."""
        second = self._other(member) or member
        asked = {member.actor_id, second.actor_id}
        repeated = await self._compute(second, windows)
        if not comparable([*answers, *repeated]):
            return
        self._metrics.inc(m.AUDITS, len(windows))
        wrong = [i for i, (a, b) in enumerate(zip(answers, repeated, strict=True)) if not same_answer(a, b)]
        if not wrong:
            return
        self._metrics.inc(m.AUDIT_MISMATCHES, len(wrong))
        first = wrong[0]
        values = f": {answers[first]} against {repeated[first]}" if self._log_values else ""
        log.error(
            "audit: %s and %s differ on a window of request %s: %s%s",
            member.name, second.name, windows[first].request_id,
            kind_of(windows[first], answers[first], repeated[first]), values,
        )  # fmt: skip
        for odd in await self._odd_ones(member, second, windows[first], answers[first], repeated[first]):
            if odd.actor_id in asked:  # not its successor of the same name
                reason = "its answers differ from those of others with its fingerprint"
                await self._pool.condemn(odd, reason)

    async def _odd_ones(
        self, first: Member, second: Member, window: Window, a: Commit | Failure, b: Commit | Failure
    ) -> list[Member]:
        """Who is wrong: by a third opinion, else by the known answers; both when nobody can tell."""
        if first is second:
            return [first]  # its cache and its kernels disagree
        third = self._other(first, second)
        if third is not None:
            (c,) = await self._compute(third, [window])
            if comparable([a, b, c]) and same_answer(a, c) != same_answer(b, c):
                return [second] if same_answer(a, c) else [first]
        passed = await asyncio.gather(*(x.handle.self_test.remote() for x in (first, second)))
        odd = [x for x, good in zip((first, second), passed, strict=True) if not good]
        return odd or [first, second]

    async def _compute(self, member: Member, windows: list[Window]) -> list[Any]:
        answers: list[Any] = await member.handle.verify_cold.remote(windows)
        return answers

    def _other(self, *not_these: Member) -> Member | None:
        able = [x for x in self._pool.ready if all(x is not y for y in not_these)]
        return self._random.choice(able) if able else None
