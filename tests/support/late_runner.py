"""A pipelined runner without a device: work is done in the order it was queued, and late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llm42.sampling import Sampled
from llm42.verifier.runner import Runner, SequenceRows


class LateRunner:
    """Computes a queued step only when it is waited for, from what the host had said when it was queued;
    tokens that the host did not know then come from the step before."""

    def __init__(self, runner: Any, fail_at: int | None = None) -> None:
        """fail_at: the number of a step that fails."""
        self.runner: Runner = runner
        self.fail_at = fail_at
        self.begun = self.most_in_flight = self.fed = 0
        self._queued: deque[tuple[int, Callable[[], list[list[Sampled]]]]] = deque()
        self._tokens: list[int] = []
        """By logit row of the last step that was computed: what is on the device."""

    def begin(self, bucket: int, sequences: list[SequenceRows]) -> int:
        """Queues a step."""
        told = [replace(s, tokens=list(s.tokens), block_table=list(s.block_table)) for s in sequences]
        self._queued.append((self.begun, lambda: self._compute(bucket, told)))
        self.begun += 1
        self.most_in_flight = max(self.most_in_flight, self.begun - self._queued[0][0])
        return self.begun - 1

    def finish(self, pending: int) -> list[list[Sampled]]:
        """Does all that was queued up to this step."""
        while True:
            number, work = self._queued.popleft()
            results = work()
            if number == pending:
                break
            assert number < 0, "steps must be finished in the order they were begun"
        if number == self.fail_at:
            raise RuntimeError("planted failure")
        return results

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Both at once."""
        return self.finish(self.begin(bucket, sequences))

    def copy_block(self, source: int, target: int) -> None:
        """In the order of the steps."""

        def copy() -> list[list[Sampled]]:
            self.runner.copy_block(source, target)
            return []

        if self._queued:
            self._queued.append((-1, copy))
        else:
            copy()

    def _compute(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        results = self.runner.step(bucket, [self._fed(s) for s in sequences])
        if any(results):  # a step without logit rows leaves what is there
            self._tokens = [x.token for rows in results for x in rows]
        return results

    def _fed(self, s: SequenceRows) -> SequenceRows:
        if s.feed < 0:
            return s
        self.fed += 1
        token = self._tokens[s.feed]
        return replace(s, tokens=[*s.tokens[: s.start], token, *s.tokens[s.start + 1 :]], feed=-1)
