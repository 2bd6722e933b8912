"""The verifier's sequence store with a simulated KV cache: what a block holds is always what its tokens
say, under random windows, retries, failed steps and evictions; broken stores are noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llm42.cache import BlockPool, block_key, slot_ids
from llm42.protocol import SamplingParams, Window
from llm42.verifier import kv_store as sequences
from llm42.verifier.kv_store import KVStore
from llm42.verifier.prefixes import HeldKV
from tests.support import check_pool

BLOCKS, SIZE = 9, 4
PROMPTS = {"a": (0, 1, 0, 1, 1), "b": (0, 1, 0, 1, 0, 0, 1), "c": (0, 1, 0, 1, 1), "d": (1,) * 9}
"""Requests that share a first block; two have the same prompt, so the same whole output."""


def true_token(tokens: Sequence[int]) -> int:
    return hashlib.sha256(bytes(tokens)).digest()[0] % 2


class SimulatedKV:
    """What a slot holds: all tokens up to its position, which is what real KV is a function of."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}
        self.copies = 0

    def write(self, sequence: HeldKV, start: int, count: int) -> None:
        for p, slot in zip(
            range(start, start + count), slot_ids(sequence.blocks, start, count, SIZE), strict=True
        ):
            self.slots[slot] = tuple(sequence.tokens[: p + 1])

    def check(self, sequence: HeldKV, length: int) -> None:
        """Positions [0, length) of a sequence hold what its tokens say."""
        for p, slot in enumerate(slot_ids(sequence.blocks, 0, length, SIZE)):
            assert self.slots.get(slot) == tuple(sequence.tokens[: p + 1]), f"wrong KV at position {p}"

    def copy_block(self, source: int, target: int) -> None:
        self.copies += 1
        for i in range(SIZE):
            self.slots[target * SIZE + i] = self.slots.get(source * SIZE + i, ())

    def check_published(self, pool: BlockPool) -> None:
        """Every block in the index holds exactly the tokens of its key."""
        for key, block in pool._index.items():
            prefix = self.slots.get(block * SIZE + SIZE - 1, ())
            assert prefix and len(prefix) % SIZE == 0
            for i in range(SIZE):
                assert self.slots.get(block * SIZE + i) == prefix[: len(prefix) - SIZE + i + 1], (
                    "a published block was changed"
                )
            chain = pool.root
            for begin in range(0, len(prefix), SIZE):
                chain = block_key(chain, prefix[begin : begin + SIZE])
            assert chain == key, "a block is published under another block's key"


@dataclass
class Active:
    """A window in flight; rows [sequence.computed, written) are computed."""

    window: Window
    sequence: HeldKV
    written: int


def window(name: str, tokens: Sequence[int], candidates: Sequence[int] = ()) -> Window:
    return Window(name, tuple(tokens), 1, tuple(candidates), SamplingParams())


class StoreMachine(RuleBasedStateMachine):
    """Windows of four requests, as a verifier handles them."""

    make: type[KVStore] = KVStore
    make_pool: type[BlockPool] = BlockPool

    def __init__(self) -> None:
        super().__init__()
        self.kv = SimulatedKV()
        self.pool = self.make_pool(BLOCKS, SIZE, root=b"fp")
        self.store = self.make(self.pool, self.kv.copy_block)
        self.outputs = {name: list(prompt) for name, prompt in PROMPTS.items()}
        self.active: list[Active] = []

    @rule(name=st.sampled_from(sorted(PROMPTS)), count=st.integers(0, 9), wrong_at=st.integers(0, 12))
    def send(self, name: str, count: int, wrong_at: int) -> None:
        """A window whose candidates are right up to `wrong_at`; also a second one beside one in flight."""
        tokens = list(self.outputs[name])
        for i in range(count):
            tokens.append(true_token(tokens) ^ (i == wrong_at))
        begin = len(self.outputs[name])
        self._admit(window(name, tokens[:begin], tokens[begin:]))

    @rule(name=st.sampled_from(sorted(PROMPTS)), back=st.integers(1, 9))
    def send_again(self, name: str, back: int) -> None:
        """The commit got lost: the same window is sent once more after it was settled."""
        begin = max(1, len(self.outputs[name]) - back)
        self._admit(window(name, self.outputs[name][:begin], self.outputs[name][begin:]))

    @rule(name=st.sampled_from(sorted(PROMPTS)), prompt=st.sampled_from(sorted(PROMPTS.values())))
    def reuse(self, name: str, prompt: tuple[int, ...]) -> None:
        """The id comes back with another prompt, and the old one's release never arrived."""
        self.outputs[name] = list(prompt)

    def _admit(self, sent: Window) -> None:
        length = len(sent.tokens) + len(sent.candidates)
        if length > BLOCKS * SIZE:
            assert not self.store.fits(sent)
            self._end(sent.request_id)
            return
        pinned = {b for a in self.active for b in a.sequence.blocks}
        sequence = self.store.admit(sent)
        if sequence is None:
            assert self.active, "a window waits although nothing runs"
            assert -(-length // SIZE) + 1 > BLOCKS - len(pinned), "a window waits although there is room"
            return
        assert len(sequence.blocks) == -(-length // SIZE), "not admitted whole"
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        assert sequence.tokens == [*sent.tokens, *sent.candidates]
        assert sequence.computed < len(sent.tokens), "the row that is asked for would not be computed"
        self.kv.check(sequence, sequence.computed)
        self.active.append(Active(sent, sequence, sequence.computed))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A step computes some rows."""
        job = data.draw(st.sampled_from(self.active))
        self._compute(job, data.draw(st.integers(0, len(job.sequence.tokens) - job.written)))

    def _compute(self, job: Active, count: int) -> None:
        self.kv.check(job.sequence, job.written)
        self.kv.write(job.sequence, job.written, count)
        job.written += count

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """The rest of a window, and its commit."""
        job = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))
        self._compute(job, len(job.sequence.tokens) - job.written)
        tokens = list(job.window.tokens)
        for candidate in job.window.candidates:
            if candidate != true_token(tokens):
                break
            tokens.append(candidate)
        self.store.settle(job.sequence, len(tokens))
        tokens.append(true_token(tokens))
        name = job.window.request_id
        if len(tokens) > len(self.outputs[name]) and len(tokens) < BLOCKS * SIZE:
            self.outputs[name] = tokens

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A step raised: some rows may be half written."""
        job = self.active.pop(data.draw(st.integers(0, len(self.active) - 1)))
        for slot in slot_ids(job.sequence.blocks, job.written, len(job.sequence.tokens) - job.written, SIZE):
            self.kv.slots[slot] = (-1,)
        self.store.discard(job.sequence)

    @rule(name=st.sampled_from(sorted(PROMPTS)))
    def release(self, name: str) -> None:
        """The client is gone; a window in flight ends by itself."""
        self._end(name)

    def _end(self, name: str) -> None:
        self.store.release(name)
        self.outputs[name] = list(PROMPTS[name])

    @invariant()
    def blocks_hold_what_their_tokens_say(self) -> None:
        check_pool(self.pool)
        self.kv.check_published(self.pool)
        for job in self.active:
            self.kv.check(job.sequence, job.written)
        for sequence in self.store._idle.values():
            self.kv.check(sequence, sequence.computed)
            assert len(sequence.tokens) == sequence.computed
        owners = [*(a.sequence for a in self.active), *self.store._idle.values()]
        refs = [0] * BLOCKS
        for sequence in owners:
            for block in sequence.blocks:
                refs[block] += 1
        assert refs == self.pool._refs, "a reference was lost or forgotten"

    def teardown(self) -> None:
        for job in self.active:
            self.store.discard(job.sequence)
        for name in PROMPTS:
            self.store.release(name)
        assert self.pool.held == 0 and self.store.idle == 0


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# ---- broken stores: the same machine must notice each


class NothingIsShared(BlockPool):
    """Copy-on-write off: every block counts as private."""

    def is_published(self, block: int) -> bool:
        return False


class CopiesNothing(KVStore):
    """Goes on in a fresh block without the rows that were kept."""

    def __init__(self, pool: BlockPool, copy_block: object) -> None:
        super().__init__(pool, lambda source, target: None)


class KeepsStaleKeys(KVStore):
    """Forgets to cut the key chain with the tokens."""

    def _cut(self, sequence: HeldKV, length: int) -> None:
        keys = list(sequence.keys)
        super()._cut(sequence, length)
        sequence.keys[:] = keys


class PublishesWhenDiscarded(KVStore):
    """Publishes a failed step's blocks."""

    def discard(self, sequence: HeldKV) -> None:
        self.publish(sequence, len(sequence.tokens))
        super().discard(sequence)


class ForgetsTheOlder(KVStore):
    """A retried window's second settlement leaks the first one's blocks."""

    def _keep(self, sequence: HeldKV) -> None:
        self._idle[sequence.request_id] = sequence


class TakesTheLastRowFromTheCache(KVStore):
    """Does not compute the row before the first candidate again."""

    def admit(self, sent: Window) -> HeldKV | None:
        sequence = super().admit(sent)
        if sequence is not None and sequence.computed == len(sent.tokens) - 1:
            sequence.computed += 1
        return sequence


class TakesWhatThereIs(KVStore):
    """Admits a part of a window."""

    def _make_room(self, blocks: int) -> bool:
        return super()._make_room(blocks) or self.pool.available > 0

    def _blocks_for(self, sent: Window) -> int:
        whole = super()._blocks_for(sent)
        return min(whole, self.pool.available + 1) if whole <= self.pool.num_blocks else whole


QUICK = settings(
    max_examples=2000,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


def assert_noticed(machine: type[StoreMachine]) -> None:
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.parametrize(
    "broken",
    [
        CopiesNothing,
        KeepsStaleKeys,
        PublishesWhenDiscarded,
        ForgetsTheOlder,
        TakesTheLastRowFromTheCache,
        TakesWhatThereIs,
    ],
)
def test_control_broken_stores_are_noticed(broken: type[KVStore]) -> None:
    class Broken(StoreMachine):
        make = broken

    assert_noticed(Broken)


def test_control_without_copy_on_write_published_blocks_change() -> None:
    class Broken(StoreMachine):
        make_pool = NothingIsShared

    assert_noticed(Broken)


def test_control_trusting_old_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_common_prefix", lambda a, b, limit: min(limit, len(a)))
    assert_noticed(StoreMachine)


# ---- single cases


class Verifier:
    """A store with its simulated cache; `answer` computes a whole window."""

    def __init__(self, blocks: int = 8) -> None:
        self.kv, self.pool = SimulatedKV(), BlockPool(blocks, SIZE, root=b"fp")
        self.store = KVStore(self.pool, self.kv.copy_block)

    def admit(self, name: str, tokens: Sequence[int], candidates: Sequence[int] = ()) -> HeldKV | None:
        return self.store.admit(window(name, tokens, candidates))

    def answer(
        self, name: str, tokens: Sequence[int], candidates: Sequence[int] = (), accepted: int = 0
    ) -> int:
        """Returns how many rows came from the cache."""
        sequence = self.admit(name, tokens, candidates)
        assert sequence is not None
        cached = sequence.computed
        self.kv.check(sequence, cached)
        self.kv.write(sequence, cached, len(sequence.tokens) - cached)
        self.store.settle(sequence, len(tokens) + accepted)
        return cached


def test_a_window_is_admitted_whole_or_not_at_all() -> None:
    v = Verifier(blocks=4)
    first = v.admit("a", range(9), [9])
    assert first is not None and len(first.blocks) == 3
    assert v.admit("b", range(50, 54), [1]) is None
    assert v.pool.held == 3, "a part was taken"
    v.store.discard(first)
    assert v.admit("b", range(50, 54), [1]) is not None
    assert not v.store.fits(window("c", range(17)))
    assert v.store.fits(window("c", range(16)))


def test_the_longest_idle_request_is_evicted_first() -> None:
    v = Verifier(blocks=6)
    v.answer("a", [1, 1, 1, 1, 1])
    v.answer("b", [2, 2, 2, 2, 2])
    v.answer("a", [1, 1, 1, 1, 1, 1])  # a is used again: b is the oldest
    assert v.admit("c", [3] * 9) is not None
    assert list(v.store._idle) == ["a"]
    assert v.answer("a", [1] * 7) == 6


def test_an_evicted_request_is_computed_again() -> None:
    v = Verifier(blocks=4)
    v.answer("a", [1] * 9)
    v.answer("b", [2] * 16)
    assert v.pool.evictions > 0
    assert v.answer("a", [1] * 10) == 0


def test_released_blocks_are_found_by_the_next_request_and_counted() -> None:
    v = Verifier()
    v.answer("a", range(10))
    v.store.release("a")
    assert (v.pool.held, v.pool.cached, v.pool.hits) == (0, 2, 0)
    assert v.answer("b", range(10)) == 8
    assert v.pool.hits == 2
    v.store.release("unknown")


def test_a_prompt_of_full_blocks_still_computes_its_last_row() -> None:
    v = Verifier()
    v.answer("a", range(8))
    v.store.release("a")
    assert v.answer("b", range(8)) == 7


def test_a_refused_candidates_row_is_not_trusted() -> None:
    v = Verifier()
    assert v.answer("a", [1, 2, 3, 4, 5], [6, 7, 8], accepted=1) == 0
    assert v.answer("a", [1, 2, 3, 4, 5, 6, 9], [7]) == 6
    assert v.pool.match([1, 2, 3, 4, 5, 6, 7, 8])[0] == v.pool.match([1, 2, 3, 4])[0]


@pytest.mark.parametrize("accepted", [0, 1, 5, 8])
def test_the_same_window_again_recomputes_only_the_window(accepted: int) -> None:
    v = Verifier()
    tokens, candidates = range(10), range(10, 18)
    v.answer("a", tokens, candidates, accepted)
    assert v.answer("a", tokens, candidates, accepted) == 9
    v.store.release("a")
    assert v.pool.held == 0
    v.kv.check_published(v.pool)


def test_a_retry_copies_the_published_block_it_continues() -> None:
    v = Verifier()
    v.answer("a", range(10), range(10, 18), accepted=8)
    before = dict(v.kv.slots)
    published = set(v.pool._index.values())
    v.answer("a", range(10), [99] * 8)  # another try with other candidates
    assert v.kv.copies == 1
    for block in published:
        assert [v.kv.slots[block * SIZE + i] for i in range(SIZE)] == [
            before[block * SIZE + i] for i in range(SIZE)
        ]


def test_a_retry_of_a_window_that_fills_the_cache_is_admitted() -> None:
    v = Verifier(blocks=4)
    v.answer("a", range(11), range(11, 16), accepted=5)
    assert v.answer("a", range(11), range(11, 16), accepted=5) == 8
