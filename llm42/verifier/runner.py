"""What a verifier step computes and returns: the contract between the step scheduler and a runner (CPU or
CUDA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from llm42.protocol import SamplingParams
from llm42.sampling import Draw, Sampled, reads_history


@dataclass(slots=True)
class SequenceRows:
    """Consecutive rows of one sequence in a step.

    Row i is token `tokens[start + i]` at absolute position `start + i`, for i in [0, count). Its KV goes
    to block `block_table[(start + i) // block_size]`; every earlier position is already in the cache. Rows
    at positions >= `first_logit` get logits and a sampled token (the token for position + 1); rows before
    only fill the cache.
    """

    tokens: list[int]
    start: int
    count: int
    block_table: list[int]
    first_logit: int
    prompt_len: int
    sampling: SamplingParams
    num_logprobs: int = 0
    score: bool = False
    """Rows that have a next token in `tokens` give that token's log-probability and draw nothing."""
    feed: int = -1
    """Not negative: the first row's token is not in `tokens` yet. It is the one sampled by the logit row of
    this number in the step that was begun just before. Only a pipelined runner is asked so."""
    decodes: bool = False
    """One row of a sequence that is decoded: the same object in each step, with another position."""
    tally: Any = None
    """What a runner keeps of a sequence that is decoded; dropped with the object."""

    @property
    def logit_positions(self) -> range:
        """Positions of the rows that get logits."""
        return range(max(self.start, self.first_logit), self.start + self.count)

    def draw_at(self, position: int) -> Draw:
        """What the row at `position` asks of the sampler."""
        if self.score and position + 1 < len(self.tokens):
            return Draw(_NO_DRAW, (), 0, self.num_logprobs, self.tokens[position + 1])
        # where only the number of tokens counts no copy is made, and the last may still be on the device
        ids = self.tokens[: position + 1] if reads_history(self.sampling) else range(position + 1)
        return Draw(self.sampling, ids, self.prompt_len, self.num_logprobs)


_NO_DRAW = SamplingParams()


class Runner(Protocol):
    """A canonical runner: every output row's bits depend on that sequence's tokens alone."""

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Computes at most `bucket` rows, padded to exactly `bucket`; returns per sequence its logit rows
        in order."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies one KV block (all layers): used when a sequence leaves a published block half way."""
        ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner that takes the next step while one runs. Steps are computed in the order of `begin`, and a
    step's rows may take their tokens from the one before (SequenceRows.feed)."""

    def begin(self, bucket: int, sequences: list[SequenceRows]) -> Any:
        """Queues a step and returns at once; arguments as `step`. What it needs of them it takes before it
        returns: token lists and block tables grow, and rows are asked for again with another position."""
        ...

    def finish(self, pending: Any) -> list[list[Sampled]]:
        """Waits for a step that `begin` queued; the oldest first. At most two may be in flight."""
        ...
