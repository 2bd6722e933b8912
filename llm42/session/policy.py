"""Which way a request takes, by what that costs: a model and decisions, all pure.

The model is of one replica with d deterministic and b best-effort requests, and one verifier that decodes o
requests of other replicas anyway. F(n) and S(n) are the measured seconds of a step in which the fast path or
the verifier decodes n requests, W(n) those of a verifier's step of n rows of windows. Of all of the replica's
requests together come, in tokens per second,

    verify   (b + d) / (h F(b + d (1 + r)) + d v)           h = 2 where o > 0, else 1
    direct   b / (h F(b)) + d / (h S(o + d))                h = 2 where b > 0, else 1
    moved    (b - m) / (h F(b - m)) + (d + m) / (h S(o + d + m))     h = 2 where b > m, else 1

on one device, of which each side has half while both have something to do. r: candidates thrown away per
committed token; v = W(k (w + 1)) / (k (w + 1)): what a candidate costs in windows of w candidates, of which k
come while one is computed; m: best-effort requests that the verifier can decode. On two devices h is 1, and
verify is bounded by the slower of both. Windows that wait in the verifier for longer than the fast path may
be ahead hold their request up; that time is added.

A *round* is the time in which as many tokens come as there are requests. A replica has a *plan*, since
neither way does well with half of the requests: the way in which a typical request comes to its end sooner if
all take it, its prompt included, which the fast path computes once more than the verifier, d times. New ones
follow the plan. Whoever has begun in the other way does if that saves more than what it costs to have its
prompt and output computed there. b and d do not depend on who takes which way, so that one who switches gives
no other one a reason to.

Times come in here and nowhere else. The output of a deterministic request is the same whatever is decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from llm42.step_times import NOTHING, Costs, VerifierLoad

Way = Literal["verify", "direct"]
WAYS: tuple[Way, Way] = ("verify", "direct")
HOLD = 64
"""Output tokens between two decisions on a request."""
MARGIN = 0.02
"""A switch, and another plan, must save more than this share. In a large batch of best effort few
deterministic requests are a small part of a round, so more would leave them in the worse way for good."""
MOVE_MARGIN, TRY_MARGIN = 0.1, 0.25
"""Best effort leaves the fast path, where it is at home, for more than this share of a round, or the second
one where so many were not decoded together by far: what is not measured is estimated as rather too cheap."""
LEAST_LEFT = 128
"""A request is expected to go on for as long as it has been going on, but for so many tokens at least, within
max_tokens: few outputs are as long as they may be."""
FULL = 0.9
"""Share of a verifier's places that may be in use for one more to go there."""
COMES, STAYS = 0.5, 0.7
"""Of places and KV the same for best effort that comes and that is there: no deterministic request is refused
because of it (verifier.target_load)."""
WAIT_STEPS, WAIT_DEADLINES, WAIT_PROMPTS = 32, 4, 4
"""Who is decoded directly and gets no token goes another way after so many steps, commit deadlines and, at
its beginning, times that all prompts would take."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is known of the replica and its verifier."""

    best_effort: int = 0
    """Requests that need no verifier."""
    movable: int = 0
    """Of these, those that it could decode."""
    moves: bool = False
    """Whether they go there now (`moves`)."""
    deterministic: int = 1
    """The replica's, in both ways."""
    fast: Costs = NOTHING
    """Of the fast path's steps."""
    verifier: VerifierLoad | None = None
    """None: none is known."""
    one_device: bool = True
    """Whether the fast path and the verifier share one."""
    plan: Way | None = None
    """The way that is cheaper for all; None: too little is known (`planned`)."""
    promised: float = 0.0
    """KV, in tokens, that those of the replica who go direct have not taken yet."""
    coming: int = 0
    """Those of them who are in no count of the verifier's yet."""
    prompts: float = 0.0
    """Tokens of prompts per token of output, of best effort."""
    kv_each: float = 0.0
    """KV, in tokens, that a typical best-effort request comes to hold."""

    @property
    def is_known(self) -> bool:
        """Whether both have been measured."""
        return bool(self.fast.times) and self.verifier is not None and self.verifier.is_measured

    @property
    def prompt_row_s(self) -> float:
        """Seconds that a row of a prompt costs on the fast path; before one was measured there, what it costs
        its verifier."""
        assert self.verifier is not None
        return self.fast.row_s or self.verifier.prompt_row_s

    @property
    def joined(self) -> float:
        """Of the replica's requests, those of one verifier if it decodes all that it can."""
        assert self.verifier is not None
        return (self.deterministic + self.movable) * self.verifier.share

    @property
    def here(self) -> float:
        """Of the deterministic requests, those of one verifier."""
        assert self.verifier is not None
        return self.deterministic * self.verifier.share


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of the request."""

    way: Way | None = None
    """None: it has not begun. Best effort on the fast path goes verify, as it were: an engine has it."""
    length: int = 1
    """Prompt and output so far."""
    output: int = 0
    """The output so far."""
    most: int = 1
    """The longest that the output may be."""
    held: int = 0
    """How many of these tokens the fast path is believed to have computed."""
    wasted: float = 0.0
    """Candidates thrown away per committed token."""
    window: float = 15
    """Candidates of a window."""
    ahead: int = 128
    """How far the fast path may be ahead of the commits, in candidates."""
    typical: int = LEAST_LEFT
    """How long outputs are in general."""
    deadline_s: float = math.inf
    """A window is sent so long after a commit, however short it is."""

    @property
    def left(self) -> int:
        """Tokens that are expected to come."""
        expected = self.typical if self.way is None else LEAST_LEFT
        return max(0, min(self.most - self.output, max(self.output, expected)))


def choose(request: Progress, load: Load) -> Way:
    """The way for a deterministic request to go on in. One that has begun stays where it is unless it gains
    by a margin. Where too little is known, the fast path goes first: that measures both sides."""
    if load.plan is None or not load.is_known:
        return request.way or "verify"
    if load.plan == request.way or (load.plan == "direct" and not has_room(request, load)):
        return request.way or "verify"
    if request.way is None:
        return load.plan
    stays_s = request.left * round_s(request, load, request.way)
    goes_s = request.left * round_s(request, load, load.plan) + switch_s(request, load, load.plan)
    return load.plan if stays_s - goes_s > MARGIN * stays_s else request.way


def planned(typical: Progress, load: Load) -> Way | None:
    """The plan of a replica whose requests are like this one, by the present one, which stands unless another
    is cheaper by a margin. None: too little is known."""
    cost = costs(typical, load)
    if not cost:
        return load.plan if load.is_known else None
    if load.plan is None:
        return "direct" if cost["direct"] <= cost["verify"] else "verify"
    other: Way = "verify" if load.plan == "direct" else "direct"
    return other if cost[other] < (1.0 - MARGIN) * cost[load.plan] else load.plan


def costs(typical: Progress, load: Load) -> dict[Way, float]:
    """Seconds until a typical request ends if all take that way; empty: nothing is known, or nobody asks."""
    if not load.is_known or not load.deterministic:
        return {}
    return {way: typical.left * round_s(typical, load, way) + prompts_s(typical, load, way) for way in WAYS}


def moves(typical: Progress, load: Load) -> bool:
    """Whether best effort is to be decoded with the deterministic requests, because that is faster for both,
    where these are like this one. One answer for all of a replica, which stands until there is another: half
    of them there is worst."""
    if not load.is_known or not load.deterministic or not load.movable:
        return False
    assert load.verifier is not None
    if not has_room_for_all(typical, load):
        return False
    known = load.verifier.decode_steps.times
    measured = bool(known) and 2 * known[-1][0] >= load.verifier.others + load.joined
    margin = 0.0 if load.moves else MOVE_MARGIN if measured else TRY_MARGIN
    stays_s = min(round_s(typical, replace(load, moves=False), way) for way in WAYS)
    moved_s = round_s(typical, replace(load, moves=True), "direct")
    return moved_s < stays_s * (1.0 - margin)


def has_room_for_all(typical: Progress, load: Load) -> bool:
    """Whether a verifier has places and KV for all that would be decoded there, deterministic ones as long as
    this one. If half of best effort stayed, the device would have two half batches."""
    verifier = load.verifier
    assert verifier is not None
    full = STAYS if load.moves else COMES
    kv = load.movable * verifier.share * load.kv_each + load.here * kv_needed(typical)
    if verifier.kv_tokens and kv > full * verifier.kv_tokens:
        return False
    return not verifier.places or verifier.others + load.joined <= full * verifier.places


def choose_best_effort(request: Progress, load: Load) -> Way:
    """For a best-effort request: direct, if a verifier is to decode it; verify: the fast path keeps it, or
    gets it back."""
    full = STAYS if request.way == "direct" else COMES
    if not load.is_known or not load.moves or not load.deterministic:
        return "verify"
    if not has_room(request, load, full, (1.0 - full)):
        return "verify"
    if request.way == "direct":
        return "direct"
    assert load.verifier is not None
    prompt_s = request.length * load.verifier.prompt_row_s
    if request.way is None and prompt_s > WAIT_DEADLINES * request.deadline_s / 4:
        return "verify"
    stays_s = min(round_s(request, replace(load, moves=False), way) for way in WAYS)
    gains_s = stays_s - round_s(request, load, "direct")
    if request.way is None:  # its prompt is to be computed in either way
        lost_s = prompt_s - request.length * load.prompt_row_s
    else:
        lost_s = load.movable * load.verifier.share * prompt_s
    return "direct" if request.left * gains_s > lost_s else "verify"


def round_s(request: Progress, load: Load, way: Way) -> float:
    """Seconds in which as many tokens come as there are requests, if all deterministic ones take this way."""
    if way == "verify":
        return _verified_round_s(request, load)
    fast, decoded = rates_beside(load)
    return (load.best_effort + load.deterministic) / (fast + decoded)


def rates_beside(load: Load) -> tuple[float, float]:
    """Tokens per second of what the fast path and the verifiers decode, each by itself."""
    verifier = load.verifier
    assert verifier is not None
    moved = load.movable if load.moves else 0
    rest, joined = load.best_effort - moved, load.deterministic + moved
    halves = 2.0 if rest > 0 and load.one_device else 1.0
    fast = rest / (halves * (load.fast.at(rest) + best_effort_prompts_s(load, rest))) if rest > 0 else 0.0
    rows_s = moved * verifier.share * load.prompts * verifier.prompt_row_s
    step_s = verifier.decode.at(verifier.others + joined * verifier.share) + rows_s
    return fast, joined / (halves * step_s)


def best_effort_prompts_s(load: Load, count: float) -> float:
    """Seconds that the prompts of so many best-effort requests take of a round on the fast path: others come
    as these end."""
    return count * load.prompts * load.prompt_row_s if load.prompts else 0.0


def _verified_round_s(request: Progress, load: Load) -> float:
    verifier = load.verifier
    assert verifier is not None
    halves = 2.0 if verifier.others and load.one_device else 1.0
    step_s = load.fast.at(load.best_effort + load.deterministic * (1.0 + request.wasted))
    fast = halves * (step_s + best_effort_prompts_s(load, load.best_effort))
    rows = 1 + max(1.0, min(request.window, request.deadline_s / fast))
    alone_s = verifier.windows.at(rows)
    at_once = min(load.here, max(1.0, load.here * alone_s / (rows * fast)))
    windows = load.here * verifier.windows.at(at_once * rows) / (at_once * rows)
    held_up = max(0.0, verifier.waited_s + alone_s - request.ahead * fast) / rows
    return (fast + windows if load.one_device else max(fast, windows)) + held_up


def prompts_s(request: Progress, load: Load, way: Way) -> float:
    """Seconds in which all deterministic requests' prompts are computed, if each is as long as this one's.
    The verifier computes them in either way."""
    assert load.verifier is not None
    canonical = load.here * request.length * load.verifier.prompt_row_s
    fast = load.deterministic * request.length * load.prompt_row_s if way == "verify" else 0.0
    return fast + canonical if load.one_device else max(fast, canonical)


def switch_s(request: Progress, load: Load, way: Way) -> float:
    """Seconds until the fast path has computed what it does not hold of all deterministic requests, if each
    is as long as this one. A verifier holds all."""
    missing = max(0, request.length - request.held)
    return load.deterministic * missing * load.prompt_row_s if way == "verify" else 0.0


def kv_needed(request: Progress) -> int:
    """KV, in tokens, that it will hold in a verifier."""
    return request.length + request.left


def has_room(request: Progress, load: Load, full: float = FULL, spare: float = 0.0) -> bool:
    """Whether the verifier has a place and KV for what is to come, beside what others were promised: who is
    decoded there cannot be set aside between its windows. full: of the places; spare: of the KV."""
    verifier = load.verifier
    assert verifier is not None
    comes = request.way != "direct"
    coming = load.coming * verifier.share * verifier.replicas if comes else 0.0
    if verifier.places and verifier.direct + coming >= full * verifier.places:
        return False
    needed = kv_needed(request) if comes else request.left
    promised = load.promised * verifier.share * (verifier.replicas if comes else 1)
    return verifier.kv_free - promised - spare * verifier.kv_tokens >= needed


def patience_s(request: Progress, load: Load, deadline_s: float, begun: bool) -> float:
    """How long a request that is decoded directly may wait for a token before it goes another way. begun: it
    has had one there. As long as it takes where nothing is known: then a switch may be worse."""
    verifier, patience = load.verifier, WAIT_DEADLINES * deadline_s
    if verifier is None or not verifier.is_measured:
        return 10 * patience
    count = max(1.0, load.here, float(verifier.direct))
    patience += WAIT_STEPS * verifier.decode.at(count)
    if not begun:
        patience += WAIT_PROMPTS * count * request.length * verifier.prompt_row_s
    return patience


def rates(request: Progress, load: Load) -> dict[Way, float]:
    """Tokens per second of all deterministic requests together that the model expects of each way; empty
    where it knows too little or there are none."""
    if not load.is_known or not load.deterministic:
        return {}
    joined = load.deterministic + (load.movable if load.moves else 0)
    direct = rates_beside(load)[1] * load.deterministic / joined
    return {"verify": load.deterministic / _verified_round_s(request, load), "direct": direct}


def settled_window(run: float, least: int, most: int) -> int:
    """Candidates of the windows that a session comes to where one token in `run` mismatches: it doubles them
    while (w + 1)^2 is at most that (Session._adapt)."""
    window = least
    while (window + 1) ** 2 <= run and window < most:
        window = min(most, 2 * window + 1)
    return window
