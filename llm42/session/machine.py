"""The decode-verify-rollback session of one deterministic request: a state machine without clocks, threads
or I/O.

Events go in (`candidates`, `commit`), actions come out. `committed` begins with what the client has already
(`Request.output`). Nothing but `commit` adds to it, through `_append`, and only what was added is ever
emitted. Which window is sent when depends on timing; what a window's answer is does not, so the output is a
function of the request and the verifier's fingerprint.

In the way called direct one window is all that is sent: under its credit the verifier goes on by itself, in
many commits. Of these each position is taken once and in order, however they come. `turn` changes the way;
what is committed stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llm42.config import SessionSettings
from llm42.protocol import Commit, FinishReason, Request, RequestStats, TokenLogprob, Window
from llm42.session.actions import Action, Emit, Extend, Renew, Resend, Rollback
from llm42.session.load import Way


@dataclass(slots=True)
class Session:
    """State of one request. Times are seconds on the caller's clock."""

    request: Request
    settings: SessionSettings
    last_commit: float
    committed: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    """Candidates after `committed` that wait for verification (the window in flight included)."""
    epoch: int = 0
    in_flight: Window | None = None
    """The window whose answer is awaited; in the way direct the one that the verifier goes on after."""
    finish: FinishReason | None = None
    target: int = 0
    stats: RequestStats = field(default_factory=RequestStats)
    way: Way = field(init=False)
    """Whether candidates of a fast path are verified, or the verifier decodes and no fast path does."""
    credit: int = field(init=False)
    """What windows carry; 0: each has one commit."""
    until: int = 0
    """Up to which length of prompt and output the verifier may go on; 0: no window had credit."""
    dropped: int = 0
    """Candidates thrown away because the way changed: they are among `stats.rolled_back_tokens`."""
    _gap_at: int = -1
    """Length of the output at which a commit was last found missing."""
    _fast: int = 0
    """Output tokens the fast path has reported in this epoch and that agree with `committed` and
    `proposed`."""

    def __post_init__(self) -> None:
        self.target = self.settings.start_window
        self.way = "direct" if self.settings.mode == "direct" else "verify"
        self.credit = self.settings.credit if self.direct else 0
        self.committed = list(self.request.output)
        self._fast = len(self.committed)

    @property
    def direct(self) -> bool:
        """Whether the verifier decodes, and no fast path."""
        return self.way == "direct"

    def turn(self, way: Way) -> None:
        """Goes on in the other way behind what is committed; from verify to direct only while no window is in
        flight. Who goes direct takes its candidates along in one window. Whoever verifies begins with a fast
        path that has nothing but `committed`, in epoch 0; what is still under way of the ways before must not
        be given to the session any more."""
        assert way != self.way and (self.direct or self.in_flight is None)
        self.way, self.credit = way, self.settings.credit if way == "direct" else 0
        self.in_flight, self.until, self._gap_at = None, 0, -1
        kept = self._window_length()[0] if self.direct else 0
        self.dropped += len(self.proposed) - kept
        self.stats.rolled_back_tokens += len(self.proposed) - kept
        del self.proposed[kept:]
        self.epoch, self._fast = 0, len(self.committed)

    @property
    def done(self) -> bool:
        """Whether the output has ended."""
        return self.finish is not None

    @property
    def limit(self) -> int:
        """Up to which output token the fast path may decode now: beyond twice the mean run fewer than one
        candidate in seven (exp(-2)) would be committed. Within an epoch it never moves back."""
        return min(len(self.committed) + self._ahead, self.request.max_tokens)

    def candidates(self, epoch: int, start: int, tokens: Sequence[int]) -> list[Action]:
        """Tokens from the fast path, `tokens[i]` being output token `start + i`; a stale epoch is ignored."""
        if epoch != self.epoch or self.finish:
            return []
        assert start == self._fast, f"fast path skipped from output token {self._fast} to {start}"
        self.stats.candidate_tokens += len(tokens)
        for index, token in enumerate(tokens):
            if self._fast < len(self.committed):  # a bonus token came before the fast path's own
                if token != self.committed[self._fast]:
                    return [self._roll_back(lost=len(tokens) - index)]
            else:
                self.proposed.append(token)
            self._fast += 1
        return []

    def due(self, now: float) -> Window | None:
        """The window to send now, or None; the caller must send what it gets."""
        if self.in_flight or self.finish:
            return None
        length = len(self.proposed)
        if not self.direct:
            length, closed = self._window_length()
            if not length or not (length >= self.target or closed or self._is_late(now)):
                return None
        self.in_flight = self._window(tuple(self.proposed[:length]))
        self.stats.windows += 1
        return self.in_flight

    def _window(self, candidates: tuple[int, ...]) -> Window:
        request = self.request
        window = Window(
            request.request_id,
            (*request.prompt, *self.committed),
            len(request.prompt),
            candidates,
            request.sampling,
            request.num_logprobs or 0,
            cache_salt=request.cache_salt,
        )
        if not self.credit:
            return window
        self.until = min(len(window.tokens) + 1 + self.credit, self._max_len)
        ends = request.stop_token_ids
        return replace(window, credit=self.credit, stop_token_ids=ends, max_len=self._max_len)

    @property
    def _max_len(self) -> int:
        return len(self.request.prompt) + self.request.max_tokens

    def wanted(self, now: float) -> float:
        """From which output token on the fast path's candidates let something be done: a window is due then,
        or the first of them may disagree with what is committed. Infinity while a window is in flight."""
        if self.in_flight or self.finish:
            return float("inf")
        if self._fast < len(self.committed) or self._is_late(now):
            return 0
        return min(len(self.committed) + self.target, self.limit)

    def deadline(self, now: float) -> float | None:
        """When `due` should be asked again if nothing happens; None while that would not help."""
        if self.in_flight or self.finish or self._is_late(now):
            return None
        return self.last_commit + self.settings.commit_deadline_s

    def _is_late(self, now: float) -> bool:
        return now >= self.last_commit + self.settings.commit_deadline_s

    def commit(self, commit: Commit, now: float) -> list[Action]:
        """The answer to the window in flight or, once a window had credit, how the verifier went on.

        What stands already is compared and left; behind a gap nothing is taken. ValueError: it cannot be."""
        if self.finish:
            return []
        window, begin = self.in_flight, commit.base - len(self.request.prompt)
        answers = window is not None and commit.base == len(window.tokens)
        if commit.request_id != self.request.request_id or begin < 0 or not (answers or self.until):
            name = f"{commit.request_id}@{commit.base}"
            raise ValueError(f"commit for {name} does not answer this session's window")
        if begin > len(self.committed):
            return self._missing()
        known = self.committed[begin:]
        # of a window before, the commit itself says which candidates stand
        given = tuple(x.token for x in commit.logprobs[: max(0, commit.accepted)])
        given = window.candidates if window is not None and answers else given
        fresh = self._fresh(commit, given, known)
        if answers and not self.direct:
            self.in_flight = None
        if not fresh:
            return []
        self.last_commit, stood = now, len(known)
        emit = self._append(fresh, commit.logprobs[stood:])
        decoded_from = commit.accepted + 1 if given else 0
        self.stats.direct_tokens += max(0, stood + len(emit.tokens) - max(stood, decoded_from))
        refused = answers and stood <= commit.accepted < len(given)
        follow = self._follow(emit.tokens, refused)
        actions: list[Action] = [emit, *(self._renewals() if self.direct else [follow])]
        if answers and not self.direct:
            self._adapt(commit, len(given))
        return actions[:1] if self.finish else actions

    def _fresh(self, commit: Commit, given: Sequence[int], known: Sequence[int]) -> tuple[int, ...]:
        """The commit's tokens after those that are known from its base on. given: what it may accept of."""
        count = commit.accepted + 1 + len(commit.decoded)
        unasked = bool(commit.decoded) and not self.until
        if unasked or not 0 <= commit.accepted <= len(given) or len(commit.logprobs) != count:
            raise ValueError(
                f"a commit of {commit.accepted} candidates with {len(commit.logprobs)} log-probabilities does"
                f" not answer a window of {len(given)}"
            )
        tokens = (*given[: commit.accepted], commit.next_token, *commit.decoded)
        for at, (token, stands) in enumerate(zip(tokens, known, strict=False), commit.base):
            if token != stands:
                raise ValueError(
                    f"a broken promise: the verifier says {token} at position {at}, and had said {stands}"
                )
        return tokens[len(known) :]

    def _missing(self) -> list[Action]:
        """Asks once for what is missing: what is on its way behind the gap is ignored meanwhile."""
        if self._gap_at == len(self.committed):
            return []
        self._gap_at, self.in_flight = len(self.committed), None
        return [Resend()]

    def _renewals(self) -> list[Action]:
        """More credit when half is used, if anything is left to decode for whoever decodes."""
        length = len(self.request.prompt) + len(self.committed)
        until = min(length + self.credit, self._max_len)
        if not self.in_flight or 2 * (self.until - length) > self.credit or until <= self.until:
            return []
        self.until = until
        return [Renew(until)]

    def lost(self) -> None:
        """The verifier is gone, or knows nothing of the request: `due` gives the window in full again."""
        self.in_flight, self._gap_at = None, -1

    def stop(self, reason: FinishReason = FinishReason.STOP) -> None:
        """Ends the session from outside: a stop string in the committed text, or the client is gone."""
        self.finish = self.finish or reason

    @property
    def _ahead(self) -> int:
        return int(min(self.settings.lookahead, max(self.settings.min_window, 2 * self._run)))

    @property
    def _run(self) -> float:
        """Tokens per rollback so far, as if a longest window had matched before; infinite without one."""
        rollbacks = self.stats.rollbacks
        return (self.stats.verified_tokens + self.settings.max_window) / rollbacks if rollbacks else math.inf

    def _window_length(self) -> tuple[int, bool]:
        """How many candidates to send, and whether waiting for more is pointless: the output may end
        there, or the fast path is at its lookahead bound."""
        length = min(len(self.proposed), self.settings.max_window)
        for i, token in enumerate(self.proposed[:length]):
            if token in self.request.stop_token_ids:
                return i + 1, True
        return length, len(self.committed) + len(self.proposed) >= self.limit

    def _append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Emit:
        """The one place that lets tokens out: adds verified ones until the output ends, drops the rest."""
        used = 0
        for token in tokens:
            self.committed.append(token)
            used += 1
            if token in self.request.stop_token_ids:
                self.finish = FinishReason.STOP
            elif len(self.committed) >= self.request.max_tokens:
                self.finish = FinishReason.LENGTH
            if self.finish:
                break
        self.stats.verified_tokens += used
        return Emit(tuple(tokens[:used]), tuple(logprobs[:used]))

    def _follow(self, tokens: Sequence[int], mismatch: bool) -> Action:
        """Holds new committed tokens against the candidates, which may be fewer. mismatch: they do differ."""
        for token in tokens:
            if self.proposed and self.proposed[0] != token:
                return self._roll_back(lost=len(self.proposed))
            del self.proposed[:1]
        return self._roll_back(lost=len(self.proposed)) if mismatch else Extend(self.limit)

    def _roll_back(self, lost: int) -> Rollback:
        self.stats.rollbacks += 1
        self.stats.rolled_back_tokens += lost
        self.proposed.clear()
        self.epoch += 1
        self._fast = len(self.committed)
        return Rollback(tuple(self.committed), self.epoch, self.limit)

    def _adapt(self, commit: Commit, sent: int) -> None:
        """Doubles the target length after a full match, or when the verifier's queue is what commits wait
        for; halves it after a mismatch. Lengths of 2^k - 1 candidates make windows of 2^k rows.

        Windows of w rows cost 1/w extra rows a token and, when one token in `run` mismatches, w / (2 run)
        tokens decoded in vain (half a window each): least at w^2 = 2 run. So w doubles while w 2w is at most
        2 run.
        """
        full = commit.accepted == sent
        worth = full and (self.target + 1) ** 2 <= self._run
        if worth or commit.timings.queue_s > self.settings.commit_deadline_s:
            grown = min(self.settings.max_window, 2 * self.target + 1)
            # a window as long as the lookahead would be sent only when the fast path stands still
            least = self.target if full else self.settings.min_window
            self.target = grown if worth else max(least, min(grown, self._ahead // 2))
        elif not full:
            self.target = max(self.settings.min_window, self.target // 2)
