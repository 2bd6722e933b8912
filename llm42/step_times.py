"""How busy verifiers and engines are: how long their steps take, by how many rows they decode, as measured,
whatever else these computed, and of other sizes as an estimate. Nothing of it may reach a token."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from llm42.protocol import across_releases

Curve = tuple[tuple[float, float], ...]
"""Decoded rows and seconds of a step that computes nothing else, by rising rows."""
_Step = tuple[int, float, float, float]
"""Decoded rows, other rows, seconds, when."""
SIZES = 16
KEPT, APART_S = 15, 0.1
"""Steps that are remembered of a size, and how far they are apart: what else goes on changes less soon."""
OLD_S = 600.0
"""What was measured so long ago is no news; where nothing else is known, the way is to be tried anew."""
LOOK_S = 1.0
"""For so long an evaluation stands."""
WEIGHT, HALF_S = 0.1, 1.0
"""Of a mean of late: what one value counts, and how soon all that was counts half."""
TELL_S, SILENT_S = 0.05, 0.5
"""How far apart what is told of another process has to be, and for how long it stands."""
LATE_S = 3.0
"""So old the status of a verifier may be: the supervisor asks every second, and is asked every half."""
FAR = 2.0
"""Two measurements of what a row costs that differ by more are not of the same: one is wrong."""
RESTED_S, SETTLES_S = 1.5, 0.5
"""After a rest steps are not counted for so long, or only until others are where nothing else is known:
prompts come together then, and who shares the device has not been heard."""
MOSTLY = 0.5
"""Where other rows took more than this share of a size's steps, another size tells more of it."""
APART = 0.2
"""Steps tell what a row costs if they differ by more than this share of the most rows: in a burst each has as
many as fit, fewer the more it decodes."""
CLEAN, NEAR = 3, 1.2
"""With so many steps of a size that computed nothing else, the others tell nothing of it; a size with fewer
steps tells nothing beside one that has as many. Sizes that are less than so many times apart are one."""


@across_releases
@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of steps."""

    times: Curve = ()
    """Empty: nothing."""
    row_s: float = 0.0
    """Seconds that a row of a prompt adds to a step; 0.0: not known."""

    @property
    def best_row_s(self) -> float:
        """Seconds of a row in the best of all steps. `times` is not empty."""
        return min(seconds / rows for rows, seconds in self.times)

    def at(self, rows: float) -> float:
        """Seconds of a step that decodes so many rows. Between two sizes on a line, and further on the next
        one, but never as if a row cost more than its share of a step: two sizes that were measured are often
        near each other, and differ by chance. Where only one size is known, a row more costs what one of a
        prompt does. Beyond the sizes that is rather too little: what seems cheap is tried, and then known.
        `times` is not empty."""
        below, above = self.times[0], self.times[1 % len(self.times)]
        for further in self.times[2:]:
            if rows <= above[0]:
                break
            below, above = above, further
        if below is above:
            slope = self.row_s
        else:
            slope = (above[1] - below[1]) / (above[0] - below[0])
            slope = max(slope, self.row_s) if rows > above[0] else slope
        nearest = above if rows > above[0] else below
        if not below[0] <= rows <= above[0]:
            slope = min(slope, nearest[1] / nearest[0])
        return max(nearest[1] / 4, nearest[1] + (rows - nearest[0]) * slope)


NOTHING = Costs()


class Worked:
    """For how many seconds something was computed so far. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, float | None] = 0.0, None
        """Until the last step, and when the present one began."""

    def begin(self) -> None:
        """A step begins; one that runs ends."""
        self._last = self.seconds, self._clock()

    def end(self) -> None:
        """Nothing is computed."""
        self._last = self.seconds, None

    @property
    def seconds(self) -> float:
        """The present step's, too."""
        worked, since = self._last
        return worked if since is None else worked + self._clock() - since


class Neighbour:
    """For how many seconds another process has computed since it was first heard; it tells that now and then.
    Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, float, float, float] | None = None
        """What was told, when, for which part of the time before that it had computed, and what is counted
        of it: not what was computed before it was first heard."""

    def tell(self, seconds: float) -> None:
        """It has computed for so long. What comes soon after another is not needed."""
        now = self._clock()
        if self._last is None:
            self._last = seconds, now, 0.0, 0.0
            return
        before, at, _, counted = self._last
        if seconds < before:  # it has started anew
            self._last = seconds, now, 0.0, counted
        elif now - at >= TELL_S:
            share = min(1.0, (seconds - before) / (now - at))
            self._last = seconds, now, share, counted + seconds - before

    @property
    def seconds(self) -> float:
        """As if it had gone on like that, for a while."""
        if self._last is None:
            return 0.0
        _, at, share, counted = self._last
        return counted + share * min(self._clock() - at, SILENT_S)


class StepTimes:
    """Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, late: bool = False) -> None:
        """late: a prompt's rows are told with its last ones, whenever the others were computed."""
        self._clock, self.worked, self.late = clock, Worked(clock), late
        self.neighbour: Callable[[], float] = lambda: 0.0
        """For how many seconds whoever shares the device has computed so far: half of them were not this
        side's."""
        self.row_s: Callable[[], float] = lambda: 0.0
        """Seconds of a row of a prompt as somebody else has measured them, of the same model on the same
        device; 0.0: nobody has. Asked where what is told of rows is too late to tell what they cost."""
        self._seen, self._settles_until, self._unsettled = (clock(), 0.0), -math.inf, False
        self._sizes: list[deque[_Step]] = [deque(maxlen=KEPT) for _ in range(SIZES)]
        self._found, self._looked_at, self._news = Costs(), -LOOK_S, False

    def add(self, decoded: int, others: float, seconds: float) -> None:
        """One step, or the mean of some. Those that decode 0, 1, 2 to 3, 4 to 7 ... rows are apart."""
        size, now = self._sizes[min(decoded.bit_length(), SIZES - 1)], self._clock()
        before, theirs_before = self._seen
        try:
            theirs = self.neighbour()
        except Exception:  # steps go on, whatever is the matter with what is told of another process
            theirs = theirs_before
        self._seen = now, theirs
        if now - before - seconds >= RESTED_S:
            self._settles_until = now + SETTLES_S
        if now < self._settles_until:
            if any(self._sizes) and not self._unsettled:
                return
            self._unsettled = True
        elif self._unsettled:
            self._unsettled = False
            for each in self._sizes:
                each.clear()
        if size and now - size[-1][3] < APART_S:
            return
        beside = min(1.0, max(0.0, theirs - theirs_before) / max(now - before, 1e-9))
        size.append((decoded, others, seconds * (1.0 - beside / 2), now))
        self._news = True

    @property
    def costs(self) -> Costs:
        """What was measured of late. Medians: the first step of a size often compiles something, and several
        are told of at once."""
        now = self._clock()
        if (not self._found.times and self._news) or now - self._looked_at >= LOOK_S:
            sizes = [[s for s in list(size) if now - s[3] < OLD_S] for size in self._sizes]
            self._found, self._looked_at, self._news = _evaluated(sizes, self._row_s()), now, False
        return self._found

    def _row_s(self) -> float:
        try:
            return self.row_s() if self.late else 0.0
        except Exception:  # as of a neighbour
            return 0.0


def _evaluated(sizes: Sequence[Sequence[_Step]], theirs: float) -> Costs:
    row_s = _row_s(sizes)
    if theirs and not theirs / FAR <= row_s <= theirs * FAR:
        row_s = theirs
    known = [steps for steps in sizes[1:] if steps]
    known = [steps for steps in known if len(steps) >= CLEAN] or known
    telling = [steps for steps in known if _tells(steps, row_s)]
    found = [_alone(steps, row_s) for steps in _apart(telling or known)]
    for at in range(len(found) - 2, -1, -1):  # fewer rows never take longer, nor does one of them less time
        (rows, seconds), (more, longer) = found[at], found[at + 1]
        found[at] = rows, min(max(seconds, longer * rows / more), longer)
    return Costs(tuple(found), row_s)


def _apart(sizes: Sequence[Sequence[_Step]]) -> list[list[_Step]]:
    """Sizes that are near each other as one: what differs between them is chance, and would be taken for the
    cost of a row."""
    found = list[list[_Step]]()
    for steps in sizes:
        if found and fmean(s[0] for s in steps) < NEAR * fmean(s[0] for s in found[-1]):
            found[-1] += steps
        else:
            found.append([*steps])
    return found


def _row_s(sizes: Sequence[Sequence[_Step]]) -> float:
    """What another row adds: the median slope between steps of a size (Theil 1950, Sen 1968)."""
    spreads = [max(s[1] for s in steps) - min(s[1] for s in steps) for steps in sizes if steps]
    most = max((s[1] for steps in sizes for s in steps), default=0.0)
    # of fewer rows apart what else goes on tells more than they do
    apart = max(max(spreads, default=0.0) / 2, APART * most)
    slopes = [
        (b[2] - a[2]) / (b[1] - a[1])
        for steps in sizes
        for a, b in combinations(steps, 2)
        if apart and abs(b[1] - a[1]) >= apart
    ]
    if slopes:
        return max(0.0, median(slopes))
    # nothing to compare: a row of theirs cannot cost more than its share
    return min((s[2] / (s[0] + s[1]) for steps in sizes for s in steps if s[1] > 0.0), default=0.0)


def _tells(steps: Sequence[_Step], row_s: float) -> bool:
    """Whether decoded rows are enough of what they took: of few beside a long prompt nothing is seen."""
    if sum(not s[1] for s in steps) >= CLEAN:
        return True
    return row_s * fmean(s[1] for s in steps) <= MOSTLY * fmean(s[2] for s in steps)


def _alone(steps: Sequence[_Step], row_s: float) -> tuple[float, float]:
    """Rows and seconds of a step of this size without the others' rows."""
    clean = [s for s in steps if not s[1]]
    used = clean if len(clean) >= CLEAN else steps
    rows = fmean(s[0] for s in used)
    if used is clean:
        return rows, median(s[2] for s in clean)
    # means: rows that one step is told of may have been another's
    seconds = fmean(s[2] for s in used)
    return rows, max(seconds / 10, seconds - row_s * fmean(s[1] for s in used))


class Fading:
    """A mean of late, which fades while nothing comes. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = 0.0, -math.inf

    def add(self, value: float) -> None:
        """One more."""
        mean = self.value
        self._last = mean + WEIGHT * (value - mean), self._clock()

    @property
    def value(self) -> float:
        """The mean; half of it after each HALF_S in which nothing came."""
        mean, at = self._last
        return float(mean * 0.5 ** min(60.0, (self._clock() - at) / HALF_S))


class Peak:
    """The most that a count has been of late. What a verifier says of its requests is of a moment ago: those
    that have left it meanwhile must not be taken for others'."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._present = self._most = self._before = 0
        self._since = -math.inf

    def set(self, count: int) -> None:
        """The count has changed."""
        self._roll()
        self._present, self._most = count, max(self._most, count)

    @property
    def most(self) -> int:
        """Within the last LATE_S, or twice that."""
        self._roll()
        return max(self._most, self._before)

    def _roll(self) -> None:
        if (age_s := self._clock() - self._since) >= LATE_S:
            self._before = self._most if age_s < 2 * LATE_S else self._present
            self._most, self._since = self._present, self._clock()


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    """How busy a verifier is, as a replica knows it. Which way a request takes follows from it."""

    decode_steps: Costs = NOTHING
    """Of steps in which it decoded, by the requests."""
    window_steps: Costs = NOTHING
    """Of the others, by all their rows."""
    direct: int = 0
    """Requests that it decodes by itself, those too that wait for KV or for their prompt's rows."""
    others: int = 0
    """Of these, those of other replicas."""
    places: int = 0
    """Rows of its largest step; 0: not known."""
    kv_tokens: int = 0
    """All of its KV, in tokens."""
    kv_free: int = 0
    """KV that is free or can be evicted, in tokens."""
    waited_s: float = 0.0
    """How long windows have waited of late."""
    share: float = 1.0
    """Of the replica's requests, the part that is its."""
    replicas: int = 1
    """Those that ask it. Each sees the same room, and promises no more than its part of it."""

    @property
    def is_measured(self) -> bool:
        """Whether anything is known of its steps."""
        return bool(self.decode_steps.times or self.window_steps.times)

    @property
    def decode(self) -> Costs:
        """What is known of decoding; of more requests than were ever decoded at once, as much as windows tell
        of rows."""
        known, windows = self.decode_steps, self.window_steps
        if not known.times or not windows.times:
            return known if known.times else windows
        most, seconds = known.times[-1]
        more = [(n, seconds + s - windows.at(most)) for n, s in windows.times if n > most]
        return Costs((*known.times, *((n, max(s, seconds)) for n, s in more)), known.row_s)

    @property
    def windows(self) -> Costs:
        """What is known of windows; before there was one, as much as decoding tells."""
        return self.window_steps if self.window_steps.times else self.decode_steps

    @property
    def prompt_row_s(self) -> float:
        """Seconds that a row of a prompt costs."""
        return self.decode_steps.row_s or self.windows.best_row_s
