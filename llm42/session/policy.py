"""Which way one request takes. All pure: times come in here and in the model (rounds.py), and nowhere else.

A *round* is the time in which as many tokens come as there are requests. A replica has a *plan*
(standing.py), one way for all of its deterministic requests, since neither way does well with half of them.
New ones follow the plan. Whoever has begun in the other way does if that saves more than what it costs to
have its prompt and output computed there.

The output of a deterministic request is the same whatever is decided.
"""

from __future__ import annotations

from llm42.session.load import WAYS, Load, Progress, Way

HOLD = 64
"""Output tokens between two decisions on a request."""
MARGIN = 0.02
"""A switch must save more than this share. In a large batch of best effort few deterministic requests are a
small part of a round, so more would leave them in the worse way for good."""
FULL = 0.9
"""Share of a verifier's places that may be in use for one more to go there."""
COMES, STAYS = 0.5, 0.7
"""Of places and KV the same for best effort. It comes if all of it takes no more than the one, and stays up
to the other: no deterministic request is refused because of it (verifier.target_load). Nor is one that comes
refused because others are on their way: half of them there is worst."""
WAIT_STEPS, WAIT_DEADLINES, WAIT_PROMPTS, WAIT_MORE = 32, 4, 4, 3
"""Who is decoded directly and gets no token goes another way after so many steps, commit deadlines and, at
its beginning, times that all prompts would take. For best effort: so many times the deadlines at most for
prompts."""


def choose(request: Progress, load: Load) -> Way:
    """The way for a deterministic request to go on in. One that has begun stays where it is unless it gains
    by a margin. Where too little is known, the fast path goes first: that measures both sides."""
    if load.plan is None or not load.is_known or load.rounds is None:
        return request.way or "verify"
    if load.plan == request.way or (load.plan == "direct" and not has_room(request, load)):
        return request.way or "verify"
    if request.way is None:
        return load.plan
    stays_s = request.left * round_s(load, request.way)
    goes_s = request.left * round_s(load, load.plan) + switch_s(request, load, load.plan)
    return load.plan if stays_s - goes_s > MARGIN * stays_s else request.way


def round_s(load: Load, way: Way) -> float:
    """Seconds in which as many tokens come as there are requests, if all deterministic ones take this way."""
    assert load.rounds is not None
    if way == "verify":
        return load.rounds.verify
    return load.rounds.moved if load.moves else load.rounds.direct


def has_room_for_all(typical: Progress, load: Load) -> bool:
    """Whether a verifier has places and KV for all that would be decoded there, deterministic ones as long as
    this one. If half of best effort stayed, the device would have two half batches."""
    verifier = load.verifier
    if verifier is None or not load.movable:
        return False
    full = STAYS if load.moves else COMES
    kv = load.movable * verifier.share * load.kv_each + load.here * kv_needed(typical)
    if verifier.kv_tokens and kv > full * verifier.kv_tokens:
        return False
    return not verifier.places or verifier.others + load.joined <= full * verifier.places


def choose_best_effort(request: Progress, load: Load) -> Way:
    """For a best-effort request: direct, if a verifier is to decode it; verify: the fast path keeps it, or
    gets it back."""
    if not load.is_known or not load.moves or not load.deterministic or load.rounds is None:
        return "verify"
    if not has_room(request, load, STAYS, 1.0 - STAYS):
        return "verify"
    if request.way == "direct":
        return "direct"
    assert load.verifier is not None
    prompt_s = request.length * load.verifier.prompt_row_s
    if request.way is None and prompt_s > WAIT_DEADLINES * request.deadline_s / 4:
        return "verify"
    gains_s = load.rounds.direct - load.rounds.moved  # those beside it go: it must not keep two sides busy
    if request.way is None:  # its prompt is to be computed in either way
        lost_s = prompt_s - request.length * load.prompt_row_s
    else:
        # the others behind wait for the same: while one stays, two sides share the device
        behind = load.movable if load.behind is None else max(1, load.behind)
        lost_s = behind * load.verifier.share * prompt_s
    return "direct" if request.left * gains_s > lost_s else "verify"


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


def patience_of_best_effort_s(request: Progress, load: Load, deadline_s: float) -> float:
    """How long a best-effort request may wait for its first token of a verifier that completes steps: others'
    prompts, which it gives way to, take as long on the fast path. Bounded, for that would not be its own."""
    verifier, patience = load.verifier, WAIT_DEADLINES * deadline_s
    if verifier is None or not verifier.is_measured:
        return patience
    prompts_s = max(load.joined, float(verifier.direct)) * request.length * verifier.prompt_row_s
    return patience + min(WAIT_PROMPTS * prompts_s, WAIT_MORE * patience)


def rates(load: Load) -> dict[Way, float]:
    """Tokens per second of all deterministic requests together that the model expects of each way; empty
    where it knows too little or there are none."""
    return {way: load.deterministic / round_s(load, way) for way in WAYS} if load.rounds else {}


def settled_window(run: float, least: int, most: int) -> int:
    """Candidates of the windows that a session comes to where one token in `run` mismatches: it doubles them
    while (w + 1)^2 is at most that (Session._adapt)."""
    window = least
    while (window + 1) ** 2 <= run and window < most:
        window = min(most, 2 * window + 1)
    return window
