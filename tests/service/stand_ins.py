"""Stand-ins for actors, and a cluster of them as a supervisor sees it: no Ray process is started."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from llm42.config import Settings
from llm42.protocol import Commit, TokenLogprob, Window
from llm42_serve.verifiers import leaving, supervisor
from llm42_serve.verifiers.actor import State, VerifierStatus
from llm42_serve.verifiers.supervisor import Supervisor
from tests.support import until

QUICK = {"verifier": {"scale_down_s": 0.2, "target_queue_s": 0.1}}


class Call:
    """`handle.method.remote(...)` as a coroutine."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    async def remote(self, *args: Any, **more: Any) -> Any:
        found = self.run(*args, **more)
        return await found if inspect.isawaitable(found) else found


class Actor:
    """A verifier's handle."""

    numbers = itertools.count()

    def __init__(self, name: str, fingerprint: str = "a") -> None:
        self.name, self.fingerprint, self.dead, self.off = name, fingerprint, False, 0.0
        self.healthy, self.windows, self.queue_s, self.waiting = True, 0, 0.0, 0
        self.state: State = "ready"
        self.asked, self.node, self.pid = 0, "node", 1
        self.work: dict[str, Any] = {}
        """What else it says of itself."""
        self.pending = False
        """Ray has found no place for it."""
        self.broken: Exception | None = None
        self.answering = asyncio.Event()
        """Not set: it has hung."""
        self.answering.set()
        number = str(next(self.numbers))
        self._actor_id = SimpleNamespace(hex=lambda: number)
        self.status, self.manifest = Call(self._report), Call(lambda: {"model": self.fingerprint, "n": 1})
        self.verify_cold, self.self_test = Call(self._verify_cold), Call(lambda: self.healthy)

    async def _report(self) -> VerifierStatus:
        status = self.said()
        self.asked += 1
        await self.answering.wait()
        if self.dead:
            raise ActorDiedError()
        if self.broken:
            raise self.broken
        return status

    def said(self) -> VerifierStatus:
        counters = (self.windows, self.queue_s, self.waiting, 0)
        fingerprint = self.fingerprint if self.state == "ready" else None
        return VerifierStatus(self.state, fingerprint, "", self.pid, *counters, self.node, **self.work)

    def _verify_cold(self, windows: list[Window]) -> list[Commit]:
        return [answer(w, self.off, self.fingerprint) for w in windows]


def answer(window: Window, off: float = 0.0, fingerprint: str = "a") -> Commit:
    logprobs = (TokenLogprob(5, -1.25 + off),)
    return Commit(window.request_id, len(window.tokens), 0, 5, logprobs, fingerprint)


class Cluster:
    """Named actors, as Ray keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Actor] = {}
        self.created = self.killed = 0
        self.fingerprints: dict[str, str] = {}
        self.draining: dict[str, float] = {}
        """Seconds left, by node."""
        self.nodes: Iterator[str] = itertools.repeat("node")
        """Where the next actors come to be."""
        self.first_state: State = "ready"
        """What the next actors are at first."""
        monkeypatch.setattr(supervisor, "get_or_create_verifier", self.get_or_create)
        monkeypatch.setattr(supervisor, "get_actor", self.get)
        monkeypatch.setattr(supervisor, "existing_verifiers", self.existing)
        monkeypatch.setattr(supervisor, "is_pending", lambda handle: handle.pending)
        monkeypatch.setattr(leaving, "draining_nodes", lambda: dict(self.draining))
        monkeypatch.setattr(leaving, "NEWS_S", 0.02)
        monkeypatch.setattr(leaving, "LOOK_S", 0.01)
        monkeypatch.setattr("ray.kill", self.kill)
        monkeypatch.setattr(supervisor, "WATCH_S", 0.01)

    def get_or_create(self, name: str, *_: Any) -> Actor:
        if name not in self.actors or self.actors[name].dead:
            self.created += 1
            made = self.actors[name] = Actor(name, self.fingerprints.get(name, "a"))
            made.node, made.state = next(self.nodes), self.first_state
        return self.actors[name]

    def existing(self, *_: Any) -> set[int]:
        return {int(name.split("-")[-1]) for name, actor in self.actors.items() if not actor.dead}

    def get(self, name: str) -> Actor:
        if name not in self.actors or self.actors[name].dead:
            raise ValueError(name)
        return self.actors[name]

    def kill(self, handle: Any, no_restart: bool) -> None:
        self.killed += 1
        handle.dead = True


async def started(cluster: Cluster, **server: int) -> Supervisor:
    settings = Settings.load({"server": server, **QUICK})
    made = Supervisor(settings.model_dump(mode="json"), "model", lease_s=30.0)
    await until(lambda: len([m for m in made._wanted if m.status]) == made._scaler.wanted)
    return made


async def states(made: Supervisor) -> list[str]:
    return [m.status.state if m.status else "gone" for m in (await made.membership()).members]
