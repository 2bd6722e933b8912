"""Pools of verifiers whose actors are stand-ins, and what a supervisor may publish of them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from llm42.config import Settings
from llm42.errors import LLM42Error
from llm42.protocol import SamplingParams, Window
from llm42.telemetry.metrics import Metrics
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.membership import MemberInfo, Membership
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Down, Up
from tests.service.stand_ins import Call, answer


def pool_of(*states: tuple[str, str | None], **sections: dict[str, Any]) -> VerifierPool:
    """A pool whose members have these states and fingerprints. sections: of the settings."""
    tree = {"server": {"verifiers": len(states)}, **sections}
    pool = VerifierPool(Settings.load(tree), Metrics())
    for number, (state, fingerprint) in enumerate(states):
        status = VerifierStatus(state, fingerprint, "because" if state == "failed" else "")  # type: ignore[arg-type]
        pool.members.append(Member(f"verifier-{number}", str(number), Handle(None), status))
    return pool


def window(*tokens: int) -> Window:
    return Window("r", tokens, len(tokens), (), SamplingParams())


class Answering:
    """Stands for an actor's verifier: it answers each window as it comes, or fails."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def submit(self, window: Window) -> Future[Any]:
        if isinstance(self.handle.error, LLM42Error):
            raise self.handle.error
        done: Future[Any] = Future()
        done.set_result(answer(window))
        return done

    def release(self, request_id: str) -> None:
        self.handle.released.append(request_id)

    def progressed_s(self, _: str) -> float:
        return 0.0

    def load(self, _: None) -> None:
        """Nothing is known of how busy it is."""


class Handle:
    """Stands for a verifier's handle. blocked: it hangs."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.blocked = error, False
        self.ups, self.released, self.cold = list[Up](), list[str](), list[int]()
        self.boxes = Outboxes(Answering(self))  # type: ignore[arg-type]
        self.exchange, self.verify_cold = Call(self._exchange), Call(self._verify_cold)
        self.manifest = Empty()

    async def _reached(self) -> None:
        if self.error and not isinstance(self.error, LLM42Error):
            raise self.error
        if self.blocked:
            await asyncio.Event().wait()

    async def _exchange(self, up: Up) -> Down:
        self.ups.append(up)
        await self._reached()
        return await self.boxes.exchange(up)

    async def _verify_cold(self, windows: list[Window]) -> list[Any]:
        self.cold.append(len(windows))
        await self._reached()
        if self.error:
            raise self.error
        return [answer(w) for w in windows]


class Empty:
    """Stands for `manifest` of an actor that has started anew."""

    async def remote(self) -> dict[str, Any]:
        return {}


class Published:
    """Stands for a supervisor's handle: publishes the pool's own members, with `status` if given."""

    def __init__(self, pool: VerifierPool, status: VerifierStatus | None = None) -> None:
        self.membership, self._pool, self._status, self.asked = self, pool, status, 0
        self.age_s = 0.0

    async def remote(self, node: str = "") -> Membership:
        self.asked += 1
        members = [
            MemberInfo(m.name, m.actor_id, self._status or m.status, self.age_s) for m in self._pool.members
        ]
        return Membership(tuple(members), "a")


def returns(value: Any) -> Any:
    async def call(*_: Any) -> Any:
        return value

    return call


def hangs() -> Any:
    async def call(*_: Any) -> Any:
        await asyncio.Event().wait()

    return call


def raises(error: Exception) -> Any:
    async def call(*_: Any) -> Any:
        raise error

    return call
