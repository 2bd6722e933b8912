"""Runs requests: connects an engine, a verifier client and a tokenizer, and streams deltas.

A deterministic request is a session (llm42/session.py) driven by two kinds of events, candidates and
commits; a best-effort request passes the engine's output through. Leaving the generator, for whatever
reason, frees everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from llm42 import metrics as m
from llm42.config import Settings
from llm42.engine.base import Engine, EngineOutput, Sink
from llm42.protocol import (
    Commit,
    Delta,
    Failure,
    FingerprintChanged,
    FinishReason,
    LLM42Error,
    Overloaded,
    Request,
    RequestRejected,
    TokenLogprob,
    VerificationFailed,
    VerifierUnavailable,
    Window,
)
from llm42.session import Action, Emit, Extend, Rollback, Session
from llm42.text import OutputText
from llm42.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EngineFailed(LLM42Error):
    """The fast path ended a request with an error (HTTP 500)."""

    code = "engine_error"


class VerifierClient(Protocol):
    """Where windows go. Answers come in the order of the windows."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Verifies windows. Raises VerifierUnavailable or Overloaded: both may be retried, verification is
        pure."""
        ...

    def release(self, request_id: str) -> None:
        """The request is over: the verifier may drop what it holds for it. Returns at once, never raises."""
        ...


class Generator:
    """One per replica."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        verifier: VerifierClient | None = None,
        metrics: m.Metrics | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.verifier = engine, tokenizer, settings, verifier
        self.metrics: m.Metrics = metrics or m.NullMetrics()

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Streams the output; the last delta has finish_reason and stats. Raises LLM42Error."""
        run = self._deterministic if request.deterministic else self._best_effort
        text = OutputText(self.tokenizer, request.stop, request.include_stop)
        text.push(request.output)  # the client has it: what follows is the same as if it had come from here
        async with aclosing(run(request, text)) as deltas:
            async for delta in deltas:
                yield delta

    async def _best_effort(self, request: Request, text: OutputText) -> AsyncGenerator[Delta, None]:
        inbox: asyncio.Queue[EngineOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        try:
            self.engine.submit(request, _into(inbox, loop), request.max_tokens)
            finish: FinishReason | None = None
            while finish is None:
                output = await inbox.get()
                if output.error is not None:
                    raise EngineFailed(output.error)
                finish = output.finish
                delta = self._delta(request, text, output.tokens, output.logprobs, finish)
                finish = delta.finish_reason
                yield delta
        finally:
            self.engine.abort(request.request_id)

    async def _deterministic(self, request: Request, text: OutputText) -> AsyncGenerator[Delta, None]:
        if self.verifier is None:
            raise VerifierUnavailable("this replica has no verifier")
        needed, room = len(request.prompt) + request.max_tokens, self.settings.verifier.kv_tokens
        if needed > room:
            raise RequestRejected(
                f"prompt and max_tokens need {needed} tokens of KV cache; a verifier has {room}"
                " (verifier.kv_tokens)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        drive = _Drive(self, request, text)
        try:
            async with aclosing(drive.run()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            drive.close()

    def _delta(
        self,
        request: Request,
        text: OutputText,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: FinishReason | None,
        session: Session | None = None,
        fingerprint: str | None = None,
    ) -> Delta:
        """Turns tokens into what the client gets; a stop string in their text ends the output."""
        piece, used = text.push(tokens)
        if finish is not None and not text.stopped:
            piece += text.flush()
        if text.stopped:
            finish = FinishReason.STOP
            if session is not None:
                session.stop()
        wanted = request.num_logprobs is not None
        return Delta(
            token_ids=tuple(tokens[:used]),
            text=piece,
            logprobs=tuple(logprobs[:used]) if wanted else (),
            token_texts=tuple(self.tokenizer.token_text(t) for t in tokens[:used]) if wanted else (),
            finish_reason=finish,
            fingerprint=fingerprint,
            stats=session.stats if session is not None and finish is not None else None,
        )


def _into(inbox: asyncio.Queue[Any], loop: asyncio.AbstractEventLoop) -> Sink:
    """A sink that hands the engine thread's outputs to a queue of the event loop."""

    def sink(output: EngineOutput) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(inbox.put_nowait, output)

    return sink


class _Drive:
    """One deterministic request in progress."""

    def __init__(self, owner: Generator, request: Request, text: OutputText) -> None:
        self.owner, self.request, self.text = owner, request, text
        self.settings = owner.settings.session
        self.session = Session(request, self.settings, time.monotonic())
        self.inbox: asyncio.Queue[EngineOutput | Commit | LLM42Error] = asyncio.Queue()
        self.verifying: asyncio.Task[None] | None = None
        self.fingerprint = request.fingerprint

    def close(self) -> None:
        """Frees the engine's and the verifier's share; safe at any moment."""
        self.owner.engine.abort(self.request.request_id)
        if self.verifying is not None:
            self.verifying.cancel()
        assert self.owner.verifier is not None
        self.owner.verifier.release(self.request.request_id)
        stats, metrics = self.session.stats, self.owner.metrics
        metrics.inc(m.VERIFIED_TOKENS, stats.verified_tokens)
        metrics.inc(m.ROLLBACKS, stats.rollbacks)
        metrics.inc(m.ROLLED_BACK_TOKENS, stats.rolled_back_tokens)

    async def run(self) -> AsyncGenerator[Delta, None]:
        """Yields one delta per commit until the output ends."""
        sink = _into(self.inbox, asyncio.get_running_loop())
        self.owner.engine.submit(self.request, sink, self.session.limit)
        while True:
            for event in await self._events():
                for action in self._handle(event):
                    delta = self._act(action, event)
                    if delta is not None:
                        yield delta
                    if self.session.done:
                        return
            window = self.session.due(time.monotonic())
            if window is not None:
                self.verifying = asyncio.create_task(self._verify(window))

    async def _events(self) -> list[EngineOutput | Commit | LLM42Error]:
        """Waits for the next event or for the commit deadline; takes everything that is there."""
        deadline = self.session.deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            events = [await asyncio.wait_for(self.inbox.get(), timeout)]
        except TimeoutError:
            return []
        while not self.inbox.empty():
            events.append(self.inbox.get_nowait())
        return events

    def _handle(self, event: EngineOutput | Commit | LLM42Error) -> list[Action]:
        if isinstance(event, LLM42Error):
            raise event
        if isinstance(event, Commit):
            # one reply, one fingerprint: no promise covers tokens of two different verifiers
            self.fingerprint = self.fingerprint or event.fingerprint
            if event.fingerprint != self.fingerprint:
                raise FingerprintChanged("the verifiers were replaced by others with another fingerprint")
            return self.session.commit(event, time.monotonic())
        if event.error is not None:
            raise EngineFailed(event.error)
        return self.session.candidates(event.epoch, event.start, event.tokens)

    def _act(self, action: Action, event: EngineOutput | Commit | LLM42Error) -> Delta | None:
        engine, request = self.owner.engine, self.request
        if isinstance(action, Rollback):
            engine.rollback(request.request_id, action.output, action.epoch, action.limit)
        elif isinstance(action, Extend):
            engine.extend(request.request_id, action.limit)
        elif isinstance(action, Emit):
            fingerprint = event.fingerprint if isinstance(event, Commit) else None
            return self.owner._delta(
                request,
                self.text,
                action.tokens,
                action.logprobs,
                self.session.finish,
                self.session,
                fingerprint,
            )
        return None

    async def _verify(self, window: Window) -> None:
        """Sends one window until it is answered; a retry is safe because verification is pure."""
        verifier, settings, metrics = self.owner.verifier, self.settings, self.owner.metrics
        assert verifier is not None
        began, error = time.monotonic(), LLM42Error("no attempt was made")
        for attempt in range(settings.verify_attempts):
            if attempt:
                self.session.stats.verify_retries += 1
                metrics.inc(m.VERIFY_RETRIES)
                await asyncio.sleep(min(2.0, 0.05 * 4**attempt))
            try:
                (answer,) = await asyncio.wait_for(verifier.verify([window]), settings.verify_timeout_s)
            except (VerifierUnavailable, Overloaded) as failure:
                # Overloaded would mean "refused before any token"
                error = VerifierUnavailable(str(failure))
                continue
            except TimeoutError:
                error = VerifierUnavailable(f"no answer from the verifier in {settings.verify_timeout_s:g} s")
                continue
            except Exception as failure:  # a bug, but the client must hear of it
                log.exception("verify call failed")
                error = VerificationFailed(f"{type(failure).__name__}: {failure}")
                break
            if isinstance(answer, Commit):
                self.inbox.put_nowait(answer)  # first: counting may fail, the answer must not be lost
                self._count(window, answer, time.monotonic() - began)
                return
            error = VerificationFailed(answer.message)
            error.code = answer.code
            break
        self.inbox.put_nowait(error)

    def _count(self, window: Window, commit: Commit, seconds: float) -> None:
        metrics, sent = self.owner.metrics, len(window.candidates)
        metrics.inc(m.WINDOWS)
        metrics.observe(m.WINDOW_TOKENS, sent)
        metrics.observe(m.VERIFY_SECONDS, seconds)
