"""Paged KV: a pool of fixed-size blocks with reference counts, and a content-addressed index over finished
blocks.

A block is *free* (no content of value), *held* (reference count > 0) or *cached* (count 0, but its content
is published under a key and may be found again; the least recently used one is evicted when blocks run out).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class OutOfBlocks(Exception):
    """Fewer free or evictable blocks than asked for; nothing was taken."""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 over the parent block's key and this block's token ids; the first block's parent is the
    fingerprint."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Accounting only: which blocks are held, cached and free. Not thread-safe: one owner thread."""

    def __init__(self, num_blocks: int, block_size: int, root: bytes = b"") -> None:
        self.num_blocks, self.block_size, self.root = num_blocks, block_size, root
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self.hits = self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `acquire` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.available

    def held_only_by(self, references: Iterable[int]) -> int:
        """How many blocks have these references, a block for each, and no others."""
        return sum(self._refs[block] == count for block, count in Counter(references).items())

    @property
    def cached(self) -> int:
        """Published blocks nobody holds."""
        return len(self._idle)

    def acquire(self, count: int) -> list[int]:
        """Takes `count` private blocks, evicting cached ones if needed. Raises OutOfBlocks and takes none."""
        if count > self.available:
            raise OutOfBlocks(f"{count} KV blocks wanted, {self.available} available of {self.num_blocks}")
        blocks = []
        for _ in range(count):
            if not self._free:
                victim, _ = self._idle.popitem(last=False)
                self._unpublish(victim)
                self.evictions += 1
                self._free.append(victim)
            block = self._free.pop()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each block; published ones stay findable, others become free.

        The last block counts as the least recently used: evicting a chain's first block would make all the
        others unreachable.
        """
        for block in reversed(list(blocks)):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Makes a completely written block findable. The first block under a key wins; its content never
        changes."""
        if self._keys[block] is None and key not in self._index:
            self._keys[block] = key
            self._index[key] = block

    def is_published(self, block: int) -> bool:
        """Whether the block's content may be shared, so that it must not be written any more."""
        return self._keys[block] is not None

    def is_findable(self, key: bytes) -> bool:
        """Whether a block is published under the key."""
        return key in self._index

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Makes blocks that nobody but the caller holds private again: their content is in doubt. What is
        shared stays published, since only published blocks may be shared."""
        for block in blocks:
            if self._refs[block] == 1 and self._keys[block] is not None:
                self._unpublish(block)

    def match(
        self, tokens: Sequence[int], salt: str = "", known: Sequence[bytes] = ()
    ) -> tuple[list[int], list[bytes]]:
        """The longest run of full blocks that starts `tokens` and was published under `salt`; takes a
        reference of each. known: the keys of its first blocks, as far as they have been computed before."""
        blocks, keys, parent = [], [], self._root_of(salt)
        for at in range(len(tokens) // self.block_size):
            begin = at * self.block_size
            if at < len(known):
                parent = known[at]
            else:
                parent = block_key(parent, tokens[begin : begin + self.block_size])
            block = self._index.get(parent)
            if block is None:
                break
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1
            self.hits += 1
            blocks.append(block)
            keys.append(parent)
        return blocks, keys

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], count: int, salt: str = "") -> None:
        """Brings a chain of keys up to those of the first `count` full blocks of `tokens`."""
        size = self.block_size
        for i in range(len(keys), count):
            keys.append(self.key_after(keys, tokens[i * size : (i + 1) * size], salt))

    def key_after(self, keys: Sequence[bytes], tokens: Sequence[int], salt: str = "") -> bytes:
        """The key of a block, or of the beginning of one, that comes behind the blocks of `keys`."""
        return block_key(keys[-1] if keys else self._root_of(salt), tokens)

    def publish_prefix(
        self, tokens: Sequence[int], blocks: Sequence[int], keys: list[bytes], written: int, salt: str = ""
    ) -> None:
        """Publishes every full block within tokens[:written]; `keys` caches the chain and is extended."""
        full, known = min(written // self.block_size, len(blocks)), len(keys)
        self.extend_keys(keys, tokens, full, salt)
        for i in range(known, full):
            self.publish(blocks[i], keys[i])

    def _root_of(self, salt: str) -> bytes:
        """The parent of first blocks: who has another salt finds none of them. Fixed lengths before `salt`,
        so that no root and salt look like others."""
        if not salt:
            return self.root
        digest = hashlib.sha256(self.root).digest() + hashlib.sha256(salt.encode()).digest()
        return hashlib.sha256(b"cache salt" + digest).digest()

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        del self._index[key]


class KVCache:
    """The tensors: per layer keys and values of [num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        shape = (layers, num_blocks, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [T, Hk, D] at slots [T] int64 (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1)[slots] = k
        self.values[layer].flatten(0, 1)[slots] = v

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [..., B] int64 in order: two [..., B * block_size, Hk, D]."""
        return self.keys[layer][blocks].flatten(-4, -3), self.values[layer][blocks].flatten(-4, -3)

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block in every layer."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Overwrites blocks (scrubbing after NaN; dirt in tests)."""
        self.keys[:, list(blocks)] = value
        self.values[:, list(blocks)] = value

    def clear_tail(self, block: int, begin: int) -> None:
        """Zeroes one block's slots from `begin` on."""
        self.keys[:, block, begin:] = 0.0
        self.values[:, block, begin:] = 0.0


def slot_ids(block_table: Sequence[int], start: int, count: int, block_size: int) -> list[int]:
    """Cache slots of positions [start, start + count)."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
