"""Where the answers of directly decoded requests leave the verifier."""

from __future__ import annotations

import logging

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure
from llm42.sampling import Sampled
from llm42.verifier.jobs import Follower

log = logging.getLogger(__name__)


class Outbox:
    """Hands every answer to its follower's sink at once, on the step thread. Another one may join those of
    several steps: `token` is called once a step and follower, and tokens come in order."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def token(self, follower: Follower, base: int, sampled: Sampled) -> None:
        """A token that was decoded directly, after `base` tokens."""
        name = follower.window.request_id
        commit = Commit(name, base, 0, sampled.token, (sampled.logprob,), self.fingerprint)
        try:
            follower.sink(commit)
        except Exception:
            self._not_read(follower)

    def send(self, follower: Follower, answer: Commit | Failure | LLM42Error) -> None:
        """An answer as it is: a window's commit, or what ends the request."""
        try:
            follower.sink(answer)
        except Exception:
            self._not_read(follower)

    @staticmethod
    def _not_read(follower: Follower) -> None:
        """One request's reader must not end the step thread, which is everyone's."""
        log.exception("the answer of %s could not be handed on", follower.window.request_id)
