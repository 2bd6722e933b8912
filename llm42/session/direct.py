"""A deterministic request that the verifier decodes by itself: one window with credit, and renewals. Who was
verified before brings its last candidates in that window."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from llm42.errors import LLM42Error, VerifierUnavailable
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.actions import Action, Emit, Renew
from llm42.session.commits import joined
from llm42.session.drive import Drive, Owner, Shared
from llm42.session.inbox import NONE, Inbox
from llm42.session.policy import WAIT_DEADLINES
from llm42.session.verify_call import SEND_IN_FULL, Again, Patience, judged
from llm42.session.ways import AFTER
from llm42.telemetry import metrics as m
from llm42.telemetry.tracing import Span
from llm42.text.output_text import OutputText

_Answer = tuple[int, Commit | Failure | Exception]
"""What came, and of which try."""


class DirectDrive(Drive):
    """No engine takes part. A try lasts until something fails, or until session.verify_timeout_s have passed
    without a token and without a step of its verifier: one that works on others will come to this one. The
    next try begins behind what is committed.

    Where the fast path is another way to go on in, nobody waits as long as that: a verifier that has no KV
    left for somebody who is decoded there has it for windows."""

    way = "direct"

    def __init__(self, owner: Owner, request: Request, text: OutputText, shared: Shared) -> None:
        super().__init__(owner, request, text, shared)
        self.inbox: Inbox[_Answer] = Inbox()
        self.answers: deque[_Answer] = deque()
        """Taken out of the inbox and not looked at yet."""
        self.patience = Patience(self.settings)
        self.attempt = 0
        self.waits_since = 0.0
        """When the try began or, if later, when the last new token came."""
        self.came_at = time.monotonic()
        """When the first try began or, if later, when the last new token came."""
        self.begun = False
        """A token of this try has come."""
        self.span: Span | None = None
        """Of the window, until its first commit."""

    def close(self) -> None:
        """As of every drive."""
        self._answered(accepted=-1)
        super().close()

    def leave(self) -> None:
        """The verifier decodes no further; what it holds is used by the windows to come."""
        self._answered(accepted=-1)
        self.verifier.stop(self.request.request_id)

    def begin(self) -> None:
        """The verifier decodes."""
        self._send_due()

    async def advance(self) -> Delta | None:
        """A delta whenever commits have come."""
        if not self.answers:
            self._send_due()
            self.answers.extend(await self._answers())
        if not self.answers:
            self.give_up(VerifierUnavailable("the verifier works on others alone"))
            return None
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
        self.begun = False  # its prompt may have to be computed once more, with all others'
        self.waits_since = time.monotonic()
        self.span = self.owner.tracer.start("window", self.request.trace, candidates=len(window.candidates))
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
        """Waits until something has come; commits that follow each other are one. Nothing: it is time to go
        another way."""
        limit_s, name = self.settings.verify_timeout_s, self.request.request_id
        until = self.waits_since + limit_s
        while True:
            await self.inbox.wait(NONE, min(until - time.monotonic(), self._unheard_s()))
            _, answers = self.inbox.take()
            if answers:
                return list(_joined(answers))
            if self._unheard_s() <= 0.0:
                return []
            if (now := time.monotonic()) < until:
                continue
            until = now + limit_s - self.verifier.progressed_s(name)
            if until <= now:
                return [(self.attempt, TimeoutError())]
            # says nothing new; but should the request not be known there, we hear of it
            self._renew(self.session.until)

    def _unheard_s(self) -> float:
        """How much longer, in seconds, no token need come before there is another way to go."""
        if not self.may_turn:
            return math.inf
        waited_s = time.monotonic() - self.came_at
        soon_s = WAIT_DEADLINES * self.settings.commit_deadline_s - waited_s
        if soon_s > 0.0:  # no less than that: it need not be worked out yet
            return soon_s
        return self.owner.ways.patience_s(self.session, self.begun, self.verifier) - waited_s

    def give_up(self, reason: LLM42Error) -> None:
        """Nothing has come for too long, though there is another way: goes that."""
        self.turn()
        self.shared.stays_until = len(self.session.committed) + AFTER * self.owner.ways.hold

    def _take(self, commit: Commit) -> Delta | None:
        """What the client gets of a commit; None when it says nothing new."""
        first = not self.session.stats.verified_tokens
        actions = self.commit(commit)
        delta = self._act(actions, commit.fingerprint)
        if delta is not None:
            self._count(commit)
            self.waits_since = self.came_at = time.monotonic()
            if not self.begun:
                self.begun = True
                self.owner.ways.promises.admitted(self.request.request_id)
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
        if failed.again is not Again.NO and self._unheard_s() <= 0.0:
            self.give_up(failed.error)
            return
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
            self._answered(accepted=commit.accepted)

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
