"""A runner without a model: its KV slots hold the token prefix they were written for, so that every read of a
wrong, stale, shared or unwritten slot is noticed at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from llm42.cache import BlockPool
from llm42.protocol import Commit, Failure, TokenLogprob, Window
from llm42.sampling import Sampled
from llm42.verifier.jobs import Answer
from llm42.verifier.runner import SequenceRows

VOCAB = 4
POISON = 3
"""A token whose logits, and those of everything after it, are NaN."""
Prefix = tuple[int, ...]


def canonical(tokens: Sequence[int], prompt_len: int) -> Sampled:
    """The next token, a function of the tokens and of where the prompt ends; never POISON."""
    digest = hashlib.sha256(bytes((prompt_len, *tokens))).digest()
    token = digest[0] % POISON
    return Sampled(token, TokenLogprob(token, -digest[1] / 64), finite=POISON not in tokens)


def right_answer(window: Window, fingerprint: str) -> Answer:
    """What a verifier must say, up to timings."""
    tokens, logprobs = list(window.tokens), []
    for candidate in (*window.candidates, None):
        sampled = canonical(tokens, window.prompt_len)
        logprobs.append(sampled.logprob)
        if not sampled.finite:
            return Failure(window.request_id, "non_finite_logits", "")
        if sampled.token != candidate:
            break
        tokens.append(sampled.token)
    accepted = len(tokens) - len(window.tokens)
    base = len(window.tokens)
    return Commit(window.request_id, base, accepted, sampled.token, tuple(logprobs), fingerprint)


@dataclass
class ShadowRunner:
    """Implements llm42.verifier.runner.Runner over `pool`'s blocks."""

    pool: BlockPool
    slots: dict[int, Prefix] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    steps: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)
    """Per step its bucket, and (start, count) of each sequence."""
    fail_next: bool = False
    failed: list[list[int]] = field(default_factory=list)
    """Tokens of the sequences of failed steps: a step that was queued behind may still hold their rows."""
    sampled: list[int] = field(default_factory=list)
    """Tokens by logit row of the last step that had any: what the next one may be fed with."""

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]]:
        """Checks every slot that a real step would read, then writes."""
        rows = sum(s.count for s in sequences)
        if not 0 < rows <= bucket:
            self.violations.append(f"{rows} rows in a step of {bucket}")
        self.steps.append((bucket, [(s.start, s.count) for s in sequences]))
        written: list[int] = []
        known = [self._tokens(s) for s in sequences]
        for s, tokens in zip(sequences, known, strict=True):
            self._read(s, tokens)
            written += self._write(s, tokens)
        if len(set(written)) < len(written):
            self.violations.append("two sequences of one step write the same slot")
        if self.fail_next:
            self.fail_next = False
            self.failed += [s.tokens for s in sequences]
            for slot in written[::2]:
                self.slots[slot] = (-1,)  # half of the step's writes never arrived
            raise RuntimeError("planted")
        results = [
            [
                canonical(tokens[: p + 1], s.prompt_len)
                for p in range(max(s.start, s.first_logit), s.start + s.count)
            ]
            for s, tokens in zip(sequences, known, strict=True)
        ]
        if any(results):
            self.sampled = [x.token for rows in results for x in rows]
        return results

    def copy_block(self, source: int, target: int) -> None:
        """Copies what is written of one block."""
        size = self.pool.block_size
        for offset in range(size):
            self.slots[target * size + offset] = self.slots.get(source * size + offset, (-1,))

    def _slot(self, s: SequenceRows, position: int) -> int:
        size = self.pool.block_size
        return s.block_table[position // size] * size + position % size

    def _tokens(self, s: SequenceRows) -> list[int]:
        """What the device knows: of a token that the host does not know, what the step before has drawn."""
        if s.feed < 0:
            if len(s.tokens) < s.start + s.count:
                self.violations.append("a row without a token")
            return s.tokens
        return [*s.tokens[: s.start], self.sampled[s.feed], *s.tokens[s.start + 1 :]]

    def _read(self, s: SequenceRows, tokens: list[int]) -> None:
        if any(s.tokens is failed for failed in self.failed):
            return
        for p in range(s.start):
            if self.slots.get(self._slot(s, p)) != tuple(tokens[: p + 1]):
                self.violations.append(f"position {p} of {tokens} reads another sequence's KV")

    def _write(self, s: SequenceRows, tokens: list[int]) -> list[int]:
        slots = []
        for p in range(s.start, s.start + s.count):
            slot = self._slot(s, p)
            block = slot // self.pool.block_size
            if self.pool.is_published(block):
                self.violations.append(f"published block {block} is written")
            self.slots[slot] = tuple(tokens[: p + 1])
            slots.append(slot)
        return slots


class DelayedShadow(ShadowRunner):
    """A pipelined one, with a device's order: work is done in the order it was queued, and an error shows
    only when it is waited for."""

    def begin(self, bucket: int, sequences: list[SequenceRows]) -> list[list[Sampled]] | Exception:
        """Queues a step."""
        try:
            return self.step(bucket, sequences)
        except RuntimeError as error:
            return error

    def finish(self, pending: list[list[Sampled]] | Exception) -> list[list[Sampled]]:
        """Its results."""
        if isinstance(pending, Exception):
            raise pending
        return pending
