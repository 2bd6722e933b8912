"""The block pool against a model of it: random acquire, match, publish, release; broken pools are noticed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llm42.cache import BlockPool, KVCache, OutOfBlocks, block_key, slot_ids
from tests.support import check_pool

BLOCKS, SIZE = 7, 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
"""Two token ids only, so that prefixes are often shared."""


@dataclass
class Held:
    """What one owner took."""

    tokens: list[int]
    blocks: list[int]
    keys: list[bytes] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Random use by several owners. The model knows a published block by all tokens up to its end."""

    make: type[BlockPool] = BlockPool

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.make(BLOCKS, SIZE, root=b"root")
        self.owners: list[Held] = []
        self.refs = [0] * BLOCKS
        self.prefix: dict[int, tuple[int, ...]] = {}
        self.lru: list[int] = []
        self.hits = self.evictions = 0

    @rule(tokens=TOKENS)
    def start(self, tokens: list[int]) -> None:
        """What a request does: takes what is cached and private blocks for the rest, all or nothing."""
        blocks, keys = self.pool.match(tokens)
        assert blocks == self._expected_match(tokens)
        self._take(blocks)
        self.hits += len(blocks)
        owner = Held(tokens, blocks, keys)
        missing = -(-len(tokens) // SIZE) - len(blocks)
        if missing > self.refs.count(0):
            with pytest.raises(OutOfBlocks):
                self.pool.acquire(missing)
        else:
            fresh = self.pool.acquire(missing)
            self._acquired(fresh)
            owner.blocks = blocks + fresh
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The blocks of an owner are written up to some token."""
        owner = data.draw(st.sampled_from(self.owners))
        self._publish(owner, data.draw(st.integers(0, len(owner.tokens))))

    @rule(tokens=TOKENS)
    def twins(self, tokens: list[int]) -> None:
        """Two owners compute the same prompt at once: the first to publish wins."""
        self.start(tokens)
        self.start(tokens)
        for owner in self.owners[-2:]:
            self._publish(owner, len(tokens))

    def _publish(self, owner: Held, written: int) -> None:
        offered = len(owner.keys)  # each block is offered once, even if a twin's that won is evicted later
        self.pool.publish_prefix(owner.tokens, owner.blocks, owner.keys, written)
        for i, block in list(enumerate(owner.blocks[: written // SIZE]))[offered:]:
            prefix = tuple(owner.tokens[: (i + 1) * SIZE])
            if block not in self.prefix and prefix not in self.prefix.values():
                self.prefix[block] = prefix

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """An owner gives everything back; the end of a chain becomes evictable before its start."""
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owner.blocks)
        for block in reversed(owner.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.prefix:
                self.lru.append(block)

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool)
        assert self.pool.held == sum(count > 0 for count in self.refs)
        assert self.pool.available == BLOCKS - self.pool.held
        assert self.pool.cached == len(self.lru)
        assert (self.pool.hits, self.pool.evictions) == (self.hits, self.evictions)
        assert [self.pool.is_published(b) for b in range(BLOCKS)] == [b in self.prefix for b in range(BLOCKS)]

    def _expected_match(self, tokens: Sequence[int]) -> list[int]:
        block_of = {prefix: block for block, prefix in self.prefix.items()}
        found = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = block_of.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def _take(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1
            if block in self.lru:
                self.lru.remove(block)

    def _acquired(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        assert all(self.refs[b] == 0 for b in blocks), "a held block was handed out"
        evicted = [b for b in blocks if b in self.prefix]
        plain = sum(self.refs[b] == 0 and b not in self.prefix for b in range(BLOCKS))
        assert len(evicted) == max(0, len(blocks) - plain), "evicted although blocks were free"
        assert evicted == self.lru[: len(evicted)], "not the least recently used"
        del self.lru[: len(evicted)]
        for block in evicted:
            del self.prefix[block]
        self.evictions += len(evicted)
        for block in blocks:
            self.refs[block] = 1


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ---- broken pools: the same machine must notice each


class EvictsTheNewest(BlockPool):
    """Evicts the most recently used block."""

    def acquire(self, count: int) -> list[int]:
        for block in reversed(list(self._idle)):
            self._idle.move_to_end(block)
        return super().acquire(count)


class ReleasesFromTheStart(BlockPool):
    """The first block of a chain becomes the least recently used one."""

    def release(self, blocks: Iterable[int]) -> None:
        super().release(reversed(list(blocks)))


class ForgetsOnRelease(BlockPool):
    """Nothing stays in the cache."""

    def release(self, blocks: Iterable[int]) -> None:
        super().release(blocks)
        while self._idle:
            block, _ = self._idle.popitem()
            self._unpublish(block)
            self._free.append(block)


class LastPublisherWins(BlockPool):
    """A second block under a key takes over the index."""

    def publish(self, block: int, key: bytes) -> None:
        self._keys[block] = key
        self._index[key] = block


class MatchesWithoutReference(BlockPool):
    """A matched block may be evicted under its reader."""

    def match(self, tokens: Sequence[int]) -> tuple[list[int], list[bytes]]:
        blocks, keys = super().match(tokens)
        self.release(blocks)
        return blocks, keys


class KeysWithoutParent(BlockPool):
    """A block is found by its own tokens, whatever came before."""

    def publish_prefix(
        self, tokens: Sequence[int], blocks: Sequence[int], keys: list[bytes], written: int
    ) -> None:
        for i in range(len(keys), min(written // SIZE, len(blocks))):
            keys.append(block_key(self.root, tokens[i * SIZE : (i + 1) * SIZE]))
            self.publish(blocks[i], keys[i])


class TakesWhatThereIs(BlockPool):
    """Hands out fewer blocks than asked for."""

    def acquire(self, count: int) -> list[int]:
        return super().acquire(min(count, self.available))


BROKEN = [
    EvictsTheNewest,
    ReleasesFromTheStart,
    ForgetsOnRelease,
    LastPublisherWins,
    MatchesWithoutReference,
    KeysWithoutParent,
    TakesWhatThereIs,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_control_broken_pools_are_noticed(broken: type[BlockPool]) -> None:
    class Broken(PoolMachine):
        make = broken

    quick = settings(
        max_examples=400,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(Broken, settings=quick)


# ---- single cases


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.acquire(3)
    pool.publish_prefix([1, 2, 3, 4, 5, 6], blocks, [], 6)
    pool.release(blocks)
    pool.acquire(1)
    assert pool.match([1, 2, 3, 4, 5, 6])[0] == blocks[:2]


def test_the_root_separates_fingerprints() -> None:
    keys: list[list[bytes]] = []
    for root in (b"one", b"two"):
        pool = BlockPool(2, 2, root)
        chain: list[bytes] = []
        pool.publish_prefix([1, 2, 3, 4], pool.acquire(2), chain, 4)
        keys.append(chain)
    assert not set(keys[0]) & set(keys[1])


def test_a_refused_acquire_takes_and_evicts_nothing() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.acquire(2)
    pool.publish_prefix([1, 2, 3, 4], blocks, [], 4)
    pool.release(blocks)
    with pytest.raises(OutOfBlocks, match="4 KV blocks wanted, 3 available of 3"):
        pool.acquire(4)
    assert (pool.available, pool.cached, pool.evictions) == (3, 2, 0)


def test_a_double_release_is_noticed() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.acquire(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_written_rows_come_back_in_order_from_scattered_blocks() -> None:
    cache = KVCache(layers=2, num_blocks=5, block_size=4, kv_heads=2, head_dim=3, dtype=torch.float32)
    cache.fill(range(5), float("nan"))
    table, rows = [3, 0, 4], 10
    k, v = torch.randn(rows, 2, 3), torch.randn(rows, 2, 3)
    slots = slot_ids(table, 1, rows, 4)
    assert slots == [13, 14, 15, 0, 1, 2, 3, 16, 17, 18]
    cache.write(1, torch.tensor(slots), k, v)
    keys, values = cache.gather(1, torch.tensor(table))
    assert torch.equal(keys[1:11], k)
    assert torch.equal(values[1:11], v)
    assert keys[0].isnan().all() and keys[11].isnan().all()
    assert cache.keys[0].isnan().all(), "another layer was written"


def test_a_copied_block_is_equal_in_every_layer_and_independent() -> None:
    cache = KVCache(layers=2, num_blocks=3, block_size=2, kv_heads=1, head_dim=2, dtype=torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    cache.copy_block(0, 2)
    assert torch.equal(cache.keys[:, 0], cache.keys[:, 2])
    assert torch.equal(cache.values[:, 0], cache.values[:, 2])
    before = cache.keys[:, 0].clone()
    cache.fill([2], 7.0)
    assert torch.equal(cache.keys[:, 0], before)
