"""How long a round is in each way: the time in which as many tokens come as requests are in progress. A model
of one replica, and of one verifier that decodes o requests of other replicas anyway.

F(n) and S(n) are the measured seconds of a step in which the fast path or the verifier decodes n requests,
W(n) those of a verifier's step of n rows of windows. A request of class c brings q_c tokens of prompt per
token of output, whose rows cost f on the fast path and s in the verifier. n requests are in progress, for as
many begin as end, and a share p of those that begin is deterministic. How many of the n are deterministic
depends on the way, since in one way they are slower than in the other; so the counts d and b of the moment
are not used, but those that come about once all have taken it.

    verify   all go on at the same pace:    d : b = p L_d : (1 - p) L_b     (L: tokens of output)
             a round is  h (F(b + d (1 + r)) + b q_b f + d q_d f) + d (v + q_d s)
    direct   the verifier has d = x, the fast path b = n - x, with
             x / (L_d h S'(x)) : (n - x) / (L_b h F'(n - x)) = p : (1 - p)
             a round is  n / (x / (h S'(x)) + (n - x) / (h F'(n - x)))
             S'(x) = S(o + x) + x q_d s,  F'(b) = F(b) + b q_b f
    moved    as direct, with the best effort that the verifier can decode on its side

On one device each side has half of it while both have something to do (h = 2), and in verify the fast path
while the verifier decodes others. r: candidates thrown away per committed token; v = W(k (w + 1)) / (k (w +
1)): what a candidate costs in windows of w candidates, of which k come while one is computed (TOGETHER). On
two devices h is 1, and verify is bounded by the slower of both. Windows that wait in the verifier for longer
than the fast path may be ahead hold their request up; that time is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm42.session.load import Load, Progress, Rounds

HALVINGS = 24
"""Of the interval in which the verifier's share of the requests is looked for."""
TOGETHER = 3.0
"""Windows that one step has answered are sent together again, a deadline later: so many times more come at
once than if each had a moment of its own (as simulated: 1 to 5)."""
ROUNDS = 4
"""After so many, what depends on itself changes by less than what is measured is worth."""


@dataclass(frozen=True, slots=True)
class Side:
    """Requests that one side decodes."""

    begins: float
    """Their share of all that begin."""
    output: float
    """Tokens of one's output."""
    step_s: Callable[[float], float]
    """Seconds in which so many of them get a token each, their prompts' part included."""


def rounds(typical: Progress, load: Load) -> Rounds | None:
    """Of each way; None: too little is known, or nobody asks. typical: a deterministic request."""
    if not load.is_known or not load.deterministic:
        return None
    direct = apart_s(typical, load, False)
    moved = apart_s(typical, load, True) if load.movable else direct
    return Rounds(verified_s(typical, load), direct, moved)


def output_of_best_effort(typical: Progress, load: Load) -> float:
    """Tokens; as deterministic ones' where none has ended."""
    return load.kv_each / (1.0 + load.prompts) if load.kv_each else _output(typical)


def apart_s(typical: Progress, load: Load, moved: bool) -> float:
    """Seconds of a round in which the verifiers decode all deterministic requests, and if moved all best
    effort that they can."""
    decoded, rest = _sides(typical, load, moved)
    count, at_once = load.count, min(1.0, load.count - 1.0)

    def rates(here: float) -> tuple[float, float]:
        """Tokens per second of either side if so many of the requests are the verifiers'."""
        there, one_device = count - here, load.one_device
        halves = [1.0 + one_device * max(0.0, min(1.0, at_once, other)) for other in (there, here)]
        return _rate(decoded, here, halves[0]), _rate(rest, there, halves[1])

    low, high = 0.0, float(count)
    if not rest.begins or not decoded.begins:
        low = high = float(count) if decoded.begins else 0.0
    for _ in range(HALVINGS if low < high else 0):
        middle = (low + high) / 2
        here_s, there_s = rates(middle)
        ends_too_often = here_s / decoded.output * rest.begins > there_s / rest.output * decoded.begins
        low, high = (low, middle) if ends_too_often else (middle, high)
    return count / sum(rates((low + high) / 2))


def _sides(typical: Progress, load: Load, moved: bool) -> tuple[Side, Side]:
    verifier, fast = load.verifier, load.fast
    assert verifier is not None
    share = load.share
    goes = (load.movable / load.best_effort if load.best_effort else 0.0) * (1.0 - share) if moved else 0.0
    ours, others = _output(typical), output_of_best_effort(typical, load)
    begins = share + goes
    output = (share * ours + goes * others) / begins if begins else ours
    prompts = (share * typical.length + goes * others * load.prompts) / begins / output if begins else 0.0

    def decode_s(count: float) -> float:
        here = count * verifier.share
        return load.decode.at(max(1.0, verifier.others + here)) + here * prompts * verifier.prompt_row_s

    def fast_s(count: float) -> float:
        return fast.at(max(1.0, count)) + count * load.prompts * load.prompt_row_s

    return Side(begins, output, decode_s), Side(1.0 - begins, others, fast_s)


def _rate(side: Side, count: float, halves: float) -> float:
    return count / (halves * side.step_s(count)) if side.begins else 0.0


def _output(typical: Progress) -> float:
    return float(max(1, typical.left))


def verified_s(typical: Progress, load: Load) -> float:
    """Seconds of a round in which the fast path decodes all and verifiers compute windows."""
    verifier, share = load.verifier, load.share
    assert verifier is not None
    ours, others = share * _output(typical), (1.0 - share) * output_of_best_effort(typical, load)
    deterministic = load.count * ours / (ours + others)
    rest, here = load.count - deterministic, deterministic * verifier.share
    prompts = typical.length / _output(typical)
    halves = 2.0 if verifier.others and load.one_device else 1.0
    step_s = load.fast.at(max(1.0, rest + deterministic * (1.0 + typical.wasted)))
    fast = halves * (step_s + (rest * load.prompts + deterministic * prompts) * load.prompt_row_s)
    found = fast
    for _ in range(ROUNDS):
        found, held_up = _with_windows(typical, load, here, prompts, fast, found)
    return found + held_up


def _with_windows(
    typical: Progress, load: Load, here: float, prompts: float, fast: float, before: float
) -> tuple[float, float]:
    """Seconds of a round with windows of so many of a verifier's requests, and of waiting for commits. fast:
    what the fast path takes; before: a round as it was thought to be, on which the windows' size depends."""
    verifier = load.verifier
    assert verifier is not None
    rows = 1 + max(1.0, min(typical.window, typical.deadline_s / before))
    alone_s, at_once = load.window_s(rows), 1.0
    for _ in range(ROUNDS):  # while a step is computed, the next one's windows come
        took_s = load.window_s(at_once * rows) * (1.0 + load.one_device)
        at_once = max(1.0, min(here, TOGETHER * here * took_s / (rows * before)))
    windows = here * (load.window_s(at_once * rows) / (at_once * rows) + prompts * verifier.prompt_row_s)
    held_up = max(0.0, verifier.waited_s + alone_s - typical.ahead * before) / rows
    return (fast + windows if load.one_device else max(fast, windows)), held_up
