"""One deterministic request in progress: what both ways to its commits share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

from llm42.config import Settings
from llm42.errors import FingerprintChanged
from llm42.protocol import Commit, Delta, FinishReason, Request, RequestStats
from llm42.session.actions import Action, Emit
from llm42.session.interfaces import VerifierClient
from llm42.session.machine import Session
from llm42.session.outputs import to_delta
from llm42.session.prompt_scores import score_prompt
from llm42.telemetry import metrics as m
from llm42.telemetry.tracing import Tracer
from llm42.text.output_text import OutputText
from llm42.text.tokenizer import Tokenizer


class Owner(Protocol):
    """What a drive uses of its generator."""

    tokenizer: Tokenizer
    settings: Settings
    verifier: VerifierClient | None
    metrics: m.Metrics
    tracer: Tracer


class Drive(ABC):
    """Joins a session, a verifier and what the client gets. Belongs to an event loop."""

    def __init__(self, owner: Owner, request: Request, text: OutputText) -> None:
        self.owner, self.request, self.text = owner, request, text
        self.settings = owner.settings.session
        self.session = Session(request, self.settings, time.monotonic())
        self.fingerprint = request.fingerprint
        self.counted = RequestStats()

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
        the session is done. No generator: each would be resumed for every delta on its way. Raises
        LLM42Error."""

    def close(self) -> None:
        """Frees the verifier's share; safe at any moment."""
        self.verifier.release(self.request.request_id)
        self.count_progress()

    def count_progress(self) -> None:
        """Adds what the session has counted since the last call."""
        now, before, metrics = self.session.stats, self.counted, self.owner.metrics
        metrics.inc(m.CANDIDATE_TOKENS, now.candidate_tokens - before.candidate_tokens)
        verify, direct = m.WAYS
        decoded = now.direct_tokens - before.direct_tokens
        metrics.inc(m.COMMITTED_TOKENS, now.verified_tokens - before.verified_tokens - decoded, way=verify)
        metrics.inc(m.COMMITTED_TOKENS, decoded, way=direct)
        metrics.inc(m.ROLLBACKS, now.rollbacks - before.rollbacks)
        metrics.inc(m.ROLLED_BACK_TOKENS, now.rolled_back_tokens - before.rolled_back_tokens)
        self.counted = replace(now)

    async def score_prompt(self) -> Delta:
        """What the verifier says of the prompt's own tokens; all of the answer when no token is wanted."""
        stats = self.session.stats
        asked = self.verifier, self.request, self.settings, self.owner.tracer, stats
        logprobs, self.fingerprint = await score_prompt(*asked)
        last = not self.request.max_tokens
        return self._as_asked(
            Delta(
                (),
                "",
                finish_reason=FinishReason.LENGTH if last else None,
                fingerprint=self.fingerprint,
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
        return self.session.commit(commit, time.monotonic())

    def _require_same(self, commit: Commit) -> None:
        """One reply, one fingerprint: no promise covers tokens of two different verifiers. Where nothing is
        promised the others go on."""
        self.fingerprint = self.fingerprint or commit.fingerprint
        if self.request.deterministic and commit.fingerprint != self.fingerprint:
            raise FingerprintChanged("the verifiers were replaced by others with another fingerprint")

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
