"""A session against a simulated verifier and fast path: what happens next is drawn by the caller.

The verifier is a function of the tokens; the fast path honours the engine's contract (epochs, limit,
parking after an end token, late outputs of old epochs). `play` runs one request to its end and returns
every broken property.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from llm42.config import SessionSettings
from llm42.protocol import Commit, FinishReason, Request, TokenLogprob, Window
from llm42.session import Action, Emit, Extend, Rollback, Session

VOCAB, END = 40, 0
PROMPT = (3, 1, 4, 1, 5)


def canonical(tokens: Sequence[int]) -> int:
    """The verifier's next token."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


def logprob(tokens: Sequence[int], token: int) -> TokenLogprob:
    """A log-probability that depends on everything before."""
    return TokenLogprob(token, -hashlib.sha256(bytes((*tokens, token))).digest()[1] / 100)


def oracle(max_tokens: int) -> tuple[list[int], list[TokenLogprob], FinishReason]:
    """Decoding alone."""
    tokens, logprobs = list(PROMPT), []
    while True:
        token = canonical(tokens)
        logprobs.append(logprob(tokens, token))
        tokens.append(token)
        if token == END:
            return tokens[len(PROMPT) :], logprobs, FinishReason.STOP
        if len(logprobs) == max_tokens:
            return tokens[len(PROMPT) :], logprobs, FinishReason.LENGTH


def verify(window: Window) -> Commit:
    """What a real verifier answers."""
    tokens, logprobs, accepted = list(window.tokens), [], 0
    for candidate in (*window.candidates, None):
        token = canonical(tokens)
        logprobs.append(logprob(tokens, token))
        if token != candidate:
            break
        tokens.append(token)
        accepted += 1
    return Commit(window.request_id, len(window.tokens), accepted, token, tuple(logprobs), "fp")


@dataclass
class FastPath:
    """Proposes the canonical token with a given probability; outputs wait in `outbox` until delivered."""

    rng: Random
    accuracy: float
    limit: int
    output: list[int] = field(default_factory=list)
    epoch: int = 0
    parked: bool = False
    outbox: list[tuple[int, int, int]] = field(default_factory=list)

    def step(self) -> bool:
        """Decodes one token if it may."""
        if self.parked or len(self.output) >= self.limit:
            return False
        token = canonical((*PROMPT, *self.output))
        if self.rng.random() >= self.accuracy:
            token = self.rng.randrange(VOCAB)
        self.outbox.append((self.epoch, len(self.output), token))
        self.output.append(token)
        self.parked = token == END
        return True

    def apply(self, action: Action) -> None:
        """A rollback or a new limit."""
        if isinstance(action, Rollback):
            self.output, self.epoch, self.limit = list(action.output), action.epoch, action.limit
            self.parked = False
        elif isinstance(action, Extend):
            self.limit = action.limit


def play(
    seed: int,
    accuracy: float,
    max_tokens: int,
    settings: SessionSettings,
    make: Callable[..., Session] = Session,
    answer: Callable[[Window], Commit] = verify,
) -> list[str]:
    """One request under a schedule drawn from `seed`; returns the broken properties (none: all hold)."""
    rng, now = Random(seed), 0.0
    request = Request("r", PROMPT, max_tokens, deterministic=True, stop_token_ids=(END,))
    session = make(request, settings, now)
    fast = FastPath(rng, accuracy, session.limit)
    shown: list[int] = []
    logprobs: list[TokenLogprob] = []
    flight: Window | None = None
    broken: list[str] = []
    for _ in range(20000):
        if session.finish:
            break
        now += rng.random() * settings.commit_deadline_s / 4
        choice = rng.randrange(4)
        actions: list[Action] = []
        if choice <= 1:
            fast.step()
        elif choice == 2 and fast.outbox:
            epoch, start, token = fast.outbox.pop(0)
            actions = session.candidates(epoch, start, (token,))
        elif choice == 3 and flight is not None and rng.random() < 0.6:  # else: a lost call, sent again later
            before = len(session.committed)
            actions, flight = session.commit(answer(flight), now), None
            if len(session.committed) <= before:
                broken.append("a commit added nothing")
        for action in actions:
            if isinstance(action, Emit):
                shown += action.tokens
                logprobs += action.logprobs
            else:
                fast.apply(action)
        if shown != session.committed[: len(shown)]:
            broken.append("something was emitted that is not committed")
        if len(fast.output) > len(session.committed) + settings.lookahead + 1:
            broken.append("the fast path is beyond the lookahead bound")
        window = session.due(now)
        if window is not None:
            if flight is not None:
                broken.append("two windows in flight")
            flight = window
    else:
        broken.append("no end")
    want, want_logprobs, reason = oracle(max_tokens)
    if shown != want or logprobs != want_logprobs or session.finish != reason:
        broken.append(f"{shown} ({session.finish}) instead of {want} ({reason})")
    return broken
