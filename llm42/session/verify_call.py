"""Verify calls: what may come of one, and when it is repeated."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from llm42.config import SessionSettings
from llm42.errors import LLM42Error, Overloaded, StepFailed, VerificationFailed, VerifierUnavailable
from llm42.protocol import Commit, Failure, Window
from llm42.session.interfaces import VerifierClient
from llm42.telemetry.tracing import Tracer

log = logging.getLogger(__name__)
PAUSES_S = (0.05, 0.2, 0.8, 2.0)
"""Before the tries after the first; the last one repeats."""
LOST_AFTER = 10
"""Times session.verify_timeout_s: after so long a window is lost, whatever its verifier does for others."""
SEND_IN_FULL = "send_in_full"
"""A `Failure` of this code: the verifier does not hold what it was to go on with."""


class Again(Enum):
    """Whether another try may do better, and whether this one counts as one of session.verify_attempts."""

    NO = "no"
    COUNTED = "counted"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Failed:
    """What a try came to that has no commit. name: of what went wrong, for the trace."""

    error: LLM42Error
    again: Again
    name: str


class Patience:
    """How often one thing is asked for. Verification is pure, so a retry is safe.

    Tries that the verifier left unanswered or failed at are limited to verify_attempts. One that is dead or
    full refuses at once: it is asked again, with pauses, for as long as those tries might have taken.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self._attempts = settings.verify_attempts
        self._patience_s = settings.verify_attempts * settings.verify_timeout_s
        self.renew()

    def renew(self) -> None:
        """There was an answer: from now on everything counts anew."""
        self._counted, self._refused_since = 0, time.monotonic()
        self._pauses = itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))

    def pause_s(self, again: Again) -> float | None:
        """After a try: seconds until the next one; None when there is none."""
        now, pause = time.monotonic(), next(self._pauses)
        if again is Again.COUNTED:
            self._counted, self._refused_since = self._counted + 1, now
        late = again is Again.FREE and now + pause - self._refused_since > self._patience_s
        return None if again is Again.NO or late or self._counted >= self._attempts else pause


def judged(failure: Failure | Exception, timeout_s: float) -> Failed:
    """What is to be made of a try that failed. TimeoutError: nothing came in `timeout_s` seconds."""
    if isinstance(failure, Failure):
        if failure.code == SEND_IN_FULL:
            return Failed(VerifierUnavailable(failure.message), Again.FREE, failure.code)
        refused = VerificationFailed(failure.message)
        refused.code = failure.code
        return Failed(refused, Again.NO, failure.code)
    if isinstance(failure, VerifierUnavailable | Overloaded):
        # not Overloaded itself: that would mean "refused before any token"
        again = Again.COUNTED if isinstance(failure, StepFailed) else Again.FREE
        return Failed(VerifierUnavailable(str(failure)), again, failure.code)
    if isinstance(failure, TimeoutError):
        silent = VerifierUnavailable(
            f"no answer from the verifier in {timeout_s:g} s: send the request again"
        )
        return Failed(silent, Again.COUNTED, "timeout")
    log.error("verify call failed", exc_info=failure)  # a bug, but the client must hear of it
    name = type(failure).__name__
    return Failed(VerificationFailed(f"{name}: {failure}"), Again.NO, name)


async def verify(
    client: VerifierClient,
    window: Window,
    settings: SessionSettings,
    tracer: Tracer,
    trace: str,
    on_retry: Callable[[], None],
) -> Commit | LLM42Error:
    """Sends one window until it is answered, or patience ends: then its last error."""
    patience = Patience(settings)
    while True:
        answer = await _once(client, window, settings.verify_timeout_s, tracer, trace)
        if isinstance(answer, Commit):
            return answer
        pause_s = patience.pause_s(answer.again)
        if pause_s is None:
            return answer.error
        on_retry()
        await asyncio.sleep(pause_s)


async def _once(
    client: VerifierClient, window: Window, timeout_s: float, tracer: Tracer, trace: str
) -> Commit | Failed:
    """What came of one try, which lasts until `timeout_s` have passed without a step of its verifier. trace:
    what the call's span belongs to."""
    span, attributes = tracer.start("verify", trace), dict[str, Any](error="cancelled")
    try:
        (answer,) = await _in_time(client, window, timeout_s)
        if isinstance(answer, Commit):
            attributes = asdict(answer.timings)
            return answer
        failed = judged(answer, timeout_s)
        attributes = {"error": failed.name}
        return failed
    except Exception as failure:
        failed = judged(failure, timeout_s)
        attributes = {"error": failed.name}
        return failed
    finally:
        span.end(**attributes)


async def _in_time(client: VerifierClient, window: Window, timeout_s: float) -> list[Commit | Failure]:
    """Raises TimeoutError as late as the verifier's progress on other windows allows: this one waits for its
    turn until then, but not for ever, since nobody else would find that it is lost."""
    call, left_s, began = asyncio.ensure_future(client.verify([window])), timeout_s, time.monotonic()
    try:
        while not (await asyncio.wait((call,), timeout=left_s))[0]:
            left_s = timeout_s - client.progressed_s(window.request_id)
            if left_s <= 0.0 or time.monotonic() - began >= LOST_AFTER * timeout_s:
                raise TimeoutError
        return call.result()
    finally:
        call.cancel()
