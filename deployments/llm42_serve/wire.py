"""What goes between a replica and a verifier in `exchange` calls, and how commits are packed: as arrays for
all requests together, not as an object for each token.

Up: what a replica wants. Down: everything that is there for it. A replica numbers its calls, a verifier its
answers; an answer says behind which one it follows, so a lost one is noticed by both sides. A window has a
mark: one that comes twice is computed once, and no answer is taken for that of another window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure, TokenLogprob, VerifyTimings, Window, across_releases

Answer = Commit | Failure | LLM42Error
Ints = NDArray[np.int32]
Floats = NDArray[Any]


def outbox_of(replica: str, series: int) -> str:
    """The name of a replica's outbox. A new series is a new box: the one before may be gone."""
    return f"{replica}-{series}"


def owner_of(outbox: str) -> str:
    """The replica whose outbox it is."""
    return outbox.rpartition("-")[0]


@across_releases
@dataclass(frozen=True, slots=True)
class Packed:
    """Commits of several requests, one after the other in each array."""

    names: tuple[str, ...]
    """The request of each commit."""
    fingerprint: str
    heads: Ints
    """[commits, 5]: base, accepted, tokens (as many as log-probabilities), rows, cached_rows."""
    seconds: NDArray[np.float64]
    """[commits, 2]: queue_s, compute_s."""
    tokens: Ints
    """[tokens]: accepted candidates, the verifier's own, what it decoded."""
    logprobs: Floats
    """[tokens], float32; float64 where that would change a bit. So are the alternatives'."""
    tops: Ints
    """[tokens]: how many alternatives each has."""
    top_tokens: Ints
    top_logprobs: Floats
    """[alternatives]."""


@across_releases
@dataclass(frozen=True, slots=True)
class Up:
    """A call of a replica."""

    replica: str
    """The name of its outbox."""
    number: int
    """Of the call, from 1 on."""
    beside: int = 0
    """The other call under way, which may just be answered; 0: there is none."""
    acknowledged: int = 0
    """The last answer that has arrived with all before it."""
    interval_s: float = 0.0
    """How long directly decoded tokens may wait for others."""
    windows: tuple[Window, ...] = ()
    renewals: tuple[tuple[str, int], ...] = ()
    """Requests, and the length that each may have."""
    releases: tuple[str, ...] = ()
    """Requests that are over; one that has a window here, too, begins anew."""
    marks: tuple[int, ...] = ()
    """Of the windows: a later one has a higher mark, a repeated one the same."""
    answer_s: float = math.inf
    """When it is to be answered at the latest, after so many seconds, though nothing is there."""
    stops: tuple[tuple[str, int], ...] = ()
    """Requests that need no more tokens for now, and the mark of the window that they came of."""
    worked_s: float = -1.0
    """For how many seconds an engine has computed so far that shares the verifier's device; below 0: none
    does."""


@across_releases
@dataclass(frozen=True, slots=True)
class Down:
    """An answer. It holds what there was after the answer `after`, until `number`; of both the same number:
    there was nothing."""

    number: int
    after: int
    commits: Packed | None = None
    failures: tuple[tuple[int, str, Failure | LLM42Error], ...] = ()
    """How many commits stand before it, the request, and what is the matter."""
    box: str = ""
    """Of which outbox the numbers are: another one knows nothing of what was asked before."""
    marks: tuple[int, ...] = ()
    """Of the window that each commit belongs to, and then each failure; 0: of none that is known."""
    progressed_s: float = math.inf
    """How many seconds ago the verifier completed a step, of whatever requests."""
    direct: int = -1
    """Requests that it decodes by itself, whoever they are of; below 0: nothing is said of its load."""
    kv_free: int = 0
    """KV that is free or can be evicted, in tokens."""
    waited_s: float = 0.0
    """How long windows have waited of late."""
    worked_s: float = 0.0
    """For how many seconds it has computed so far."""
    replicas: int = 1
    """Those that have called of late, this one too."""


def pack(commits: Sequence[Commit]) -> Packed:
    """One or more commits of one verifier. Raises ValueError for what it could not give back."""
    fingerprint = commits[0].fingerprint
    heads, seconds = [], []
    for c in commits:
        own = [x.token for x in c.logprobs[c.accepted :]]
        if c.fingerprint != fingerprint or own != [c.next_token, *c.decoded]:
            raise ValueError(f"the commit for {c.request_id}@{c.base} contradicts itself or others")
        t = c.timings
        heads.append((c.base, c.accepted, len(c.logprobs), t.rows, t.cached_rows))
        seconds.append((t.queue_s, t.compute_s))
    found = [x for c in commits for x in c.logprobs]
    tops = list(chain.from_iterable(x.top for x in found))
    return Packed(
        tuple(c.request_id for c in commits),
        fingerprint,
        np.array(heads, np.int32),
        np.array(seconds, np.float64),
        _ints([x.token for x in found]),
        _floats([x.logprob for x in found]),
        _ints([len(x.top) for x in found]),
        _ints([token for token, _ in tops]),
        _floats([logprob for _, logprob in tops]),
    )


def unpack(packed: Packed) -> Iterator[Commit]:
    """The commits that were packed, with the same bits."""
    logprobs = _logprobs(packed)
    for name, head, (queue_s, compute_s) in zip(
        packed.names, packed.heads.tolist(), packed.seconds.tolist(), strict=True
    ):
        base, accepted, count, rows, cached_rows = head
        own = tuple(next(logprobs) for _ in range(count))
        next_token, *decoded = (x.token for x in own[accepted:])
        timings = VerifyTimings(queue_s, compute_s, rows, cached_rows)
        found = packed.fingerprint, timings, tuple(decoded)
        yield Commit(name, base, accepted, next_token, own, *found)


def _logprobs(packed: Packed) -> Iterator[TokenLogprob]:
    """One for each token."""
    pairs = zip(packed.top_tokens.tolist(), packed.top_logprobs.tolist(), strict=True)
    columns = packed.tokens.tolist(), packed.logprobs.tolist(), packed.tops.tolist()
    for token, logprob, count in zip(*columns, strict=True):
        yield TokenLogprob(token, logprob, tuple(next(pairs) for _ in range(count)))


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


def _floats(values: Sequence[float]) -> Floats:
    """As float32 if that keeps every bit."""
    exact = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    same = np.array_equal(short.astype(np.float64).view(np.int64), exact.view(np.int64))
    return short if same else exact
