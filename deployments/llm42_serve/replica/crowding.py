"""Whether verifiers have too much to do, as a replica knows it: what was said long ago is no news."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from llm42_serve.replica.member import Member
from llm42_serve.verifiers.load import Limits

log = logging.getLogger(__name__)
NEWS_S = 5.0
"""So old what a verifier has said may be."""
SAME_S = 0.1
"""By so much the times of one status differ between two looks at it."""
SAY_AGAIN_S = 60.0


class Crowding:
    """One per pool; belongs to its event loop."""

    def __init__(
        self, limits: Limits, tell: Callable[[bool], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """tell: hears, once for each news, whether every verifier that is ready has too much to do."""
        self._limits, self._tell, self._clock = limits, tell, clock
        self._looked_at = self._said_at = -math.inf

    def excess(self, member: Member) -> tuple[str, ...]:
        """Of what it has too much; of nothing, where that is not known."""
        if member.status is None or self._clock() - member.told_at > NEWS_S:
            return ()
        return self._limits.excess(member.status)

    def judge(self, ready: Sequence[Member]) -> None:
        """A look at those that are ready, whether or not there are news of them. While nothing is known of
        any, there may be room."""
        now = self._clock()
        known = [m for m in ready if now - m.told_at <= NEWS_S]
        if not known:
            self._looked_at = -math.inf
            self._tell(False)
            return
        newest = max(m.told_at for m in known)
        if newest <= self._looked_at + SAME_S:
            return
        self._looked_at = newest
        excess = [self.excess(m) for m in known]
        if all(excess) and now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            which = "; ".join(f"{m.name}: {', '.join(e)}" for m, e in zip(known, excess, strict=True))
            log.info("every verifier has too much to do, so fewer are let in for now (%s)", which)
        self._tell(all(excess))
