"""A stand-in for a verifier that goes on by itself: it asks a real one for one token at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from llm42.errors import LLM42Error, VerifierUnavailable
from llm42.protocol import Commit, Failure, Window
from llm42.session.commits import joined
from llm42.session.interfaces import Sink
from llm42.verifier.scheduler import Verifier
from tests.support.clients import Wrapped


@dataclass
class Followed:
    """One request under way."""

    window: Window
    sink: Sink
    until: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: bool = False

    @property
    def may_go_on(self) -> int:
        """Up to which length."""
        return min(self.until, self.window.max_len)


class Follower(Wrapped):
    """`verifier`: one whose thread runs. together: how many tokens a commit has at most; how many it has is
    drawn from `seed`. A subclass overrides `deliver` to lose or change commits."""

    def __init__(self, verifier: Verifier, seed: int = 0, together: int = 4) -> None:
        super().__init__(verifier)
        self.rng, self.together = random.Random(seed), together
        self.windows: list[Window] = []
        self.renewals: list[tuple[str, int]] = []
        self.followed: dict[str, Followed] = {}
        self.threads: list[threading.Thread] = []

    def follow(self, window: Window, sink: Sink) -> None:
        """Begins to decode in a thread of its own."""
        self._end(window.request_id)
        self.windows.append(window)
        one = Followed(window, sink, len(window.tokens) + 1 + window.credit)
        self.followed[window.request_id] = one
        self.threads.append(threading.Thread(target=self._decode, args=(one,), daemon=True))
        self.threads[-1].start()

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        """Lets a request go on."""
        self.renewals.append((request_id, until))
        one = self.followed.get(request_id)
        told(one is not None)
        if one is not None:
            with one.changed:
                one.until = max(one.until, until)
                one.changed.notify()

    def stop(self, request_id: str) -> None:
        """Ends it for now."""
        self._end(request_id)

    def release(self, request_id: str) -> None:
        """Ends it."""
        self._end(request_id)
        super().release(request_id)

    def _end(self, request_id: str) -> None:
        if (one := self.followed.pop(request_id, None)) is not None:
            with one.changed:
                one.over = True
                one.changed.notify()

    def deliver(self, one: Followed, commit: Commit) -> None:
        """Hands a commit over."""
        one.sink(commit)

    def ended(self, one: Followed, tokens: list[int]) -> bool:
        """Whether the output has ended with the last token."""
        return tokens[-1] in one.window.stop_token_ids or len(tokens) >= one.window.max_len

    def _decode(self, one: Followed) -> None:
        tokens, waiting, size = list(one.window.tokens), list[Commit](), 1
        while not one.over:
            if len(tokens) >= one.may_go_on:
                with one.changed:
                    one.changed.wait_for(lambda: one.over or len(tokens) < one.may_go_on, 60.0)
                continue
            answer = self._next(one, tokens)
            if not isinstance(answer, Commit):
                one.sink(answer)
                return
            tokens.append(answer.next_token)
            waiting.append(answer)
            ended = self.ended(one, tokens)
            if ended or len(waiting) >= size or len(tokens) >= one.may_go_on:
                (commit,) = joined(waiting)
                self.deliver(one, commit)
                waiting, size = [], self.rng.randrange(1, self.together + 1)
            if ended:
                return

    def _next(self, one: Followed, tokens: list[int]) -> Commit | Failure | LLM42Error:
        """What comes after the tokens."""
        plain = replace(one.window, tokens=tuple(tokens), credit=0, stop_token_ids=(), max_len=0)
        try:
            return self.verifier.submit(plain).result()
        except VerifierUnavailable as error:
            return error
