"""An application to break: its processes by role, streams over HTTP, and what they must be compared with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import Application

from llm42.checkpoint.load import sampled_identity
from llm42.config import Settings
from llm42.protocol import Request, SamplingParams
from llm42_serve.app import build
from llm42_serve.launch import Service
from llm42_serve.replica.supervisor_link import get_or_create_supervisor
from llm42_serve.verifiers.names import get_actor, verifier_names
from tests.support import prompt_of

TOKENS = 96


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stream as its client saw it. `cut`: the connection broke; `error`: an error event or status."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: str | None = None
    status: int = 200
    error: str = ""
    cut: bool = False
    failovers: int = 0
    retry_after: str | None = None


class App:
    """One application of the session's cluster."""

    def __init__(
        self, service: Service, name: str, settings: Settings, build: Callable[[Any], Application] = build
    ) -> None:
        """build: makes the application; a test's own may have a plant in it."""
        self.name, self.settings, self._build = name, settings, build
        self.url = f"{service.url}/{name}"
        self.identity = sampled_identity(settings.model.path)

    async def deploy(self, settings: Settings | None = None) -> None:
        """Deploys, or redeploys with other settings, and waits until deterministic requests are answered."""
        self.settings = settings or self.settings
        tree = self.settings.model_dump(mode="json")
        await asyncio.to_thread(serve.run, self._build(tree), name=self.name, route_prefix=f"/{self.name}")
        await self.until(lambda h: bool(h["deterministic"]), 300.0)

    async def delete(self) -> None:
        """Deletes the application and, so that the next one starts cold, its actors."""
        await asyncio.to_thread(serve.delete, self.name)
        count = max(self.settings.server.verifiers, self.settings.server.max_verifiers)
        for handle in [await asyncio.to_thread(self.supervisor), *map(_maybe, self.verifier_names(count))]:
            if handle is not None:
                ray.kill(handle, no_restart=True)

    def supervisor(self) -> Any:
        """The supervisor's handle."""
        return get_or_create_supervisor(self.settings, self.identity)

    def verifier_names(self, count: int | None = None) -> list[str]:
        """Names of the verifiers."""
        return verifier_names(self.settings, self.identity, count or self.settings.server.verifiers)

    async def health(self) -> dict[str, Any]:
        """What one ingress and one replica say."""
        async with httpx.AsyncClient(timeout=300) as http:
            try:
                reply = await http.get(f"{self.url}/health")
                return dict(reply.json())
            except (httpx.HTTPError, json.JSONDecodeError):
                return {"deterministic": False, "serving": False, "running": -1, "waiting": -1, "kv_used": -1}

    async def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float) -> float:
        """Waits until eight answers in a row meet the condition; the seconds it took."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            states = [await self.health() for _ in range(8)]
            if all(map(condition, states)):
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {states[-1]}")

    def pids(self, title: str) -> list[int]:
        """Processes with this title, as Ray sets it; {name} is the application's."""
        return pids_titled(title.format(name=self.name))

    async def verifier_pids(self) -> list[int]:
        """Processes of the pool's verifiers."""
        statuses = [await get_actor(name).status.remote() for name in self.verifier_names()]
        return [s.pid for s in statuses]

    async def stream(self, request: Request, began: asyncio.Event | None = None) -> Outcome:
        """One streamed completion. began: set when its first token is here."""
        body = {
            "model": self.settings.model.name, "prompt": list(request.prompt), "stream": True,
            "max_tokens": request.max_tokens, "logprobs": 0, "return_token_ids": True, "ignore_eos": True,
            "temperature": request.sampling.temperature,
            "seed": request.sampling.seed if request.seeded else None,
            "deterministic": request.deterministic,
        }  # fmt: skip
        got = _Collected(began or asyncio.Event())
        try:
            async with (
                httpx.AsyncClient(timeout=300) as http,
                http.stream("POST", f"{self.url}/v1/completions", json=body) as reply,
            ):
                if reply.status_code != 200:
                    text = (await reply.aread()).decode()
                    after = reply.headers.get("retry-after")
                    return Outcome(status=reply.status_code, error=text, retry_after=after)
                async for line in reply.aiter_lines():
                    got.take(line)
        except httpx.HTTPError:
            return got.outcome(cut=True)
        return got.outcome(cut=not got.done)


class _Collected:
    """What a stream has brought so far."""

    def __init__(self, began: asyncio.Event) -> None:
        self.began = began
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self.error, self.failovers, self.done = "", 0, False

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = str(event["error"])
                return
            for choice in event["choices"]:
                self.tokens += choice.get("token_ids") or []
                if self.tokens:
                    self.began.set()
                self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                self.finish = choice.get("finish_reason") or self.finish
            self.failovers = (event.get("llm42") or {}).get("failovers", self.failovers)

    def outcome(self, cut: bool) -> Outcome:
        return Outcome(
            tuple(self.tokens), tuple(self.logprobs), self.finish, 200, self.error, cut, self.failovers
        )


def pids_titled(title: str) -> list[int]:
    """Processes whose title is exactly this."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                shown = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
            except OSError:
                continue
            if shown == title or shown.startswith(f"{title}."):
                found.append(int(entry.name))
    return sorted(found)


def kill(pids: Sequence[int]) -> None:
    """SIGKILL, nothing gentler."""
    assert pids, "nobody to kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _maybe(name: str) -> Any:
    try:
        return get_actor(name)
    except ValueError:
        return None


def deterministic(number: int, tokens: int = TOKENS) -> Request:
    """One of twelve different deterministic requests, greedy and sampled in turn."""
    kind = number % 12
    sampling = SamplingParams(temperature=1.0 if kind % 2 else 0.0, seed=kind)
    return Request(f"d{number}", prompt_of(kind, 10 + 7 * kind), tokens, sampling, True, num_logprobs=0)


def best_effort(number: int, tokens: int = TOKENS, seeded: bool = True) -> Request:
    """Noise: a request that is not verified. Not seeded: a verifier may decode it."""
    sampling = SamplingParams(temperature=0.7, seed=number)
    return Request(f"b{number}", prompt_of(100 + number, 5 + number % 90), tokens, sampling, seeded=seeded)
