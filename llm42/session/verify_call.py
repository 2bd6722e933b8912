"""Verify calls: what may come of one, and when it is repeated."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from typing import Any

from llm42.config import SessionSettings
from llm42.errors import LLM42Error, Overloaded, StepFailed, VerificationFailed, VerifierUnavailable
from llm42.protocol import Commit, Window
from llm42.session.interfaces import VerifierClient
from llm42.telemetry.tracing import Tracer

log = logging.getLogger(__name__)
PAUSES_S = (0.05, 0.2, 0.8, 2.0)
"""Before the tries after the first; the last one repeats."""


class Again(Enum):
    """Whether another try may do better, and whether this one counts as one of session.verify_attempts."""

    NO = "no"
    COUNTED = "counted"
    FREE = "free"


async def verify(
    client: VerifierClient,
    window: Window,
    settings: SessionSettings,
    tracer: Tracer,
    trace: str,
    on_retry: Callable[[], None],
) -> Commit | LLM42Error:
    """Sends one window until it is answered; verification is pure, so a retry is safe.

    Tries that the verifier left unanswered or failed at are limited to verify_attempts. One that is dead or
    full refuses at once: it is asked again, with pauses, for as long as those tries might have taken.
    """
    patience_s, refused_since = settings.verify_attempts * settings.verify_timeout_s, time.monotonic()
    counted, pauses = 0, itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))
    while True:
        answer, again = await _once(client, window, settings.verify_timeout_s, tracer, trace)
        now, pause = time.monotonic(), next(pauses)
        if again is Again.COUNTED:
            counted, refused_since = counted + 1, now
        late = again is Again.FREE and now + pause - refused_since > patience_s
        if again is Again.NO or late or counted >= settings.verify_attempts:
            return answer
        on_retry()
        await asyncio.sleep(pause)


async def _once(
    client: VerifierClient, window: Window, timeout_s: float, tracer: Tracer, trace: str
) -> tuple[Commit | LLM42Error, Again]:
    """The commit or the error that came of one try. trace: what the call's span belongs to."""
    span, attributes = tracer.start("verify", trace), dict[str, Any](error="cancelled")
    try:
        async with asyncio.timeout(timeout_s):
            (answer,) = await client.verify([window])
        if isinstance(answer, Commit):
            attributes = asdict(answer.timings)
            return answer, Again.NO
        failed, attributes = VerificationFailed(answer.message), {"error": answer.code}
        failed.code = answer.code
        return failed, Again.NO
    except (VerifierUnavailable, Overloaded) as failure:
        attributes = {"error": failure.code}
        # not Overloaded itself: that would mean "refused before any token"
        again = Again.COUNTED if isinstance(failure, StepFailed) else Again.FREE
        return VerifierUnavailable(str(failure)), again
    except TimeoutError:
        attributes = {"error": "timeout"}
        return VerifierUnavailable(f"no answer from the verifier in {timeout_s:g} s"), Again.COUNTED
    except Exception as failure:  # a bug, but the client must hear of it
        log.exception("verify call failed")
        attributes = {"error": type(failure).__name__}
        return VerificationFailed(f"{type(failure).__name__}: {failure}"), Again.NO
    finally:
        span.end(**attributes)
