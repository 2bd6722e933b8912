"""A deterministic request that the verifier decodes by itself: one window with credit, and renewals."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.actions import Action, Emit, Renew
from llm42.session.commits import joined
from llm42.session.drive import Drive, Owner
from llm42.session.inbox import NONE, Inbox
from llm42.session.verify_call import SEND_IN_FULL, Patience, judged
from llm42.telemetry import metrics as m
from llm42.telemetry.tracing import Span
from llm42.text.output_text import OutputText

_Answer = tuple[int, Commit | Failure | Exception]
"""What came, and of which try."""


class DirectDrive(Drive):
    """No engine takes part. A try lasts until something fails, or until session.verify_timeout_s have passed
    without a token and without a step of its verifier: one that works on others will come to this one. The
    next try begins behind what is committed."""

    def __init__(self, owner: Owner, request: Request, text: OutputText) -> None:
        super().__init__(owner, request, text)
        self.inbox: Inbox[_Answer] = Inbox()
        self.answers: deque[_Answer] = deque()
        """Taken out of the inbox and not looked at yet."""
        self.patience = Patience(self.settings)
        self.attempt = 0
        self.waits_since = 0.0
        """When the try began or, if later, when the last new token came."""
        self.span: Span | None = None
        """Of the window, until its first commit."""

    def close(self) -> None:
        """As of every drive."""
        self._answered(accepted=-1)
        super().close()

    def begin(self) -> None:
        """The verifier decodes."""
        self._send_due()

    async def advance(self) -> Delta | None:
        """A delta whenever commits have come."""
        if not self.answers:
            self._send_due()
            self.answers.extend(await self._answers())
        attempt, answer = self.answers.popleft()
        if isinstance(answer, Commit):
            return self._take(answer)
        if attempt == self.attempt:
            await self._fail(answer)
        return None

    def _send_due(self) -> None:
        if (window := self.session.due(time.monotonic())) is not None:
            self._send(window)

    def _send(self, window: Window) -> None:
        """Begins a try. What older ones still commit is welcome, what they fail at is not heard."""
        self._answered(accepted=-1)
        self.attempt += 1
        self.waits_since = time.monotonic()
        self.span = self.owner.tracer.start("window", self.request.trace, candidates=0)
        attempt = self.attempt

        def sink(answer: Commit | Failure | LLM42Error) -> None:
            self.inbox.post((attempt, answer))

        try:
            self.verifier.follow(window, sink)
        except Exception as refusal:
            self.inbox.put((attempt, refusal))

    def _renew(self, until: int) -> None:
        attempt, name = self.attempt, self.request.request_id

        def told(known: bool) -> None:
            if not known:
                unknown = Failure(name, SEND_IN_FULL, "the verifier does not hold the request any more")
                self.inbox.post((attempt, unknown))

        try:
            self.verifier.renew(name, until, told)
        except Exception as refusal:
            self.inbox.put((attempt, refusal))

    async def _answers(self) -> list[_Answer]:
        """Waits until something has come; commits that follow each other are one."""
        limit_s, name = self.settings.verify_timeout_s, self.request.request_id
        left_s = self.waits_since + limit_s - time.monotonic()
        while True:
            await self.inbox.wait(NONE, left_s)
            _, answers = self.inbox.take()
            left_s = limit_s - self.verifier.progressed_s(name)
            if answers or left_s <= 0.0:
                return list(_joined(answers)) or [(self.attempt, TimeoutError())]
            # says nothing new; but should the request not be known there, we hear of it
            self._renew(self.session.until)

    def _take(self, commit: Commit) -> Delta | None:
        """What the client gets of a commit; None when it says nothing new."""
        first = not self.session.stats.direct_tokens
        actions = self.commit(commit)
        delta = self._act(actions, commit.fingerprint)
        if delta is not None:
            self._count(commit)
            self.waits_since = time.monotonic()
            self.patience.renew()
            if first:
                delta = replace(delta, cached_tokens=self.session.stats.cached_prompt_tokens)
        return delta

    def _act(self, actions: list[Action], fingerprint: str) -> Delta | None:
        delta = None
        for action in actions:
            if isinstance(action, Emit):
                delta = self.delta(action, fingerprint)
            elif isinstance(action, Renew) and not self.session.done:  # before the client has read the delta
                self._renew(action.until)
        return delta

    async def _fail(self, failure: Failure | Exception) -> None:
        """Waits until there may be another try. Raises the error when there is none."""
        failed = judged(failure, self.settings.verify_timeout_s)
        self._answered(accepted=-1, error=failed.name)
        pause_s = self.patience.pause_s(failed.again)
        if pause_s is None:
            raise failed.error
        self.on_retry()
        self.attempt += 1
        self.session.lost()
        await asyncio.sleep(pause_s)

    def _count(self, commit: Commit) -> None:
        self.count_progress()
        if self.span is not None:
            metrics = self.owner.metrics
            metrics.inc(m.WINDOWS)
            metrics.observe(m.VERIFY_SECONDS, time.monotonic() - self.waits_since)
            metrics.observe(m.VERIFY_QUEUE_SECONDS, commit.timings.queue_s)
            self._answered(accepted=0)

    def _answered(self, **attributes: int | str) -> None:
        """Ends the window's span."""
        if self.span is not None:
            self.span.end(**attributes)
            self.span = None


def _joined(answers: list[_Answer]) -> Iterator[_Answer]:
    """The answers in order, commits that follow each other as one."""
    for is_commit, run in groupby(answers, lambda each: isinstance(each[1], Commit)):
        if is_commit:
            yield from ((0, commit) for commit in joined(c for _, c in run if isinstance(c, Commit)))
        else:
            yield from run
