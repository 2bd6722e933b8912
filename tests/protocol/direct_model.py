"""A session in mode direct against a simulated verifier whose commits are lost, repeated, out of order and
overlap: what happens next is drawn by the caller. `play_direct` runs one request to its end and returns every
broken property."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from llm42.config import SessionSettings
from llm42.protocol import Commit, Request, TokenLogprob, Window
from llm42.session.actions import Emit, Renew, Resend
from llm42.session.machine import Session
from tests.protocol.session_model import END, canonical, logprob, oracle, prompt_of


def commit_of(tokens: Sequence[int], base: int, end: int) -> Commit:
    """What the verifier says of tokens[base:end], all of them decoded by itself."""
    logprobs = tuple(logprob(tokens[:at], tokens[at]) for at in range(base, end))
    return Commit("r", base, 0, tokens[base], logprobs, "fp", decoded=tuple(tokens[base + 1 : end]))


@dataclass
class Decoding:
    """A verifier that decodes under credit; its commits lie in `sent` until they are delivered."""

    rng: Random
    tokens: list[int] = field(default_factory=list)
    told: int = 0
    """Length up to which it has sent commits."""
    first: int = 0
    """Length of the first window: it may speak of what lies behind it."""
    until: int = 0
    max_len: int = 0
    sent: list[Commit] = field(default_factory=list)

    def follow(self, window: Window) -> None:
        """A window, new or in full again. The model computes anew what it did not hold."""
        self.tokens, self.told = list(window.tokens), len(window.tokens)
        self.first = self.first or self.told
        self.until, self.max_len = self.told + 1 + window.credit, window.max_len

    def step(self) -> None:
        """Decodes a token if it may, and perhaps tells what it has."""
        ended = self.told and len(self.tokens) > self.first and self.tokens[-1] == END
        if not ended and len(self.tokens) < min(self.until, self.max_len):
            self.tokens.append(canonical(self.tokens))
        if len(self.tokens) > self.told and self.rng.random() < 0.4:
            begin = self.told
            if self.rng.random() < 0.3:  # it says some of it again
                begin = self.rng.randrange(self.first, self.told + 1)
            self.sent.append(commit_of(self.tokens, begin, len(self.tokens)))
            self.told = len(self.tokens)

    def deliver(self) -> Commit | None:
        """One of the commits under way: in order, or not, or none; and one may come again."""
        at = 0 if self.rng.random() < 0.6 else self.rng.randrange(len(self.sent))
        fate = self.rng.random()
        commit = self.sent[at]
        if fate < 0.85:
            del self.sent[at]
        return None if fate < 0.15 else commit


def play_direct(
    seed: int, max_tokens: int, credit: int, make: Callable[..., Session] = Session, output: int = 0
) -> list[str]:
    """One request under a schedule drawn from `seed`; returns the broken properties (none: all hold).
    output: how many tokens the client has already."""
    rng = Random(seed)
    prompt = prompt_of(seed)
    want, want_logprobs, reason = oracle(max_tokens, prompt)
    had = min(output, len(want) - 1)
    request = Request(
        "r", prompt, max_tokens, deterministic=True, stop_token_ids=(END,), output=(*want[:had],)
    )
    session = make(request, SessionSettings(mode="direct", credit=credit), 0.0)
    verifier, broken = Decoding(rng), list[str]()
    shown: list[int] = list(want[:had])
    logprobs: list[TokenLogprob] = list(want_logprobs[:had])
    windows = idle = 0
    for _ in range(20000):
        if session.finish:
            break
        if (window := session.due(0.0)) is not None:
            windows += 1
            broken += wrong_window(window, request, shown, credit)
            verifier.follow(window)
        verifier.step()
        commit = verifier.deliver() if verifier.sent and rng.random() < 0.5 else None
        idle = idle + 1 if commit is None else 0
        if idle > 30:  # the time is over: whoever drives the session asks again
            session.lost()
            idle = 0
        for action in session.commit(commit, 0.0) if commit is not None else ():
            if isinstance(action, Emit):
                shown += action.tokens
                logprobs += action.logprobs
            elif isinstance(action, Renew):
                if not verifier.until < action.until <= len(prompt) + max_tokens:
                    broken.append(f"{verifier.until} became {action.until}")
                verifier.until = max(verifier.until, action.until)
            elif not isinstance(action, Resend):
                broken.append(f"{action} without a fast path")
        if shown != want[: len(shown)] or shown != session.committed:
            broken.append(f"{shown} is not the beginning of {want}")
            break
    else:
        broken.append("no end")
    if shown != want or logprobs != want_logprobs or session.finish != reason:
        broken.append(f"{shown} ({session.finish}) instead of {want} ({reason})")
    stats = session.stats
    if (stats.windows, stats.direct_tokens, stats.verified_tokens) != (windows, *[len(want) - had] * 2):
        broken.append(f"{stats} for {windows} windows and {len(want) - had} tokens")
    return broken


def wrong_window(window: Window, request: Request, shown: Sequence[int], credit: int) -> list[str]:
    """What is wrong with a window in full."""
    asked = window.tokens, window.candidates, window.credit, window.stop_token_ids, window.max_len
    right = (*request.prompt, *shown), (), credit, (END,), len(request.prompt) + request.max_tokens
    return [] if asked == right else [f"{asked} instead of {right}"]
