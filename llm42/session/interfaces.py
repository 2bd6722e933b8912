"""The two interfaces that everything asks through: one computes windows, the other answers requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from llm42.protocol import Commit, Delta, Failure, Request, Window


class VerifierClient(Protocol):
    """Where a session's windows go. Answers come in the order of the windows."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Verifies windows. Raises VerifierUnavailable or Overloaded: both may be retried, verification is
        pure."""
        ...

    def release(self, request_id: str) -> None:
        """The request is over: the verifier may drop what it holds for it. Returns at once, never raises."""
        ...


class Answers(Protocol):
    """A whole LLM-42: in this process (llm42/local/assembly.py), or a service's replicas and verifiers."""

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The output of one request; closing the iterator aborts it. Raises LLM42Error."""
        ...

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Windows of stored answers, computed without a cache, answered in order. VerifierUnavailable and
        Overloaded may be retried."""
        ...

    async def fingerprint(self, agreed: bool = False) -> tuple[str, Mapping[str, Any]]:
        """The verifiers' fingerprint and manifest. agreed: only if this process makes of a request what the
        manifest says, else VersionSkew. Raises VerifierUnavailable."""
        ...
