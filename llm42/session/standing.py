"""How long a plan stands. The model of rounds.py says which way seems cheaper, and is corrected by how long
rounds really take: for the present way that is measured all the time, for another one since it was taken the
last time. A change is tried: if rounds do not get shorter the replica goes back, and stays for twice as long
each time. Pure: times and counts are told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm42.session.load import LEAST_LEFT, Plan, Rounds

SETTLE_S, MEASURE_S, LONGEST_S = 3.0, 5.0, 60.0
"""Those in progress go over to another plan, and then it is measured: for so long at least, until as many
have ended as are in progress, and so long at most."""
RESTED_S, YOUNG_S, FORGOTTEN_S = 1.0, 1.0, 10.0
"""Where nothing was in progress for so long, measuring begins anew; for so long after it the plan follows
what comes, as it grows; and what comes after so long is another load."""
HOLD_S, LONGEST_HOLD_S = 20.0, 640.0
"""After a trial no other way is tried for so long; twice as long after each that failed."""
MARGIN, UNTRIED, FIRST, FIRST_MOVED, FIRST_JOINED, CLEARLY = 0.03, 0.12, 0.1, 0.15, 0.05, 0.25
"""Another plan must seem to save so much of a round; so much on one device if it was not measured, for the
model is mostly too good for all of them alike, and a change costs seconds in which two sides with half of the
requests each share the device; so much where a load begins, of which nothing was measured, at first beside
verify, which measures both sides; less of what leaves no two sides to share one device, for it is all moved
or there is no best effort; and so much to be taken later without that."""
COMMON = 1.07
"""By so much at most the model is taken to be too good for a plan that was not measured."""
CLEAR_S, CLEAR_ENDED, CLEAR_LATEST_S = 4.0, 0.25, 20.0
"""So long it must have seemed so, and so many must have ended, as a share of those in progress, or so much
time be over. What steps take is found anew every second, and one time may be far off; while a burst's prompts
are computed nothing ends, and what steps take then is not what they will."""
NEWS, NEWS_SHARE, MEAN_S, SHOWN_S = 1.5, 0.2, 10.0, 5.0
"""So many times more or fewer requests, as a mean over so long, or another share of deterministic ones among
those that begin, is another load: what was measured is forgotten. Neither depends on the way. Nothing is
another one before a load has shown for so long what it is."""
FEW, LEARN, ENOUGH, LEARN_LENGTHS = 4, 0.02, 16, 0.05
NOISE, WORSE = 0.01, 0.06
"""Two measurements differ by so much by chance; one that is so much worse halfway is enough."""


@dataclass(slots=True)
class Done:
    """What a replica has done so far."""

    tokens: int = 0
    """Of output."""
    ended: int = 0
    """Requests."""
    share: float = 0.0
    """Of deterministic ones among those that began: this does not depend on the way."""
    began: int = 0
    rested_s: float = 0.0
    """Seconds in which none was in progress, since that was last asked for."""
    _idle_since: float | None = None
    """When the last one in progress ended; None: there is one, or there never was."""

    @property
    def begins(self) -> float | None:
        """The share, once enough have begun for it to say something."""
        return self.share if self.began >= ENOUGH else None

    def begin(self, deterministic: bool, now: float) -> None:
        """A request has begun."""
        if self._idle_since is not None:
            self.rested_s, self._idle_since = self.rested_s + now - self._idle_since, None
        self.began += 1
        self.share += max(LEARN, 1 / self.began) * (deterministic - self.share)

    def forget(self) -> None:
        """What the next ones are is another matter."""
        self.began = 0

    def end(self, now: float, left: int) -> None:
        """A request has ended, and so many are left."""
        self.ended += 1
        self._idle_since = None if left else now


@dataclass(slots=True)
class Lengths:
    """Of typical requests of one kind, in tokens: means of late. Prompts are known as they begin."""

    prompt: float = 0.0
    output: float = float(LEAST_LEFT)
    _began: int = 0
    _ended: int = 0

    def begin(self, prompt: int) -> None:
        """One has begun."""
        self._began += 1
        self.prompt += max(LEARN_LENGTHS, 1 / self._began) * (prompt - self.prompt)

    def end(self, output: int) -> None:
        """One has ended."""
        self._ended += 1
        self.output += max(LEARN_LENGTHS, 1 / self._ended) * (output - self.output)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and what had been done until then."""

    at: float = 0.0
    tokens: int = 0
    busy: float = 0.0
    """Requests in progress, summed up over time: what a load less needs no other way."""
    ended: int = 0

    def later(self, since: Mark, until: Mark) -> Mark:
        """As if nothing had been between those two."""
        return Mark(
            self.at + until.at - since.at,
            self.tokens + until.tokens - since.tokens,
            self.busy + until.busy - since.busy,
            self.ended + until.ended - since.ended,
        )

    def round_s(self, before: Mark) -> float | None:
        """How long a round has been since; None: no token has come."""
        tokens = self.tokens - before.tokens
        return (self.busy - before.busy) / tokens if tokens else None


class Standing:
    """The plan of a replica."""

    def __init__(self, one_device: bool = False) -> None:
        """one_device: the fast path and the verifiers share one."""
        self._untried = UNTRIED if one_device else MARGIN
        self._first_moved = FIRST_JOINED if one_device else FIRST_MOVED
        self._first_joined = FIRST_JOINED if one_device else FIRST
        self.plan: Plan | None = None
        self.changes = 0
        self._now, self._looked = Mark(), False
        """The last look, and whether there was one."""
        self._mean = self._mean_s = 0.0
        """Requests in progress, of late, and of how many seconds that is the mean."""
        self._rested_at = -math.inf
        """When the load began that goes on without a rest since."""
        self._began_with = 0
        """Requests that were in progress when a plan was taken for a load that begins."""
        self._load: tuple[float, float | None] = 0.0, None
        """That, and the share of deterministic ones, when the load was another the last time."""
        self._forget()
        self._take(None)

    def _forget(self) -> None:
        self._hold_s, self._until, self._blind = HOLD_S, self._now.at, True
        self._off: dict[Plan, float] = {}
        """By how much rounds are longer than the model says."""

    def _take(self, plan: Plan | None) -> None:
        self.changes += self.plan is not None and plan != self.plan
        self.plan, self._since = plan, self._now
        self._from: Mark | None = None
        """When measuring began."""
        self._expected_tokens = 0.0
        """Those that should have come since, as the model said at each moment: what it says changes."""
        self._measured: float | None = None
        """A round of the present plan."""
        self._clear_since = math.inf
        """Since when another plan has seemed to be clearly better, without that."""
        self._before: tuple[Plan, float] | None = None
        """While a plan is on trial: the one before, and its round."""

    def next(
        self, now: float, count: int, done: Done, rounds: Rounds | None, room: bool, kept: bool = False
    ) -> Plan | None:
        """The plan from now on. count: requests in progress. rounds: what the model expects; None: too little
        is known, or nobody asks. room: whether verifiers have room for best effort. kept: for a moment it is
        kept from going there: what comes meanwhile says nothing of that plan."""
        if not count:  # somebody looks; whoever comes next is asked for
            return self.plan
        mark, rested_s, done.rested_s = self._now, done.rested_s, 0.0
        passed_s = max(0.0, now - mark.at - rested_s) if self._looked else 0.0
        self._looked = True
        self._now = Mark(now, done.tokens, mark.busy + count * passed_s, done.ended)
        if rested_s >= RESTED_S:  # what comes now begins together: rounds are not as long as they will be
            self._since, self._from, passed_s = self._now, None, 0.0
            self._mean, self._mean_s, self._rested_at, self._began_with = 0.0, 0.0, now, 0
        if rested_s >= FORGOTTEN_S:
            done.forget()
            self._load = 0.0, None
            self._forget()
            self._take(None)
        self._mean_s = min(MEAN_S, self._mean_s + passed_s)
        self._mean += (count - self._mean) * min(1.0, passed_s / self._mean_s if self._mean_s else 1.0)
        if rounds is None:
            if self._from is not None:  # what comes meanwhile is compared with nothing
                self._from = self._from.later(mark, self._now)
            return self.plan
        expected: dict[Plan, float] = {"verify": rounds.verify, "direct": rounds.direct}
        if room:
            expected["moved"] = rounds.moved
        alone = done.share == 1.0
        if self.plan is None:
            self._mean, self._rested_at = float(count), now
        if self.plan not in expected:  # none yet, or there is no room for it any more
            self._begin(expected, "verify", count, alone)
            return self.plan
        if self._now.at - self._rested_at < YOUNG_S and count > NEWS * self._began_with:
            self._begin(expected, self.plan, count, alone)
            return self.plan
        if self._is_another_load(done):
            self._forget()
            self._begin(expected, self.plan, count, alone)
        if kept and self.plan == "moved":
            self._since, self._from = self._now, None
        self._measure(count, expected[self.plan], mark)
        if self._before is not None:
            self._judge(self._before)
        else:
            self._consider(expected, count)
        return self.plan

    def _saved(self, expected: dict[Plan, float], present: Plan) -> tuple[Plan, float]:
        """The cheapest plan, and how much of a round of the present one it seems to save. A little of what
        the model is off by in the present one is taken to be its error in any."""
        unknown = min(math.sqrt(max(1.0, self._off.get(present, 1.0))), COMMON)
        corrected = {plan: seconds * self._off.get(plan, unknown) for plan, seconds in expected.items()}
        plan = min(corrected, key=lambda each: corrected[each])
        return plan, 1.0 - corrected[plan] / corrected[present]

    def _begin(self, expected: dict[Plan, float], otherwise: Plan, count: int, alone: bool) -> None:
        self._began_with = count
        plan, saved = self._saved(expected, otherwise)
        least = {"moved": self._first_moved, "direct": self._first_joined if alone else FIRST}
        self._take(plan if saved > least.get(plan, FIRST) else otherwise)

    def _is_another_load(self, done: Done) -> bool:
        if self._mean_s < SHOWN_S:  # the mean is still that of how it began
            return False
        count, share = self._load
        if not count or (share is None and done.began >= 1 / LEARN):
            count, share = count or self._mean, done.share if done.began >= 1 / LEARN else None
            self._load = count, share
        most, least = max(count, self._mean), min(count, self._mean)
        other_share = share is not None and abs(done.share - share) > NEWS_SHARE
        if not other_share and not (most > NEWS * least and most - least >= FEW):
            return False
        self._load = self._mean, done.share if share is not None else None
        return True

    def _over(self, since: Mark, least_s: float, count: float) -> bool:
        age_s = self._now.at - since.at
        return age_s >= least_s and (self._now.ended - since.ended >= count or age_s >= LONGEST_S)

    def _measure(self, count: int, expected: float, before: Mark) -> None:
        assert self.plan is not None
        if self._from is None:
            if self._over(self._since, SETTLE_S, count):
                self._from, self._expected_tokens = self._now, 0.0
            return
        self._expected_tokens += (self._now.busy - before.busy) / expected
        if self._over(self._from, MEASURE_S, 1.5 * count):
            measured, tokens = self._now.round_s(self._from), self._now.tokens - self._from.tokens
            if measured is not None:
                self._off[self.plan] = self._expected_tokens / tokens
            self._measured, self._from, self._expected_tokens = measured, self._now, 0.0

    def _judge(self, before: tuple[Plan, float]) -> None:
        plan, round_s = before
        found = self._measured
        if found is None and self._from is not None and self._now.at - self._from.at >= MEASURE_S / 2:
            found = self._now.round_s(self._from)
            found = None if found is None or found < round_s * (1.0 + WORSE) else found
        if found is None:
            return
        self._before, failed = None, found > round_s * (1.0 + NOISE)
        if failed:
            assert self.plan is not None
            self._off[self.plan] = max(self._off.get(self.plan, 1.0), found / round_s)
            self._take(plan)
            self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s)
        self._until = self._now.at + self._hold_s

    def _consider(self, expected: dict[Plan, float], count: int) -> None:
        assert self.plan is not None
        other, saved = self._saved(expected, self.plan)
        if self._measured is None:
            if saved <= CLEARLY or not self._blind:
                self._clear_since = math.inf
                return
            self._clear_since = min(self._clear_since, self._now.at)
            age_s, ended = self._now.at - self._since.at, self._now.ended - self._since.ended
            shown = ended >= CLEAR_ENDED * count or age_s >= CLEAR_LATEST_S
            if shown and age_s >= SETTLE_S and self._now.at - self._clear_since >= CLEAR_S:
                self._blind = False
                self._take(other)
        elif saved > (MARGIN if other in self._off else self._untried) and self._now.at >= self._until:
            before = self.plan, self._measured
            self._take(other)
            self._before = before
