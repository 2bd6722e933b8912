"""A best-effort request: an engine's output is passed through. With session.mode auto a verifier may decode a
part of it with the deterministic ones, where that is faster for it; whatever goes wrong there, the engine
goes on behind what the client has."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Protocol

from llm42.engine.base import EngineOutput
from llm42.errors import LLM42Error, VerificationFailed, VerifierUnavailable
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.actions import Action
from llm42.session.direct import DirectDrive
from llm42.session.drive import Owner, Shared
from llm42.session.inbox import ANY, NONE, Inbox
from llm42.session.load import Way
from llm42.session.outputs import joined, prompt_alone, require_no_error, to_delta
from llm42.session.policy import WAIT_DEADLINES
from llm42.session.verify_call import judged
from llm42.session.ways import AFTER, may_move
from llm42.telemetry import metrics as m
from llm42.text.output_text import OutputText

log = logging.getLogger(__name__)
ASKS, ASK_S = 10, 0.1
"""Before its first token one asks so many times, so far apart, whether it goes to a verifier: requests that
come at once are planned as they grow, and the first of them did not know of the others."""


class Pacer(Owner, Protocol):
    """What is used of a generator."""

    def text_delay_s(self, request: Request) -> float:
        """How long tokens wait before their text is made."""


class Moved(DirectDrive):
    """A verifier decodes it for as long as nothing goes wrong: any failure is raised at once."""

    def count_progress(self) -> None:
        """Not among what deterministic requests cost."""
        now, before = self.session.stats, self.shared.counted
        self.owner.metrics.inc(m.MOVED_TOKENS, now.verified_tokens - before.verified_tokens)
        self.shared.counted = replace(now)

    def commit(self, commit: Commit) -> list[Action]:
        """A verifier that contradicts itself ends nothing here: the engine goes on after the
        VerificationFailed that this raises."""
        try:
            return super().commit(commit)
        except ValueError as error:
            log.exception("a verifier's answer to a best-effort request does not fit")
            raise VerificationFailed(str(error)) from error

    def _send(self, window: Window) -> None:
        """Who was promised tokens of a verifier is never kept from them by who was not."""
        super()._send(replace(window, yields=True))

    def _unheard_s(self) -> float:
        """Whatever the reason is: it was moved to be faster. Before its first token others' prompts may be
        what it waits for, while steps are completed."""
        if not self.may_turn:
            return math.inf
        waited_s = time.monotonic() - self.came_at
        patience_s = WAIT_DEADLINES * self.settings.commit_deadline_s
        if self.begun or waited_s < patience_s:
            return patience_s - waited_s
        request = self.request
        moves_s = patience_s - self.verifier.progressed_s(request.request_id)
        longer_s = self.owner.ways.patience_of_best_effort_s(request, len(request.output), self.verifier)
        return min(moves_s, longer_s - waited_s)

    def give_up(self, reason: LLM42Error) -> None:
        """It had to wait."""
        raise reason

    async def _fail(self, failure: Failure | Exception) -> None:
        raise judged(failure, self.settings.verify_timeout_s).error


class BestEffort:
    """Belongs to an event loop."""

    def __init__(self, owner: Pacer, request: Request, text: OutputText) -> None:
        self._owner, self._request, self._text = owner, request, text
        self._inbox: Inbox[LLM42Error] = Inbox()
        self._output = [*request.output]
        self._held = self._decided_at = self._changes = 0
        self._asks = ASKS
        self._pause_s = 0.0
        """Before the next delta is made."""
        self._told = False
        """How much of the prompt was cached has been said."""
        self._moved: Moved | None = None
        self._failed: EngineOutput | None = None
        self._stays = owner.verifier is None or owner.ways.pinned or not may_move(request)
        self.done = False

    def close(self) -> None:
        """Frees everything; safe at any moment."""
        self._owner.engine.abort(self._request.request_id)
        if self._moved is not None:
            self._moved.close()

    async def prompt_alone(self) -> Delta:
        """All of the answer where no token is wanted: an engine makes one at least."""
        self._owner.engine.submit(replace(self._request, max_tokens=1), self._inbox.sink, 1)
        return prompt_alone((await self._outputs())[0])

    def begin(self) -> None:
        """Asks for tokens. The engine says in any case whether it takes the request, but computes nothing of
        one that is not its own: two processes with work share a GPU in halves."""
        if self._goes(None) != "direct":
            self._submit()
            return
        self._owner.engine.check(self._request)
        self._move()

    async def advance(self) -> Delta | None:
        """Waits until something has come: the delta that it makes, if any. Raises LLM42Error."""
        if self._moved is not None:
            return await self._advance_moved(self._moved)
        if self._failed is not None:
            require_no_error(self._failed)
        if self._pause_s:
            await self._inbox.wait(NONE, self._pause_s)
        if self._asks and not (self._output or self._stays):
            self._asks -= 1
            await self._inbox.wait(ANY, ASK_S)
            if self._inbox.is_empty:
                if self._goes(None) == "direct":
                    self._move()
                return None
        outputs = await self._outputs()
        self._failed = outputs.pop() if outputs[-1].error is not None else None
        if not outputs:
            return None
        delta = self._delta(joined(outputs))
        self._pause_s = 0.0 if self.done else self._owner.text_delay_s(self._request)
        if self._may_change() and self._goes("verify") == "direct":
            self._move()
        return delta

    # ---- on the engine

    def _submit(self) -> None:
        """The engine goes on behind what the client has."""
        request = replace(self._request, output=tuple(self._output))
        self._owner.engine.submit(request, self._inbox.sink, request.max_tokens)

    async def _outputs(self) -> list[EngineOutput]:
        """One or more."""
        while True:
            await self._inbox.wait(ANY)
            if outputs := self._inbox.take()[0]:
                return outputs

    def _delta(self, output: EngineOutput) -> Delta:
        delta = to_delta(
            self._owner.tokenizer, self._request, self._text, output.tokens, output.logprobs, output.finish
        )
        if output.cached_tokens is not None or output.prompt_logprobs is not None:
            of_prompt = output.prompt_logprobs, output.cached_tokens
            delta = replace(delta, prompt_logprobs=of_prompt[0], cached_tokens=of_prompt[1])
        return self._taken(delta)

    def _taken(self, delta: Delta) -> Delta:
        """What the client gets of it; of the prompt it hears once."""
        self._output += delta.token_ids
        self.done = delta.finish_reason is not None
        told, self._told = self._told, self._told or delta.cached_tokens is not None
        return replace(delta, cached_tokens=None) if told and delta.cached_tokens is not None else delta

    # ---- moved to a verifier

    def _may_change(self) -> bool:
        """Whether so many tokens have come since the last decision; the more changes, the later. It may soon
        go back: deterministic requests want its place."""
        later = 0 if self._moved is not None else min(self._changes, 16)
        early = len(self._output) < self._decided_at + (self._owner.ways.hold << later)
        return not (early or self._stays or self.done or self._failed is not None)

    def _goes(self, way: Way | None) -> Way:
        owner, output = self._owner, len(self._output)
        if self._stays or owner.verifier is None:
            return "verify"
        self._decided_at = output
        return owner.ways.next_best_effort(self._request, output, way, self._held, owner.verifier)

    def _move(self) -> None:
        """What the engine has said and nobody has heard is decoded anew."""
        owner, settings = self._owner, self._owner.settings.session
        owner.engine.abort(self._request.request_id)
        self._inbox = Inbox()
        self._held = len(self._request.prompt) + len(self._output) if self._output else 0
        request = replace(self._request, output=tuple(self._output), deterministic=False)
        shared = Shared.of(request, settings)
        shared.session.turn("direct")
        self._changes += 1
        owner.ways.moved.add(request.request_id)
        self._moved = Moved(owner, request, self._text, shared)
        self._moved.begin()

    async def _advance_moved(self, moved: Moved) -> Delta | None:
        ways, begun = self._owner.ways, moved.begun
        try:
            delta = await moved.advance()
        except LLM42Error as error:
            ways.returned(type(error).__name__)
            if isinstance(error, VerifierUnavailable):  # else it is about this request alone
                ways.came_back()
            self._go_back(moved)
            self._decided_at = len(self._output) + AFTER * ways.hold
            return None
        if delta is None:
            return None
        if not begun:
            ways.came_on()
        delta = self._taken(delta)
        if self._may_change() and self._goes("direct") != "direct":
            ways.returned("plan")
            self._go_back(moved)
        return delta

    def _go_back(self, moved: Moved) -> None:
        self._moved, self._asks = None, 0
        self._changes += 1
        self._owner.ways.promises.end(self._request.request_id)
        self._owner.ways.moved.discard(self._request.request_id)
        moved.close()
        self._submit()
