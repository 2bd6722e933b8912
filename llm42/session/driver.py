"""Runs requests: connects an engine, a verifier client and a tokenizer, and streams deltas.

A deterministic request is a session (llm42/session/machine.py) driven by two kinds of events, candidates and
commits, or by commits alone (direct.py); a best-effort request passes the engine's output through or, where
there is no engine, is decoded as a deterministic one. Leaving the generator, for whatever reason, frees
everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from llm42.config import Settings
from llm42.engine.base import SAME_ID, Engine, EngineOutput
from llm42.errors import LLM42Error, RequestRejected, VerifierUnavailable
from llm42.protocol import Commit, Delta, FinishReason, Request, Window
from llm42.session.actions import Action, Emit, Extend, Rollback
from llm42.session.direct import DirectDrive
from llm42.session.drive import Drive
from llm42.session.inbox import ANY, NONE, Inbox
from llm42.session.interfaces import VerifierClient
from llm42.session.outputs import EngineFailed, joined, prompt_alone, require_no_error, to_delta
from llm42.session.verify_call import verify
from llm42.telemetry import metrics as m
from llm42.telemetry.tracing import Tracer
from llm42.text.output_text import OutputText
from llm42.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
DELTA_S = 0.0004
"""A replica sends at most one best-effort delta per so many seconds: each costs its process about half of
that on the way to the client, and decoding needs the other half."""
KEEP_ALIVE_S = 5.0
"""Time between the deltas of a request whose client waits for the whole reply: they are keep-alives."""


async def _outputs(inbox: Inbox[LLM42Error]) -> list[EngineOutput]:
    """One or more outputs."""
    while True:
        await inbox.wait(ANY)
        if outputs := inbox.take()[0]:
            return outputs


class Generator:
    """One per replica."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        verifier: VerifierClient | None = None,
        metrics: m.Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.verifier = engine, tokenizer, settings, verifier
        self.metrics: m.Metrics = metrics or m.Metrics()
        self.tracer: Tracer = tracer or Tracer()
        self._streams = 0
        """Best-effort requests in progress whose clients read along."""
        self._decoded_directly: set[str] = set()
        """Ids of requests in progress that no engine knows."""

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Streams the output; the last delta has finish_reason and stats. Raises LLM42Error."""
        verified = request.deterministic or not self.settings.engine.decodes
        return self._verified(request) if verified else self._best_effort(request)

    @contextmanager
    def _text(self, request: Request) -> Iterator[OutputText]:
        """What its output becomes; while it lasts, the request counts as one in progress."""
        text = OutputText.of(self.tokenizer, request)
        text.push(request.output)  # the client has it: what follows is the same as if it had come from here
        read_along = request.stream and not request.deterministic
        self._streams += read_along
        try:
            yield text
        finally:
            self._streams -= read_along

    async def _best_effort(self, request: Request) -> AsyncGenerator[Delta, None]:
        with self._text(request) as text, self._engine_of(request) as inbox:
            if not request.max_tokens:  # the prompt alone is asked for; an engine makes one token at least
                self.engine.submit(replace(request, max_tokens=1), inbox.sink, 1)
                yield prompt_alone((await _outputs(inbox))[0])
                return
            self.engine.submit(request, inbox.sink, request.max_tokens)
            finish: FinishReason | None = None
            while finish is None:
                outputs = await _outputs(inbox)
                failed = outputs.pop() if outputs[-1].error is not None else None
                if outputs:
                    delta = self._delta(request, text, joined(outputs))
                    finish = delta.finish_reason
                    yield delta
                if failed is not None and finish is None:
                    require_no_error(failed)
                if finish is None and (delay_s := self._text_delay_s(request)):
                    await inbox.wait(NONE, delay_s)

    @contextmanager
    def _engine_of(self, request: Request) -> Iterator[Inbox[LLM42Error]]:
        """Where the engine's outputs come; afterwards it has the request no more."""
        try:
            yield Inbox()
        finally:
            self.engine.abort(request.request_id)

    def _delta(self, request: Request, text: OutputText, output: EngineOutput) -> Delta:
        delta = to_delta(self.tokenizer, request, text, output.tokens, output.logprobs, output.finish)
        if output.cached_tokens is None and output.prompt_logprobs is None:
            return delta
        return replace(delta, prompt_logprobs=output.prompt_logprobs, cached_tokens=output.cached_tokens)

    def pause_s(self, request: Request) -> float:
        """How long tokens may wait for each other, of best effort and of whole replies; the first and last
        never do."""
        interval_s = self.settings.server.stream_interval_s
        if not interval_s:
            return 0.0
        return max(interval_s, self._streams * DELTA_S) if request.stream else max(interval_s, KEEP_ALIVE_S)

    def _text_delay_s(self, request: Request) -> float:
        """How long tokens wait before their text is made. Not at all where there are stop strings: one must
        be seen at once, or its request decodes on. The caller joins such deltas afterwards."""
        return 0.0 if request.stop else self.pause_s(request)

    def _require_kv(self, request: Request, verifier: VerifierClient) -> None:
        """Raises RequestRejected for what no verifier could hold."""
        needed = len(request.prompt) + request.max_tokens
        room = verifier.kv_tokens or self.settings.verifier.kv_tokens
        if room is not None and needed > room:
            raise RequestRejected(
                f"prompt and max_tokens need {needed} tokens of KV cache; a verifier has {room}"
                " (verifier.kv_tokens)",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def _verified(self, request: Request) -> AsyncGenerator[Delta, None]:
        with self._text(request) as text, self._drive(request, text) as drive:
            if not request.output and (request.prompt_logprobs is not None or not request.max_tokens):
                yield await drive.score_prompt()
            if request.max_tokens:
                drive.begin()
                while not drive.session.done:
                    if (delta := await drive.advance()) is not None:
                        yield delta

    @contextmanager
    def _drive(self, request: Request, text: OutputText) -> Iterator[Drive]:
        if self.verifier is None:
            raise VerifierUnavailable("this replica has no verifier")
        self._require_kv(request, self.verifier)
        direct = self.settings.session.mode == "direct"
        if direct and request.request_id in self._decoded_directly:
            raise EngineFailed(SAME_ID)
        if direct:
            self._decoded_directly.add(request.request_id)
        drive: Drive = (DirectDrive if direct else _Drive)(self, request, text)
        try:
            yield drive
        finally:
            self._decoded_directly.discard(request.request_id)
            drive.close()


_Event = EngineOutput | Commit | LLM42Error


class _Drive(Drive):
    """One deterministic request in progress whose candidates come from an engine."""

    owner: Generator

    def __init__(self, owner: Generator, request: Request, text: OutputText) -> None:
        super().__init__(owner, request, text)
        self.inbox: Inbox[Commit | LLM42Error] = Inbox(request.stop_token_ids)
        self.events: deque[_Event] = deque()
        """Taken out of the inbox and not looked at yet."""
        self.verifying: asyncio.Task[None] | None = None
        self.cached_tokens: int | None = None
        """What the engine had in its cache, until a delta has reported it."""

    def close(self) -> None:
        """As of every drive; the engine's share, too."""
        self.owner.engine.abort(self.request.request_id)
        if self.verifying is not None:
            self.verifying.cancel()
        super().close()

    def begin(self) -> None:
        """The engine decodes."""
        self.owner.engine.submit(self.request, self.inbox.sink, self.session.limit)

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
        require_no_error(event)
        if event.cached_tokens is not None:
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
