"""For how long no best effort goes to verifiers after some has come back from one with nothing. Pure: times
are told."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, MOST_S = 1.0, 160.0
"""After the first one, and twice as long after each further one, up to the most. A burst's prompts are soon
over; a verifier that stays full costs few requests their time."""
LASTS_S = 8.0
"""From so long on it is no burst."""


@dataclass(slots=True)
class Backoff:
    """One per replica."""

    came_back: int = 0
    """Best-effort requests that had to leave their verifier, so far."""
    _until: float = 0.0
    _seconds: float = 0.0

    def holds(self, now: float) -> bool:
        """Whether nobody goes."""
        return now < self._until

    def lasts(self, now: float) -> bool:
        """Whether that is not for a moment."""
        return self.holds(now) and self._seconds >= LASTS_S

    def failed(self, now: float) -> None:
        """A best-effort request had to leave its verifier, for which it had waited or which is gone: the next
        ones would find the same. Those that have gone together come back together, and make the wait longer
        once."""
        self.came_back += 1
        if not self.holds(now):
            self._seconds = min(2 * self._seconds, MOST_S) or FIRST_S
            self._until = now + self._seconds

    def worked(self) -> None:
        """A verifier has begun to decode one."""
        self._seconds = 0.0
