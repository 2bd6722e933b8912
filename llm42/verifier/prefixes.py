"""Whose KV is held, and which beginnings of prompts are being computed: a request that comes meanwhile waits
for these blocks instead of computing them again.

Blocks are named by their keys (llm42/cache.py), which stand for all tokens before them and for the salt. A
prompt's last block is mostly not full, so it is not published; an equal prompt finds it here and copies it:
n choices of one prompt cost one prompt. What is found is a function of the tokens, so none of this can change
a bit of any answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm42.cache import BlockPool
from llm42.protocol import Window


@dataclass(slots=True, eq=False)
class HeldKV:
    """KV of one request: positions [0, computed) are written for tokens[:computed] in `blocks`."""

    request_id: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Those of its first full blocks, as far as they have been needed."""
    computed: int = 0
    idle_since: float = 0.0
    salt: str = ""
    """Under which its blocks are found and published."""
    published: int = 0
    """How many of its first blocks are findable, or another one's with the same content."""
    end: int = 0
    """Length of the prompt for whose last block, which is not full, `end_key` stands; 0: there is none. An
    equal prompt takes all of it but its last row, which every window computes."""
    end_key: bytes = b""


class Prefixes:
    """What is being computed by those who have all their blocks already: waiting for them cannot deadlock.
    One owner thread."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._writers: dict[bytes, HeldKV] = {}
        """By the key of a block that is not published yet, or by an `end_key`."""
        self._ends: dict[bytes, HeldKV] = {}
        """By `end_key`: who holds such a block, its rows computed."""

    # ---- for those who compute

    def begin(self, sequence: HeldKV, window: Window) -> None:
        """It has its blocks, and computes the window from `sequence.computed` on."""
        tokens, size = window.tokens, self._pool.block_size
        if sequence.computed >= len(tokens) - 1:  # only the row that every window computes
            return
        full, rest = divmod(len(tokens), size)
        self._pool.extend_keys(sequence.keys, tokens, full, sequence.salt)
        for key in sequence.keys[sequence.computed // size : full]:
            self._writers.setdefault(key, sequence)
        if rest > 1 and not sequence.end:
            sequence.end, sequence.end_key = len(tokens), self._end_key(window, sequence.keys)
            self._writers.setdefault(sequence.end_key, sequence)

    def publish(self, sequence: HeldKV) -> None:
        """Its rows before `computed` are written, by steps that have completed."""
        full = min(sequence.computed // self._pool.block_size, len(sequence.blocks))
        if full > sequence.published:
            self._pool.extend_keys(sequence.keys, sequence.tokens, full, sequence.salt)
            for at in range(sequence.published, full):
                self._pool.publish(sequence.blocks[at], sequence.keys[at])
                self._drop(self._writers, sequence.keys[at], sequence)
            sequence.published = full
        if sequence.end and sequence.computed >= sequence.end - 1:
            self._drop(self._writers, sequence.end_key, sequence)
            self._ends.setdefault(sequence.end_key, sequence)

    def forget(self, sequence: HeldKV) -> None:
        """Its blocks are given up: nobody waits for them any longer, nor copies one."""
        for key in sequence.keys[sequence.published :]:
            self._drop(self._writers, key, sequence)
        self.forget_end(sequence)

    def forget_end(self, sequence: HeldKV) -> None:
        """Its rows at the end of its prompt are given up."""
        for where in (self._writers, self._ends):
            self._drop(where, sequence.end_key, sequence)
        sequence.end, sequence.end_key = 0, b""

    # ---- for those who come later

    def awaited(self, window: Window, keys: list[bytes]) -> bytes | None:
        """The key of the last block that is being computed, by the one who computes the first that the window
        would have to compute itself; None: nobody does. keys: of its first blocks; those that are looked at
        are added."""
        if not self._writers:
            return None
        full, writer, found = len(window.tokens) // self._pool.block_size, None, None
        for at in range(full):
            self._pool.extend_keys(keys, window.tokens, at + 1, window.cache_salt)
            if writer is None and self._pool.is_findable(keys[at]):
                continue
            known = self._writers.get(keys[at])
            if known is None or known is not (writer or known):
                return found
            writer, found = known, keys[at]
        end = self._end_key(window, keys)
        return end if self._writers.get(end) is not None else found

    def is_written(self, key: bytes) -> bool:
        """Whether the block is still being computed."""
        return key in self._writers

    def end_of(self, window: Window, sequence: HeldKV) -> int | None:
        """The block that holds the end of an equal prompt, if that end is what `sequence` lacks: it has all
        full blocks of the window's prompt, and nothing behind them."""
        full, rest = divmod(len(window.tokens), self._pool.block_size)
        if rest < 2 or not len(sequence.keys) == len(sequence.blocks) == full:
            return None
        holder = self._ends.get(self._end_key(window, sequence.keys))
        return None if holder is None else holder.blocks[full]

    def _end_key(self, window: Window, keys: Sequence[bytes]) -> bytes:
        full = len(window.tokens) // self._pool.block_size
        rest = window.tokens[full * self._pool.block_size :]
        return self._pool.key_after(keys[:full], rest, window.cache_salt)

    @staticmethod
    def _drop(where: dict[bytes, HeldKV], key: bytes, sequence: HeldKV) -> None:
        if where.get(key) is sequence:
            del where[key]
