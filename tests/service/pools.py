"""Pools of verifiers whose actors are stand-ins, and what a supervisor may publish of them."""

from __future__ import annotations

import asyncio
from typing import Any

from llm42.config import Settings
from llm42.protocol import SamplingParams, Window
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.supervisor import MemberInfo, Membership


def pool_of(*states: tuple[str, str | None]) -> VerifierPool:
    """A pool whose members have these states and fingerprints."""
    pool = VerifierPool(Settings.load({"server": {"verifiers": len(states)}}), Metrics())
    for number, (state, fingerprint) in enumerate(states):
        status = VerifierStatus(state, fingerprint, "because" if state == "failed" else "")  # type: ignore[arg-type]
        pool.members.append(Member(f"verifier-{number}", str(number), Handle(None), status))
    return pool


def window(*tokens: int) -> Window:
    return Window("r", tokens, len(tokens), (), SamplingParams())


class Handle:
    """Stands for a verifier's handle: verify echoes the windows, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self.verify = self
        self.error, self.blocked = error, False
        self.manifest = Empty()

    async def remote(self, windows: list[Window], cold: bool = False) -> Any:
        if self.error:
            raise self.error
        if self.blocked:
            await asyncio.Event().wait()
        return list(windows)


class Empty:
    """Stands for `manifest` of an actor that has started anew."""

    async def remote(self) -> dict[str, Any]:
        return {}


class Published:
    """Stands for a supervisor's handle: publishes the pool's own members, with `status` if given."""

    def __init__(self, pool: VerifierPool, status: VerifierStatus | None = None) -> None:
        self.membership, self._pool, self._status, self.asked = self, pool, status, 0
        self.age_s = 0.0

    async def remote(self) -> Membership:
        self.asked += 1
        members = [
            MemberInfo(m.name, m.actor_id, self._status or m.status, self.age_s) for m in self._pool.members
        ]
        return Membership(tuple(members), "a")


def returns(value: Any) -> Any:
    async def call() -> Any:
        return value

    return call


def raises(error: Exception) -> Any:
    async def call() -> Any:
        raise error

    return call
