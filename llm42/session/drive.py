"""One deterministic request in progress: what both ways to its commits share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Protocol

from llm42.config import SessionSettings, Settings
from llm42.engine.base import Engine
from llm42.errors import FingerprintChanged
from llm42.protocol import Commit, Delta, FinishReason, Request, RequestStats
from llm42.session.actions import Action, Emit
from llm42.session.interfaces import VerifierClient
from llm42.session.load import Way
from llm42.session.machine import Session
from llm42.session.outputs import to_delta
from llm42.session.prompt_scores import score_prompt
from llm42.session.ways import Ways
from llm42.telemetry import metrics as m
from llm42.telemetry.tracing import Tracer
from llm42.text.output_text import OutputText
from llm42.text.tokenizer import Tokenizer


class Owner(Protocol):
    """What a drive uses of its generator."""

    tokenizer: Tokenizer
    settings: Settings
    engine: Engine
    verifier: VerifierClient | None
    ways: Ways
    metrics: m.Metrics
    tracer: Tracer


@dataclass(slots=True)
class Shared:
    """What of a request outlives a change of its way."""

    session: Session
    fingerprint: str | None
    counted: RequestStats = field(default_factory=RequestStats)
    dropped: int = 0
    """Of the session's, those that have been counted."""
    held: int = 0
    """Tokens that the engine had computed when it was left."""
    decided_at: int = 0
    """Length of the output at the last decision on its way."""
    changes: int = 0
    """How often it has changed its way."""
    stays_until: float = 0.0
    """Length of the output up to which nobody is asked again."""
    refused: bool = False
    """The engine will not have it."""

    @classmethod
    def of(cls, request: Request, settings: SessionSettings) -> Shared:
        """Of a request that begins."""
        decided_at = len(request.output)
        session = Session(request, settings, time.monotonic())
        return cls(session, request.fingerprint, decided_at=decided_at)


class Drive(ABC):
    """Joins a session, a verifier and what the client gets, in one way: when the session takes another one,
    a drive of that goes on with what is shared. Belongs to an event loop."""

    way: Way

    def __init__(self, owner: Owner, request: Request, text: OutputText, shared: Shared) -> None:
        self.owner, self.request, self.text, self.shared = owner, request, text, shared
        self.settings = owner.settings.session
        self.session = shared.session
        self.asks = False
        """A commit has come since it was last asked whether the way changes."""

    @property
    def verifier(self) -> VerifierClient:
        """The client that everything is asked through; without one no drive begins."""
        assert self.owner.verifier is not None
        return self.owner.verifier

    @abstractmethod
    def begin(self) -> None:
        """Asks for tokens."""

    @abstractmethod
    async def advance(self) -> Delta | None:
        """Waits until something has come and takes it in: the delta that it makes, if any. To be called until
        the session is done or has another way. No generator: each would be resumed for every delta on its
        way. Raises LLM42Error."""

    @abstractmethod
    def leave(self) -> None:
        """Frees what the other way does not go on with. Never raises."""

    def close(self) -> None:
        """The request is over: frees the verifier's share, too; safe at any moment."""
        self.verifier.release(self.request.request_id)
        self.count_progress()

    @property
    def turned(self) -> bool:
        """Whether the session goes on in another way."""
        return self.session.way != self.way

    @property
    def may_turn(self) -> bool:
        """Whether there is another way to go on in."""
        return not self.owner.ways.pinned and not self.shared.refused

    def turn_if_cheaper(self) -> None:
        """To be called when what `advance` gave has been taken. Behind a commit, and so many tokens after the
        last decision, the policy says whether the way changes; the more often it has, the later again."""
        if not self.asks:
            return
        self.asks = False
        ways, session, shared = self.owner.ways, self.session, self.shared
        output = len(session.committed)
        early = output < max(shared.decided_at + (ways.hold << min(shared.changes, 16)), shared.stays_until)
        if early or not self.may_turn or session.done or self.turned:
            return
        shared.decided_at = output
        if ways.next(session, session.way, shared.held, self.verifier) != session.way:
            self.turn()

    def turn(self) -> None:
        """The session goes on in the other way."""
        self.leave()
        self.session.turn("direct" if self.way == "verify" else "verify")
        self.shared.changes += 1
        if self.session.way == "verify":
            self.owner.ways.promises.end(self.request.request_id)
        self.owner.metrics.inc(m.WAY_CHANGES, way=self.session.way)

    def count_progress(self) -> None:
        """Adds what the session has counted since the last call."""
        now, before, metrics = self.session.stats, self.shared.counted, self.owner.metrics
        metrics.inc(m.CANDIDATE_TOKENS, now.candidate_tokens - before.candidate_tokens)
        verify, direct = m.WAYS
        decoded = now.direct_tokens - before.direct_tokens
        metrics.inc(m.COMMITTED_TOKENS, now.verified_tokens - before.verified_tokens - decoded, way=verify)
        metrics.inc(m.COMMITTED_TOKENS, decoded, way=direct)
        metrics.inc(m.ROLLBACKS, now.rollbacks - before.rollbacks)
        wasted = now.rolled_back_tokens - before.rolled_back_tokens
        metrics.inc(m.ROLLED_BACK_TOKENS, wasted)
        if self.way == "verify":
            committed = now.verified_tokens - before.verified_tokens - decoded
            wasted -= self.session.dropped - self.shared.dropped
            self.owner.ways.acceptance.add(committed, now.rollbacks - before.rollbacks, wasted)
        self.shared.counted, self.shared.dropped = replace(now), self.session.dropped

    async def score_prompt(self) -> Delta:
        """What the verifier says of the prompt's own tokens; all of the answer when no token is wanted."""
        stats = self.session.stats
        asked = self.verifier, self.request, self.settings, self.owner.tracer, stats
        logprobs, self.shared.fingerprint = await score_prompt(*asked)
        last = not self.request.max_tokens
        return self._as_asked(
            Delta(
                (),
                "",
                finish_reason=FinishReason.LENGTH if last else None,
                fingerprint=self.shared.fingerprint,
                stats=stats if last else None,
                prompt_logprobs=logprobs,
            )
        )

    def commit(self, commit: Commit) -> list[Action]:
        """What the session makes of a commit. Raises FingerprintChanged."""
        self._require_same(commit)
        stats, first = self.session.stats, len(self.session.committed) == len(self.request.output)
        if stats.windows == 1 and first:
            stats.cached_prompt_tokens = min(commit.timings.cached_rows, len(self.request.prompt))
        self.asks = True
        return self.session.commit(commit, time.monotonic())

    def _require_same(self, commit: Commit) -> None:
        """One reply, one fingerprint: no promise covers tokens of two different verifiers. Where nothing is
        promised the others go on."""
        shared = self.shared
        shared.fingerprint = shared.fingerprint or commit.fingerprint
        if self.request.deterministic and commit.fingerprint != shared.fingerprint:
            raise FingerprintChanged("the verifiers now have another fingerprint: send the request again")

    def delta(self, emitted: Emit, fingerprint: str | None) -> Delta:
        """Committed tokens as the client gets them; a stop string in their text ends the session."""
        tokens, logprobs, session = emitted.tokens, emitted.logprobs, self.session
        of_request = self.owner.tokenizer, self.request, self.text
        delta = to_delta(*of_request, tokens, logprobs, session.finish, session, fingerprint)
        return self._as_asked(delta)

    def _as_asked(self, delta: Delta) -> Delta:
        """To a request that did not ask for determinism no fingerprint promises anything, and what it cost
        the verifier is not told."""
        return delta if self.request.deterministic else replace(delta, fingerprint=None, stats=None)

    def on_retry(self) -> None:
        """Counts that the verifier is asked once more."""
        self.session.stats.verify_retries += 1
        self.owner.metrics.inc(m.VERIFY_RETRIES)
