"""What requests of a replica that go direct have not taken yet of their verifiers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Promised:
    """What one request that goes direct still takes of its verifier's KV, in tokens."""

    at_first: int
    later: int
    admitted: bool = False


@dataclass(slots=True)
class Promises:
    """KV of verifiers that requests of this replica have not taken yet: all of them see the same figures of
    it, which are of a moment ago."""

    total: int = 0
    coming: int = 0
    """Those that their verifiers have not admitted yet."""
    _of: dict[str, _Promised] = field(default_factory=dict)

    def of(self, request_id: str) -> int:
        """The request's own."""
        return self._of[request_id].at_first if request_id in self._of else 0

    def give(self, request_id: str, at_first: int, later: int) -> None:
        """later: what it still takes once its verifier has admitted it."""
        admitted = request_id in self._of and self._of[request_id].admitted
        self.end(request_id)
        self._of[request_id] = _Promised(at_first, later, admitted)
        self.total += at_first
        self.coming += not admitted

    def admitted(self, request_id: str) -> None:
        """The verifier holds what it had."""
        if (promised := self._of.get(request_id)) is not None:
            self.total += promised.later - promised.at_first
            promised.at_first = promised.later
            self.coming -= not promised.admitted
            promised.admitted = True

    def end(self, request_id: str) -> None:
        """It takes no more."""
        if (promised := self._of.pop(request_id, None)) is not None:
            self.total -= promised.at_first
            self.coming -= not promised.admitted
