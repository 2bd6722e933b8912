"""A deterministic request whose candidates come from the fast path: windows, commits, rollbacks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace

from llm42.engine.base import EngineOutput
from llm42.errors import LLM42Error, Overloaded
from llm42.protocol import Commit, Delta, Request, Window
from llm42.session.actions import Action, Emit, Extend, Rollback
from llm42.session.drive import Drive, Owner, Shared
from llm42.session.inbox import Inbox
from llm42.session.outputs import require_no_error
from llm42.session.verify_call import verify
from llm42.session.ways import AFTER
from llm42.telemetry import metrics as m
from llm42.text.output_text import OutputText

_Event = EngineOutput | Commit | LLM42Error


class VerifyDrive(Drive):
    """An engine decodes; its candidates are verified in windows."""

    way = "verify"

    def __init__(self, owner: Owner, request: Request, text: OutputText, shared: Shared) -> None:
        super().__init__(owner, request, text, shared)
        self.inbox: Inbox[Commit | LLM42Error] = Inbox(request.stop_token_ids)
        self.events: deque[_Event] = deque()
        """Taken out of the inbox and not looked at yet."""
        self.verifying: asyncio.Task[None] | None = None
        self.cached_tokens: int | None = None
        """What the engine had in its cache, until a delta has reported it."""

    def close(self) -> None:
        """As of every drive; the engine's share, too."""
        self.leave()
        super().close()

    def leave(self) -> None:
        """The verifier keeps what it holds."""
        self.owner.engine.abort(self.request.request_id)
        if self.verifying is not None:
            self.verifying.cancel()
        self.shared.held = len(self.request.prompt) + len(self.session.committed)

    def begin(self) -> None:
        """The engine goes on behind what is committed. If it refuses, the way changes: which one a request
        takes follows from load, and whether it is answered must not."""
        request = replace(self.request, output=tuple(self.session.committed))
        try:
            self.owner.engine.submit(request, self.inbox.sink, self.session.limit)
        except LLM42Error as refusal:
            if not self.may_turn:
                raise
            self._do_without(passing=isinstance(refusal, Overloaded))

    def _do_without(self, passing: bool = False) -> None:
        """Without the engine, which has failed. passing: it may be able to later."""
        shared, session = self.shared, self.session
        session.lost()
        self.turn()
        shared.held = 0
        if passing:
            shared.stays_until = len(session.committed) + AFTER * self.owner.ways.hold
        shared.refused = not passing

    async def advance(self) -> Delta | None:
        """A delta for each commit."""
        if not self.events:
            now = time.monotonic()  # the same for `due` and `deadline`: else one could pass between them
            if (window := self.session.due(now)) is not None:
                self.verifying = asyncio.create_task(self._verify(window))
            self.events.extend(await self._events(now))
        return self._take(self.events.popleft()) if self.events else None

    def _take(self, event: _Event) -> Delta | None:
        """What the client gets of an event."""
        delta = None
        for action in self._handle(event):
            delta = self._act(action, event) or delta
            if self.session.done:
                return delta
        if isinstance(event, Commit):
            self.count_progress()
        return delta

    async def _events(self, now: float) -> list[_Event]:
        """Waits until something can be done; takes everything that is there, candidates before answers.
        now: when `due` was asked last."""
        deadline = self.session.deadline(now)
        await self.inbox.wait(self.session.wanted(now), None if deadline is None else deadline - now)
        outputs, answers = self.inbox.take()
        return [*outputs, *answers]

    def _handle(self, event: _Event) -> list[Action]:
        if isinstance(event, LLM42Error):
            raise event
        if isinstance(event, Commit):
            return self.commit(event)
        if event.error is not None and self.may_turn:
            self._do_without()
            return []
        require_no_error(event)
        if event.cached_tokens is not None and not self.session.stats.verified_tokens:
            self.cached_tokens = event.cached_tokens
        return self.session.candidates(event.epoch, event.start, event.tokens)

    def _act(self, action: Action, event: _Event) -> Delta | None:
        engine, request = self.owner.engine, self.request
        if isinstance(action, Rollback):
            engine.rollback(request.request_id, action.output, action.epoch, action.limit)
        elif isinstance(action, Extend):
            engine.extend(request.request_id, action.limit)
        elif isinstance(action, Emit):
            cached, self.cached_tokens = self.cached_tokens, None
            delta = self.delta(action, event.fingerprint if isinstance(event, Commit) else None)
            return delta if cached is None else replace(delta, cached_tokens=cached)
        return None

    async def _verify(self, window: Window) -> None:
        """Puts what comes of one window into the inbox."""
        tracer, began = self.owner.tracer, time.monotonic()
        span = tracer.start("window", self.request.trace, candidates=len(window.candidates))
        answer: Commit | LLM42Error = LLM42Error("no attempt was made")
        try:
            answer = await verify(self.verifier, window, self.settings, tracer, span.trace, self.on_retry)
            self.inbox.put(answer)  # first: counting may fail, the answer must not be lost
        finally:
            span.end(accepted=answer.accepted if isinstance(answer, Commit) else -1)
        if isinstance(answer, Commit):
            self._count(window, answer, time.monotonic() - began)

    def _count(self, window: Window, commit: Commit, seconds: float) -> None:
        metrics = self.owner.metrics
        metrics.inc(m.WINDOWS)
        metrics.observe(m.WINDOW_TOKENS, len(window.candidates))
        metrics.observe(m.ACCEPTED_TOKENS, commit.accepted)
        metrics.observe(m.VERIFY_SECONDS, seconds)
        metrics.observe(m.VERIFY_QUEUE_SECONDS, commit.timings.queue_s)
