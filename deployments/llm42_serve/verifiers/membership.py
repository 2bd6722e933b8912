"""What is published of the verifiers: who is there, and the one fingerprint that a pool has. No clocks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm42.fingerprint import differing_fields
from llm42.protocol import across_releases
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.watch import Watched

log = logging.getLogger(__name__)
PIN_S = 30.0
"""The pool keeps its fingerprint this long after its last verifier that had it is gone."""


@across_releases
@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One verifier as published. `actor_id` changes when the actor is created anew under its name."""

    name: str
    actor_id: str
    status: VerifierStatus | None
    age_s: float = 0.0
    """Seconds, at most, since the verifier was as `status` says."""


@across_releases
@dataclass(frozen=True, slots=True)
class Membership:
    """Who is there. Members with another fingerprint than the pool's have the state "mixed"."""

    members: tuple[MemberInfo, ...] = ()
    fingerprint: str | None = None
    condemned: int = 0
    pid: int = 0


class PoolFingerprint:
    """Which fingerprint the pool has; verifiers with another one are refused. Belongs to the supervisor's
    event loop."""

    def __init__(self) -> None:
        self.fingerprint: str | None = None
        self.unpinned_since: float | None = None
        """Since when no verifier has had it, on the caller's clock."""

    def pin(self, now: float, wanted: Sequence[Watched]) -> None:
        """The most common one at first, then kept while anyone has it. Every wanted one has been asked."""
        found = Counter(w.status.fingerprint for w in wanted if w.status and w.status.fingerprint)
        if self.fingerprint in found:
            self.unpinned_since = None
        elif found:
            self.unpinned_since = self.unpinned_since or now
            if self.fingerprint is None or now - self.unpinned_since > PIN_S:
                self.fingerprint, self.unpinned_since = found.most_common(1)[0][0], None

    def published(self, watched: Watched) -> VerifierStatus | None:
        """A verifier's state, as replicas are told it."""
        status = watched.status
        if status is None or status.state != "ready" or status.fingerprint == self.fingerprint:
            return status
        if self.fingerprint is None:
            return replace(status, state="starting", detail=f"{watched.name} waits for news of the others")
        detail = f"{watched.name} has another fingerprint than the pool's{watched.mixed}"
        return replace(status, state="mixed", detail=detail)

    async def explain(self, watched: Watched, wanted: Sequence[Watched]) -> None:
        """Finds out, once, in which fields a refused verifier differs."""
        published = self.published(watched)
        ours = [w for w in wanted if w.status and w.status.fingerprint == self.fingerprint]
        if watched.mixed or published is None or published.state != "mixed" or not ours:
            return
        calls = [w.handle.manifest.remote() for w in (ours[0], watched)]
        reference, manifest = await asyncio.gather(*calls)
        if reference and manifest:  # empty: it has started anew
            watched.mixed = f" ({', '.join(differing_fields(reference, manifest))} differ)"
            log.error("%s is refused%s", watched.name, watched.mixed)
