"""Runs requests: connects an engine, a verifier client and a tokenizer, and streams deltas.

A deterministic request is a session (llm42/session/machine.py) driven by two kinds of events, candidates and
commits (verify.py), or by commits alone (direct.py), and may change from the one to the other; a best-effort
request passes the engine's output through or, where there is no engine, is decoded as a deterministic one.
Leaving the generator, for whatever reason, frees everything.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.errors import RequestRejected, VerifierUnavailable
from llm42.protocol import Delta, Request
from llm42.session.best_effort import BestEffort
from llm42.session.course import Course
from llm42.session.interfaces import VerifierClient
from llm42.session.policy import choose, choose_best_effort
from llm42.session.ways import Decide, Ways
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
        decide: Decide = choose,
        decide_best_effort: Decide = choose_best_effort,
    ) -> None:
        """decide, decide_best_effort: say which way a request takes, with session.mode auto."""
        self.engine, self.tokenizer, self.settings, self.verifier = engine, tokenizer, settings, verifier
        self.metrics: m.Metrics = metrics or m.Metrics()
        self.tracer: Tracer = tracer or Tracer()
        self._streams = 0
        """Best-effort requests in progress whose clients read along."""
        self.ways = Ways(settings, engine, decide, decide_best_effort)
        if verifier is not None:
            self.ways.meet(verifier)

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
        with (
            self.ways.counted(request, False),
            self._text(request) as text,
            self._passing(request, text) as run,
        ):
            if not request.max_tokens:
                yield await run.prompt_alone()
                return
            run.begin()
            output = 0
            while not run.done:
                if (delta := await run.advance()) is not None:
                    self.ways.came(len(delta.token_ids))
                    output += len(delta.token_ids)
                    yield delta
            self.ways.ended_best_effort(output)

    @contextmanager
    def _passing(self, request: Request, text: OutputText) -> Iterator[BestEffort]:
        run = BestEffort(self, request, text)
        try:
            yield run
        finally:
            run.close()

    def pause_s(self, request: Request) -> float:
        """How long tokens may wait for each other, of best effort and of whole replies; the first and last
        never do."""
        interval_s = self.settings.server.stream_interval_s
        if not interval_s:
            return 0.0
        return max(interval_s, self._streams * DELTA_S) if request.stream else max(interval_s, KEEP_ALIVE_S)

    def text_delay_s(self, request: Request) -> float:
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
                " (verifier.kv_tokens): shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def _verified(self, request: Request) -> AsyncGenerator[Delta, None]:
        with (
            self.ways.counted(request, True),
            self._text(request) as text,
            self._course(request, text) as run,
        ):
            if not request.output and (request.prompt_logprobs is not None or not request.max_tokens):
                yield await run.score_prompt()
            if request.max_tokens:
                run.begin()
                while not run.done:
                    if (delta := await run.advance()) is not None:
                        self.ways.came(len(delta.token_ids))
                        yield delta

    @contextmanager
    def _course(self, request: Request, text: OutputText) -> Iterator[Course]:
        if self.verifier is None:
            raise VerifierUnavailable("this replica has no verifier")
        self._require_kv(request, self.verifier)
        run = Course(self, request, text)
        try:
            yield run
        finally:
            run.close()
