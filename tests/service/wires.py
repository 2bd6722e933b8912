"""Both ends of the exchange in one event loop: a verifier whose tokens are a hash, a transport that loses,
repeats and delays, and a reader that plays a request's session."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from llm42.config import SessionSettings
from llm42.protocol import Commit, Failure, Request, RequestStats, Window
from llm42.session.actions import Emit, Renew
from llm42.session.interfaces import Sink
from llm42.session.machine import Session
from llm42.step_times import VerifierLoad
from llm42_serve.replica.exchange import CallLost, Exchange
from llm42_serve.verifiers.outbox import Outbox
from llm42_serve.verifiers.outboxes import Outboxes
from llm42_serve.wire import Answer, Down, Up
from tests.protocol.session_model import END, FastPath, canonical, logprob, prompt_of, verify
from tests.support import PATIENCE_S

CREDIT = SessionSettings(mode="direct", credit=8)
CHECKED = SessionSettings(min_window=3, start_window=3, max_window=7, lookahead=16)
INTERVAL_S = 0.01


@dataclass
class Decoded:
    """One request of the stepping verifier."""

    window: Window
    sink: Sink
    tokens: list[int]
    until: int

    @property
    def over(self) -> bool:
        ended = len(self.tokens) > len(self.window.tokens) and self.tokens[-1] in self.window.stop_token_ids
        return ended or len(self.tokens) >= self.window.max_len


class Stepper:
    """Decodes a token of every request in each step, on a thread of its own. held: its step hangs."""

    def __init__(self, step_s: float = 0.001) -> None:
        self.step_s, self.lock, self.ended = step_s, threading.Lock(), threading.Event()
        self.requests: dict[str, Decoded] = {}
        self.released: list[str] = []
        self.waiting: list[tuple[Window, Future[Commit | Failure]]] = []
        self.submitted: list[Window] = []
        self.stopped: list[str] = []
        self.worked_s = 12.5
        self.neighbour: Callable[[], float] | None = None
        self.stepped, self.held = time.monotonic(), False
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def follow(self, window: Window, sink: Sink) -> None:
        until = len(window.tokens) + 1 + window.credit
        with self.lock:
            self.requests[window.request_id] = Decoded(window, sink, list(window.tokens), until)

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        with self.lock:
            one = self.requests.get(request_id)
            if one is not None:
                one.until = max(one.until, until)
        told(one is not None)

    def submit(self, window: Window) -> Future[Commit | Failure]:
        """Answered in a later step, unless the request is released before."""
        answer: Future[Commit | Failure] = Future()
        with self.lock:
            self.submitted.append(window)
            self.waiting.append((window, answer))
        return answer

    def release(self, request_id: str) -> None:
        with self.lock:
            self.released.append(request_id)
            self.requests.pop(request_id, None)

    def stop(self, request_id: str) -> None:
        with self.lock:
            self.stopped.append(request_id)
            self.requests.pop(request_id, None)

    def beside(self, worked_s: Callable[[], float]) -> None:
        self.neighbour = worked_s

    def load(self, _: None) -> VerifierLoad:
        with self.lock:
            return VerifierLoad(direct=len(self.requests), kv_free=1 << 20)

    def progressed_s(self, _request_id: str) -> float:
        return time.monotonic() - self.stepped

    def close(self) -> None:
        self.ended.set()
        self.thread.join()

    def _loop(self) -> None:
        while not self.ended.wait(self.step_s):
            if self.held:
                continue
            self.stepped = time.monotonic()
            with self.lock:
                answered, self.waiting = self.waiting[:4], self.waiting[4:]
            for window, answer in answered:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(verify(window))
            with self.lock:
                for name, one in self.requests.items():
                    if not one.over and len(one.tokens) < one.until:
                        base, token = len(one.tokens), canonical(one.tokens)
                        told = (logprob(one.tokens, token),)
                        one.tokens.append(token)
                        one.sink(self.said(Commit(name, base, 0, token, told, "fp")))

    def said(self, commit: Commit) -> Commit:
        """What it says of a token that it has decoded."""
        return commit


@dataclass
class Transport:
    """Calls of an exchange; `fates` are drawn from: good, unsent, lost, twice, slow."""

    serve: Callable[[Up], asyncio.Future[Down]]
    rng: Random
    fates: tuple[str, ...] = ("good",)
    calls: list[Up] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    losses: int = 0
    """Since the last answer that was carried."""
    others: list[asyncio.Task[Down]] = field(default_factory=list)

    async def __call__(self, up: Up) -> Down:
        self.calls.append(up)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            answer = await self._carry(up, self._fate())
            self.losses = 0
            return answer
        finally:
            self.under_way -= 1

    def _fate(self) -> str:
        """Never a third loss after two: after some more the verifier would rightly count as dead."""
        fate = self.rng.choice(self.fates) if self.losses < 2 else "good"
        self.losses += fate in ("unsent", "lost")
        return fate

    async def _carry(self, up: Up, fate: str) -> Down:
        if fate == "unsent":
            raise CallLost("planted")
        if fate == "twice":
            self.others.append(asyncio.ensure_future(self.serve(up)))
            await asyncio.sleep(0)
        answer = await self.serve(up)
        if fate == "lost":
            raise CallLost("planted")
        if fate == "slow":
            await asyncio.sleep(self.rng.random() * 0.02)
        return answer


def request_of(number: int, max_tokens: int = 60) -> Request:
    return Request(f"r{number}", prompt_of(number), max_tokens, deterministic=True, stop_token_ids=(END,))


@dataclass
class Read:
    """What a reader got."""

    tokens: list[int]
    stats: RequestStats
    failures: list[Answer]
    silences: int = 0


class Follows(Protocol):
    """An exchange, or a pool of them."""

    def follow(self, window: Window, sink: Sink) -> None: ...

    def renew(self, request_id: str, until: int) -> None: ...

    def release(self, request_id: str) -> None: ...


async def read(exchange: Follows, request: Request, patience_s: float = PATIENCE_S, errors: int = 0) -> Read:
    """Plays the request's session until its output ends, or there are more errors than `errors`."""
    session, answers = Session(request, CREDIT, 0.0), asyncio.Queue[Answer]()
    found = Read([], session.stats, [])
    while not session.done:
        if (window := session.due(0.0)) is not None:
            exchange.follow(window, answers.put_nowait)
        try:
            answer = await asyncio.wait_for(answers.get(), patience_s)
        except TimeoutError:
            found.silences += 1
            session.lost()
            continue
        if not isinstance(answer, Commit):
            found.failures.append(answer)
            session.lost()
            if not isinstance(answer, Failure) and len(found.failures) > errors:
                break
            continue
        for action in session.commit(answer, 0.0):
            if isinstance(action, Emit):
                found.tokens += action.tokens
            elif isinstance(action, Renew):
                exchange.renew(request.request_id, action.until)
    exchange.release(request.request_id)
    return found


async def checked(
    exchange: Follows, request: Request, patience_s: float = PATIENCE_S, accuracy: float = 0.9
) -> Read:
    """Plays the request's session in mode verify, with a fast path that is sometimes wrong: one window after
    the other, each sent again when it has failed or nothing comes."""
    session, answers = Session(request, CHECKED, 0.0), asyncio.Queue[Answer]()
    fast = FastPath(Random(request.request_id), request.prompt, accuracy, session.limit)
    found = Read([], session.stats, [])
    while not session.done:
        while (window := session.due(0.0)) is None:
            actions = list[Any]()
            if not fast.step() and not fast.outbox:
                raise AssertionError("no window is due, and no candidate can come")
            if fast.outbox:
                actions = session.candidates(*fast.deliver(5))
            for action in actions:
                fast.apply(action)
        answer: Answer | None = None
        while not isinstance(answer, Commit):
            exchange.follow(window, answers.put_nowait)
            try:
                answer = await asyncio.wait_for(answers.get(), patience_s)
            except TimeoutError:
                found.silences += 1
                continue
            if not isinstance(answer, Commit):
                found.failures.append(answer)
        for action in session.commit(answer, 0.0):
            if isinstance(action, Emit):
                found.tokens += action.tokens
            else:
                fast.apply(action)
    exchange.release(request.request_id)
    assert answers.empty(), "an answer came twice"
    return found


@dataclass
class Both:
    """A verifier and a replica. Leave it by `close`; `both` does."""

    seed: int = 0
    fates: tuple[str, ...] = ("good",)
    interval_s: float = INTERVAL_S
    step_s: float = 0.001
    kind: type[Exchange] = Exchange
    answer_s: float = math.inf
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.verifier = Stepper(self.step_s)
        self.boxes = Outboxes(self.verifier)
        self.transport = Transport(self.boxes.exchange, Random(self.seed), self.fates)  # type: ignore[arg-type]
        self.exchange = self.kind("replica", self.transport, lambda: self.interval_s, self.answer_s)

    async def close(self) -> None:
        self.exchange.close()
        for task in self.transport.others:
            task.cancel()
        await asyncio.to_thread(self.verifier.close)


@asynccontextmanager
async def both(**changes: Any) -> AsyncIterator[Both]:
    """Both, for as long as the block lasts."""
    made = Both(**changes)
    try:
        yield made
    finally:
        await made.close()


class GivesOnce(Outbox):
    """Keeps nothing of what it has given."""

    def _acknowledge(self, up: Up) -> None:
        super()._acknowledge(replace(up, acknowledged=self._number))


class SaysOnce(Exchange):
    """Does not repeat what a lost call said."""

    def _repeat(self, up: Up, error: Exception) -> None:
        super()._repeat(replace(up, windows=(), renewals=(), releases=(), marks=(), stops=()), error)
