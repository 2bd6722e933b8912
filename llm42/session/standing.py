"""How long a plan stands. The model of policy.py says which way seems cheaper; the counts that it is told
depend on the way that is taken, and costs drift. So a change is tried: if requests do not go on faster, the
replica goes back, and stays for twice as long each time. Pure: times and counts are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm42.session.policy import Way

SETTLE_S, MEASURE_S, LONGEST_S = 3.0, 5.0, 60.0
"""Those in progress go over to another plan, and then it is measured: for so long at least, until as many
have ended as are in progress, and so long at most."""
HOLD_S, LONGEST_HOLD_S = 120.0, 480.0
"""After a trial no other way is tried for so long; twice as long after each."""
CLEARLY, NEARLY = 0.75, 1.6
"""Beside what the present way costs: so cheap a way is taken at once where nothing was measured of the
present one; one that costs so much is tried once, since the model may be wrong by that much."""
NEWS, NEWS_SHARE, MEAN_S = 1.5, 0.2, 10.0
"""So many times more or fewer requests, as a mean over so long, or another share of deterministic ones among
those that begin, is another load: what was measured is forgotten. Neither depends on the way."""
FEW, LEARN = 4, 0.02
NOISE, WORSE = 0.01, 0.06
"""Two measurements differ by so much by chance; one that is so much worse halfway is enough."""
PROMPT_TOKEN = 1 / 8
"""What a token of a prompt counts beside one of output."""


@dataclass(slots=True)
class Done:
    """What a replica has done so far."""

    work: float = 0.0
    """Tokens of output, and of prompts by PROMPT_TOKEN."""
    ended: int = 0
    """Requests."""
    share: float = 0.0
    """Of deterministic ones among those that began: this does not depend on the way."""
    began: int = 0

    def came(self, tokens: int, prompt: int = 0) -> None:
        """Output of a request; with the first the prompt's length."""
        self.work += tokens + PROMPT_TOKEN * prompt

    def begin(self, deterministic: bool) -> None:
        """A request has begun."""
        self.began += 1
        self.share += max(LEARN, 1 / self.began) * (deterministic - self.share)


class Standing:
    """The plan of a replica."""

    def __init__(self) -> None:
        self.plan: Way | None = None
        self.changes = 0
        self._now = self._busy = self._until = self._since = 0.0
        """_busy: requests in progress, summed up over time: what a load less needs no other way."""
        self._mean = 0.0
        """Requests in progress, of late."""
        self._load: tuple[float, float | None] = 0.0, None
        """That, and the share of deterministic ones, when the load was another the last time."""
        self._hold_s, self._near, self._blind = HOLD_S, True, True
        self._ended = 0
        self._from: tuple[float, float, float, int] | None = None
        """When measuring began, and work, busy and ended then."""
        self._measured: float | None = None
        """Speed of the present plan, per request."""
        self._tried: tuple[float, float] | None = None
        """The speed before a trial that goes on, and how much faster it has to be."""

    @property
    def tries(self) -> bool:
        """Whether a plan is on trial: nothing else is to change meanwhile."""
        return self._tried is not None

    def next(
        self, now: float, count: int, done: Done, cost: Mapping[Way, float], proposed: Way | None
    ) -> Way | None:
        """The plan from now on. count: requests in progress. cost: what the model expects."""
        passed_s = min(1.0, now - self._now)
        self._busy += count * passed_s
        self._mean += (count - self._mean) * passed_s / MEAN_S
        self._now = now
        if proposed is None or self.plan is None or not cost:
            if proposed != self.plan:
                self._take(proposed, done)
            return self.plan
        self._look(count, done)
        self._measure(count, done)
        if self._tried is not None:
            self._judge(done)
        else:
            self._consider(cost, done)
        return self.plan

    def _take(self, plan: Way | None, done: Done) -> None:
        self.changes += self.plan is not None and plan != self.plan
        self.plan, self._since, self._ended = plan, self._now, done.ended
        self._from = self._measured = self._tried = None

    def _look(self, count: int, done: Done) -> None:
        """Another load begins anew."""
        before, share = self._load
        if share is None and done.began >= 1 / LEARN:
            self._load = before, done.share
        most, least = max(before, self._mean), min(before, self._mean)
        other_share = share is not None and abs(done.share - share) > NEWS_SHARE
        if (most > NEWS * least and most - least >= FEW) or other_share:
            self._load = self._mean, done.share if other_share else share
            self._hold_s, self._until = HOLD_S, self._now
            self._near = self._blind = True
            self._take(self.plan, done)

    def _over(self, since: float, ended: int, least_s: float, count: float, done: Done) -> bool:
        age_s = self._now - since
        return age_s >= least_s and (done.ended - ended >= count or age_s >= LONGEST_S)

    def _measure(self, count: int, done: Done) -> None:
        if self._from is None:
            if self._over(self._since, self._ended, SETTLE_S, count, done):
                self._from = self._now, done.work, self._busy, done.ended
            return
        since, work, busy, ended = self._from
        if self._over(since, ended, MEASURE_S, 1.5 * count, done) and self._busy > busy:
            self._measured = (done.work - work) / (self._busy - busy)
            self._from = self._now, done.work, self._busy, done.ended

    def _judge(self, done: Done) -> None:
        assert self._tried is not None
        before, needed = self._tried
        if self._measured is None and self._from is not None:
            since, work, busy, _ = self._from
            if self._now - since >= MEASURE_S / 2 and done.work - work < before * (1 - WORSE) * (
                self._busy - busy
            ):
                self._measured = 0.0
        if self._measured is None:
            return
        if self._measured < before * needed:
            self._take(other(self.plan), done)
        self._tried = None
        self._until = self._now + self._hold_s
        self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s)

    def _consider(self, cost: Mapping[Way, float], done: Done) -> None:
        assert self.plan is not None
        ratio = cost[other(self.plan)] / cost[self.plan]
        if self._measured is None:
            if ratio < CLEARLY and self._blind:
                self._blind = False
                self._take(other(self.plan), done)
            return
        if self._now < self._until:
            return
        cheaper = ratio < 1.0 - 2 * NOISE
        if cheaper or (self._near and ratio < NEARLY):
            before, self._near = self._measured, False
            self._take(other(self.plan), done)
            self._tried = before, 1.0 if cheaper else 1.0 + NOISE


def other(way: Way | None) -> Way:
    """The one that is not taken."""
    return "verify" if way == "direct" else "direct"
