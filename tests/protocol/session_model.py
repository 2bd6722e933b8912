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
from llm42.protocol import Commit, FinishReason, Request, RequestStats, TokenLogprob, Window
from llm42.session.actions import Action, Emit, Extend, Rollback
from llm42.session.machine import Session

VOCAB, END = 40, 0
PROMPT = (3, 1, 4, 1, 5)


def prompt_of(seed: int) -> tuple[int, ...]:
    """One of as many prompts as there are tokens: their outputs end after 1 to some hundred tokens."""
    return (3, 1, 4, 1, seed % VOCAB)


def canonical(tokens: Sequence[int]) -> int:
    """The verifier's next token."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


def logprob(tokens: Sequence[int], token: int) -> TokenLogprob:
    """A log-probability that depends on everything before."""
    return TokenLogprob(token, -hashlib.sha256(bytes((*tokens, token))).digest()[1] / 100)


def oracle(
    max_tokens: int, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], list[TokenLogprob], FinishReason]:
    """Decoding alone."""
    tokens, logprobs = list(prompt), []
    while True:
        token = canonical(tokens)
        logprobs.append(logprob(tokens, token))
        tokens.append(token)
        if token == END:
            return tokens[len(prompt) :], logprobs, FinishReason.STOP
        if len(logprobs) == max_tokens:
            return tokens[len(prompt) :], logprobs, FinishReason.LENGTH


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
    prompt: tuple[int, ...]
    accuracy: float
    limit: int
    output: list[int] = field(default_factory=list)
    epoch: int = 0
    parked: bool = False
    outbox: list[tuple[int, int, int]] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    """The part of `output` that the session has been told."""

    def step(self) -> bool:
        """Decodes one token if it may."""
        if self.parked or len(self.output) >= self.limit:
            return False
        token = canonical((*self.prompt, *self.output))
        if self.rng.random() >= self.accuracy:
            token = self.rng.randrange(VOCAB)
        self.outbox.append((self.epoch, len(self.output), token))
        self.output.append(token)
        self.parked = token == END
        return True

    def deliver(self, count: int) -> tuple[int, int, list[int]]:
        """(epoch, start, tokens) of up to `count` waiting tokens of one epoch, the oldest first."""
        epoch, start, _ = self.outbox[0]
        same = [token for e, _, token in self.outbox[:count] if e == epoch]
        del self.outbox[: len(same)]
        if epoch == self.epoch:
            self.delivered += same
        return epoch, start, same

    def apply(self, action: Action) -> None:
        """A rollback or a new limit."""
        if isinstance(action, Rollback):
            self.delivered = list(action.output)
            self.output, self.epoch, self.limit = list(action.output), action.epoch, action.limit
            self.parked = False
        elif isinstance(action, Extend):
            self.limit = action.limit


@dataclass
class Count:
    """What a request cost, counted from the delivered and the committed tokens alone."""

    windows: int = 0
    rollbacks: int = 0
    rolled_back_tokens: int = 0
    verified_tokens: int = 0
    candidate_tokens: int = 0

    def compare(self, told: list[int], committed: list[int]) -> bool:
        """Counts a rollback if the tokens that were told disagree with the committed ones."""
        at = next((i for i, (a, b) in enumerate(zip(told, committed, strict=False)) if a != b), None)
        if at is None:
            return False
        self.rollbacks += 1
        self.rolled_back_tokens += len(told) - at
        return True

    def differences(self, stats: RequestStats) -> list[str]:
        """The session's counters that are wrong."""
        return [
            f"{name} is {getattr(stats, name)} instead of {value}"
            for name, value in vars(self).items()
            if getattr(stats, name) != value
        ]


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
    request = Request("r", prompt_of(seed), max_tokens, deterministic=True, stop_token_ids=(END,))
    session = make(request, settings, now)
    fast, count = FastPath(rng, request.prompt, accuracy, session.limit), Count()
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
            epoch, start, tokens = fast.deliver(rng.choice((1, 1, 2, 5)))
            count.candidate_tokens += len(tokens) if epoch == fast.epoch else 0
            actions = session.candidates(epoch, start, tokens)
        elif choice == 3 and flight is not None and rng.random() < 0.6:  # else: a lost call, sent again later
            before = len(session.committed)
            actions, flight = session.commit(answer(flight), now), None
            if len(session.committed) <= before:
                broken.append("a commit added nothing")
        must_roll_back = count.compare(fast.delivered, session.committed)
        if not session.finish and must_roll_back != any(isinstance(a, Rollback) for a in actions):
            broken.append("a rollback is missing or needless")
        for action in actions:
            if isinstance(action, Emit):
                shown += action.tokens
                logprobs += action.logprobs
            else:
                fast.apply(action)
        if shown != session.committed[: len(shown)]:
            broken.append("something was emitted that is not committed")
        if not session.finish and any(
            a != b for a, b in zip(fast.delivered, session.committed, strict=False)
        ):
            broken.append("the fast path goes on from tokens that are not committed")
        if len(fast.output) > len(session.committed) + settings.lookahead:
            broken.append("the fast path is beyond the lookahead bound")
        window = session.due(now)
        if window is not None:
            if flight is not None:
                broken.append("two windows in flight")
            flight = window
            count.windows += 1
    else:
        broken.append("no end")
    want, want_logprobs, reason = oracle(max_tokens, request.prompt)
    if shown != want or logprobs != want_logprobs or session.finish != reason:
        broken.append(f"{shown} ({session.finish}) instead of {want} ({reason})")
    count.verified_tokens = len(want)
    return broken + count.differences(session.stats)
