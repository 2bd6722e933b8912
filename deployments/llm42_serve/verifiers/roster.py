"""Which verifiers are wanted: so many, on nodes that stay. A node that is being drained gives its verifier to
a successor; when there are too many, one goes whose node may then be empty. No Ray, and no clocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from llm42_serve.verifiers.watch import Watched

HANDOVER_S = 60.0
"""A verifier on a node that is being drained waits so long for its successor to be ready, or half of the time
that the node has left. Then others that are ready must do; without any it stays as long as its node."""


class Roster:
    """The verifiers by number. Belongs to the supervisor's event loop."""

    def __init__(self, make: Callable[[int], Watched], count: int, capacity: int) -> None:
        """make: the view of the verifier with a number. count: how many are wanted at first."""
        self._make = make
        self.watched = [make(number) for number in range(capacity)]
        for watched in self.watched[:count]:
            watched.wanted = True

    @property
    def wanted(self) -> list[Watched]:
        """Those that replicas are told of: the ones that stay, and those that wait for a successor."""
        return [w for w in self.watched if w.wanted]

    @property
    def staying(self) -> list[Watched]:
        """The wanted ones whose node is not being drained, as far as is known."""
        return [w for w in self.wanted if w.leave_by is None]

    def adopt(self, numbers: Collection[int]) -> None:
        """There are actors with these numbers: they are wanted, until it is known which ones shall go. Others
        are only if these are too few: a number may have been given up."""
        while len(self.watched) <= max(numbers, default=-1):
            self.watched.append(self._make(len(self.watched)))
        for number, watched in enumerate(self.watched):
            watched.wanted = number in numbers or (watched.wanted and not numbers)

    def arrange(
        self, now: float, count: int, draining: Mapping[str, float], hosts: Collection[str]
    ) -> list[Watched]:
        """Makes `count` verifiers stay. draining: seconds left, by node. hosts: nodes with a fast-path
        replica. Returns those that are leaving from now on."""
        leaving = []
        for watched in self.wanted:
            if watched.leave_by is None and watched.node in draining:
                watched.leave_by = now + min(HANDOVER_S, draining[watched.node] / 2)
                leaving.append(watched)
        while len(self.staying) < count:
            self._spare(draining).wanted = True
        if all(w.tried for w in self.wanted):  # else it is not known where they are
            while len(self.staying) > count:
                self.first_to_go(hosts).wanted = False
        return leaving

    def first_to_go(self, hosts: Collection[str]) -> Watched:
        """Which one is given up first: one that is of no use; else one that is not ready; else one without a
        fast-path replica on its node, which may then have nothing left and be given back; else the last."""
        numbers = {w.name: number for number, w in enumerate(self.watched)}
        return min(self.staying, key=lambda w: (_use(w), w.node in hosts, -numbers[w.name]))

    def may_leave(self, now: float, watched: Watched, ready: int) -> bool:
        """Whether a leaving one can be spared. ready: how many of those that stay can be asked."""
        if watched.leave_by is None or not watched.wanted:
            return False
        gone = watched.handle is None  # no other one shall take its name now
        return gone or ready >= len(self.staying) or (ready > 0 and now >= watched.leave_by)

    def _spare(self, draining: Collection[str]) -> Watched:
        """One that is not wanted. Its actor may be there still, but not on a node that is being drained."""
        for watched in self.watched:
            if not watched.wanted and not watched.ending and watched.node not in draining:
                return watched
        self.watched.append(self._make(len(self.watched)))
        return self.watched[-1]


def _use(watched: Watched) -> int:
    """Of what use it is: none, some soon, or now."""
    if watched.status is None or watched.status.state in ("failed", "mixed"):
        return 0
    return 2 if watched.status.state == "ready" else 1
