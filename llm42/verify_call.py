"""One verify call: where it goes, what may come of it, and its span."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from llm42.protocol import (
    Commit,
    Failure,
    LLM42Error,
    Overloaded,
    VerificationFailed,
    VerifierUnavailable,
    Window,
)
from llm42.tracing import Tracer

log = logging.getLogger(__name__)


class VerifierClient(Protocol):
    """Where windows go. Answers come in the order of the windows."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Verifies windows. Raises VerifierUnavailable or Overloaded: both may be retried, verification is
        pure."""
        ...

    def release(self, request_id: str) -> None:
        """The request is over: the verifier may drop what it holds for it. Returns at once, never raises."""
        ...


async def verify_once(
    client: VerifierClient, window: Window, timeout_s: float, tracer: Tracer, trace: str
) -> tuple[Commit | LLM42Error, bool]:
    """The commit or the error that came of one try, and whether another try may do better.

    trace: what the call's span belongs to.
    """
    span, told = tracer.start("verify", trace), dict[str, Any](error="cancelled")
    try:
        (answer,) = await asyncio.wait_for(client.verify([window]), timeout_s)
        if isinstance(answer, Commit):
            told = asdict(answer.timings)
            return answer, False
        failed, told = VerificationFailed(answer.message), {"error": answer.code}
        failed.code = answer.code
        return failed, False
    except (VerifierUnavailable, Overloaded) as failure:
        told = {"error": failure.code}
        return VerifierUnavailable(str(failure)), True  # Overloaded would mean "refused before any token"
    except TimeoutError:
        told = {"error": "timeout"}
        return VerifierUnavailable(f"no answer from the verifier in {timeout_s:g} s"), True
    except Exception as failure:  # a bug, but the client must hear of it
        log.exception("verify call failed")
        told = {"error": type(failure).__name__}
        return VerificationFailed(f"{type(failure).__name__}: {failure}"), False
    finally:
        span.end(**told)
