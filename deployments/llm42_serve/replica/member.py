"""One verifier as a replica sees it, and what a failing call to it becomes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from llm42.errors import LLM42Error, VerifierUnavailable
from llm42.step_times import Peak
from llm42_serve.verifiers.actor import VerifierStatus

AVOID_S = 5.0
"""How long a verifier that has failed a request is only a last resort."""


@dataclass(slots=True)
class Member:
    """One verifier of the pool."""

    name: str
    actor_id: str = ""
    handle: Any = None
    status: VerifierStatus | None = None
    in_flight: int = 0
    """Windows that wait for its answer, and requests that it decodes by itself."""
    direct: int = 0
    """Of these, the latter."""
    decoded: Peak = field(default_factory=Peak)
    """How many these were of late."""
    avoid_until: float = 0.0
    """It has failed a request a moment ago: others are chosen first."""
    told_at: float = -math.inf
    """A time before which the supervisor cannot have asked for `status`."""
    failed_at: float = -math.inf
    """When a call found its actor dead or out of reach; a status from before is out of date."""

    @property
    def ready(self) -> bool:
        """Whether it can be asked: certified, with the pool's fingerprint, and its handle is known."""
        return self.status is not None and self.status.state == "ready" and self.handle is not None


def unreachable(member: Member, error: Exception) -> str:
    """What a client is told of a call to the member that Ray could not make, or whose answer it lost."""
    return f"{member.name} cannot be reached ({type(error).__name__}): send the request again"


@contextmanager
def errors_of(member: Member) -> Iterator[None]:
    """Raises Ray's errors of a call to the member's actor as ours, mostly as VerifierUnavailable; that it is
    dead is remembered of the member."""
    actor_id = member.actor_id
    try:
        yield
    except RayActorError as error:
        if member.actor_id == actor_id:  # else its successor is there already
            member.status, member.failed_at = None, time.monotonic()
        raise VerifierUnavailable(unreachable(member, error)) from error
    except RayTaskError as error:
        if isinstance(error.cause, LLM42Error):
            raise error.cause from error
        raise
    except RayError as error:  # the cluster's trouble, not the window's
        raise VerifierUnavailable(unreachable(member, error)) from error
