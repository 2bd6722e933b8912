"""Which KV the verifier holds for which request: admission, reuse by longest common prefix, copy-on-write,
eviction.

The KV at position p is a function of tokens[0..p], so whatever a request left behind stays valid up to the
first token that differs. Blocks of a window in flight are held by reference; between windows a request's
sequence is *idle* and may be evicted, since everything in it can be recomputed. What is being computed for
one request is not computed again for another: see prefixes.py.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from llm42.cache import BlockPool
from llm42.protocol import Window
from llm42.verifier.prefixes import HeldKV, Prefixes


class KVStore:
    """Idle sequences by request id over a block pool. One owner thread."""

    def __init__(self, pool: BlockPool, copy_block: Callable[[int, int], None]) -> None:
        self.pool = pool
        self._copy_block = copy_block
        self._idle: OrderedDict[str, HeldKV] = OrderedDict()
        self._prefixes = Prefixes(pool)

    @property
    def idle(self) -> int:
        """Requests whose KV is kept between windows."""
        return len(self._idle)

    @property
    def evictable(self) -> int:
        """Blocks that only these hold: whoever needs room takes them."""
        return self.pool.held_only_by(block for s in self._idle.values() for block in s.blocks)

    def fits(self, window: Window) -> bool:
        """Whether the window could ever be admitted, and what it lets the verifier decode be written."""
        # the last token's own KV is never needed
        most = max(len(window.tokens) + len(window.candidates), window.max_len - 1)
        return -(-most // self.pool.block_size) <= self.pool.num_blocks

    def fits_beside(self, window: Window, blocks: int) -> bool:
        """Whether the window could be admitted while others hold so many blocks."""
        return self._blocks_for(window) + blocks <= self.pool.num_blocks

    def awaited(self, window: Window, keys: list[bytes]) -> bytes | None:
        """The key of a block of the window's prompt that is being computed for another request: when
        `is_awaited` no longer holds of it, less is to be computed. None: there is no such block. keys: those
        of the window's first blocks that are known; more are added."""
        # what a request holds itself is preferred to what is found
        return None if window.request_id in self._idle else self._prefixes.awaited(window, keys)

    def is_awaited(self, key: bytes) -> bool:
        """Whether a block of this key is still being computed by someone who holds all that it needs."""
        return self._prefixes.is_written(key)

    def admit(
        self, window: Window, cold: bool = False, spare: int = 0, keys: Sequence[bytes] = ()
    ) -> HeldKV | None:
        """Takes every block the window needs, all or none; None means wait. `computed` says what is
        already there: nothing, when `cold`. spare: blocks that must be left. keys: as `awaited`."""
        if cold:
            needed, tokens = self._blocks_for(window), [*window.tokens, *window.candidates]
            free = self._make_room(needed)
            return HeldKV(window.request_id, tokens, self.pool.acquire(needed)) if free else None
        sequence = self._idle.pop(window.request_id, None)
        if sequence is not None and sequence.salt != window.cache_salt:  # a request with another's id
            self._give_up(sequence)
            sequence = None
        sequence = sequence or self._from_cache(window, keys)
        tokens = [*window.tokens, *window.candidates]
        # the row before the first candidate is always computed anew: its logits are what is asked for
        limit = min(sequence.computed, len(window.tokens) - 1)
        valid = _common_prefix(sequence.tokens, tokens, limit)
        self._cut(sequence, valid)
        split = valid % self.pool.block_size != 0 and self.pool.is_published(sequence.blocks[-1])
        missing = self._blocks_for(window) - len(sequence.blocks) + split
        if split and missing > self.pool.num_blocks - len(sequence.blocks):
            # no room ever for the copy beside its original: compute the block anew
            valid -= valid % self.pool.block_size
            self._cut(sequence, valid)
            split, missing = False, self._blocks_for(window) - len(sequence.blocks)
        if not self._make_room(missing + spare if spare else missing):
            self._keep(sequence)
            return None
        fresh = self.pool.acquire(missing)
        if split:
            # a published block never changes: go on in a private copy of its first rows
            self._copy_block(sequence.blocks[-1], fresh[0])
            self.pool.release(sequence.blocks[-1:])
            sequence.blocks[-1:] = fresh[:1]
            fresh = fresh[1:]
        elif (end := self._prefixes.end_of(window, sequence)) is not None:
            # an equal prompt's last block is not full, so not published: go on in a copy of its rows
            self._copy_block(end, fresh[0])
            valid = len(window.tokens) - 1
        sequence.blocks += fresh
        sequence.tokens, sequence.computed = tokens, valid
        self._prefixes.begin(sequence, window)
        return sequence

    def settle(self, sequence: HeldKV, committed: int) -> None:
        """After a window: keeps tokens[:committed], publishes its full blocks, frees the rest, goes idle."""
        self.cut(sequence, committed)
        self._keep(sequence)

    def cut(self, sequence: HeldKV, committed: int) -> None:
        """Keeps tokens[:committed], all of them computed, and publishes its full blocks; frees the rest."""
        self._cut(sequence, committed)
        self.publish(sequence, committed)

    def publish(self, sequence: HeldKV, computed: int) -> None:
        """tokens[:computed] are computed, by steps that have completed: their full blocks are findable."""
        sequence.computed = computed
        self._prefixes.publish(sequence)

    def grow(self, sequence: HeldKV) -> bool:
        """Takes one more block; False: there is none, though nothing is idle any more."""
        if not self._make_room(1):
            return False
        sequence.blocks += self.pool.acquire(1)
        return True

    def discard(self, sequence: HeldKV) -> None:
        """Gives up a sequence whose blocks may be half written: what is not published is lost."""
        self._give_up(sequence)

    def discard_as_wrong(self, sequence: HeldKV) -> None:
        """Gives up a sequence in whose KV something is not finite: nobody is to find it, unless others use
        it already."""
        self.pool.withdraw(sequence.blocks)
        self.discard(sequence)

    def release(self, request_id: str) -> None:
        """The request is over: its published blocks stay findable, the others become free."""
        sequence = self._idle.pop(request_id, None)
        if sequence is not None:
            self._give_up(sequence)

    def release_older(self, moment: float) -> None:
        """Releases every sequence that has been idle since before `moment` (time.monotonic)."""
        for request_id in [r for r, s in self._idle.items() if s.idle_since < moment]:
            self.release(request_id)

    def _from_cache(self, window: Window, known: Sequence[bytes]) -> HeldKV:
        blocks, keys = self.pool.match(window.tokens, window.cache_salt, known)
        covered, tokens, salt = len(blocks) * self.pool.block_size, list(window.tokens), window.cache_salt
        return HeldKV(window.request_id, tokens, blocks, keys, covered, salt=salt, published=len(blocks))

    def _keep(self, sequence: HeldKV) -> None:
        self.release(sequence.request_id)  # a retried window may have left an older one
        sequence.idle_since = time.monotonic()
        self._idle[sequence.request_id] = sequence

    def _give_up(self, sequence: HeldKV) -> None:
        self._prefixes.forget(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.keys, sequence.computed, sequence.published = [], [], 0, 0

    def _cut(self, sequence: HeldKV, length: int) -> None:
        keep, full = -(-length // self.pool.block_size), length // self.pool.block_size
        if length < sequence.end - 1:
            self._prefixes.forget_end(sequence)
        self.pool.release(sequence.blocks[keep:])
        del sequence.blocks[keep:], sequence.tokens[length:], sequence.keys[full:]
        sequence.computed, sequence.published = length, min(sequence.published, full)

    def _make_room(self, blocks: int) -> bool:
        while blocks > self.pool.available and self._idle:
            self.release(next(iter(self._idle)))
        return blocks <= self.pool.available

    def _blocks_for(self, window: Window) -> int:
        return -(-(len(window.tokens) + len(window.candidates)) // self.pool.block_size)


def _common_prefix(a: list[int], b: list[int], limit: int) -> int:
    """Length of the longest common prefix, at most `limit`."""
    if a[:limit] == b[:limit]:
        return min(limit, len(a), len(b))
    return next(i for i in range(limit) if i >= len(a) or i >= len(b) or a[i] != b[i])
