"""The two interfaces that everything asks through: one computes windows, the other answers requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.step_times import VerifierLoad

Sink = Callable[[Commit | Failure | LLM42Error], None]
"""Who follows a request. May be called from any thread; must not block or raise."""


class VerifierClient(Protocol):
    """Where a session's windows go. Answers come in the order of the windows."""

    @property
    def kv_tokens(self) -> int | None:
        """KV of the verifier that has most of it, in tokens: a longer request can never be answered. None:
        not known."""
        ...

    def verify(self, windows: Sequence[Window]) -> Awaitable[list[Commit | Failure]]:
        """Verifies windows. They are sent by the call, not when the answers are awaited: a request that is
        released later is over. Raises VerifierUnavailable or Overloaded, now or then: both may be retried,
        verification is pure."""
        ...

    def follow(self, window: Window, sink: Sink) -> None:
        """Has a window with credit answered, and goes on decoding after it. Returns at once.

        The sink gets the commits as they come, in order, or what is the matter: an error after which none
        comes. Another window of the same request takes the place of this one. Raises as `verify`.
        """
        ...

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        """A request that is followed may have this length, of prompt and output, and not less than before.
        Returns at once. told: may be called from any thread; False where the request is not known, so that it
        must be sent in full: then nothing more comes. Raises VerifierUnavailable."""
        ...

    def progressed_s(self, request_id: str) -> float:
        """How many seconds ago the verifier that has the request is known to have completed a step, of
        whatever requests: one that works on others has not failed this one. Infinity where nobody has it."""
        ...

    def stop(self, request_id: str) -> None:
        """A request that is followed needs no more tokens for now: none comes. Windows of it may, which find
        what it has computed. Returns at once, never raises."""
        ...

    @property
    def worked_s(self) -> float:
        """For how many seconds verifiers have computed so far, on average. May be read from any thread."""
        ...

    def beside(self, worked_s: Callable[[], float]) -> None:
        """Tells verifiers for how many seconds an engine has computed so far that shares their device: their
        own steps took longer meanwhile."""
        ...

    def load(self, request: Request | None) -> VerifierLoad | None:
        """How busy the verifier is that has the request, or else the one that would get it; None: not known.
        It is what was told last."""
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
