"""Requests that the verifier decodes by itself, over a shadow of a KV cache that is always too small: random
credit, renewals, windows in between, preemption, failed steps, releases and replacements; broken versions are
noticed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llm42.cache import BlockPool
from llm42.errors import LLM42Error, StepFailed
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.verifier.followers import Followers
from llm42.verifier.jobs import Decode, Follower
from llm42.verifier.runner import SequenceRows
from llm42.verifier.scheduler import Verifier
from tests.support import check_pool
from tests.unit.shadow_runner import POISON, VOCAB, DelayedShadow, ShadowRunner, canonical

logging.getLogger("llm42.verifier.scheduler").setLevel(logging.CRITICAL)  # thousands of planted failures
BLOCKS, SIZE = 8, 2
ROOM = BLOCKS * SIZE


def verifier_of(
    runner: type[ShadowRunner] = DelayedShadow,
    followers: type[Followers] = Followers,
    blocks: int = BLOCKS,
    buckets: tuple[int, ...] = (1, 3, 5),
    max_waiting: int = 64,
) -> tuple[Verifier, ShadowRunner]:
    """A verifier without a thread, over a shadow."""
    pool = BlockPool(blocks, SIZE, root=b"root")
    shadow = runner(pool)
    verifier = Verifier(
        shadow, pool, buckets=buckets, max_len=blocks * SIZE, vocab_size=VOCAB, fingerprint="fp",
        max_waiting=max_waiting,
    )  # fmt: skip
    old = verifier._followers
    verifier._followers = followers(old.store, verifier._active, old.outbox, verifier._stats)
    return verifier, shadow


@dataclass
class Reader:
    """A request as its replica sees it."""

    name: str
    prompt: list[int]
    max_len: int
    stops: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    candidates: tuple[int, ...] = ()
    until: int = 0
    lost: bool = False
    """The verifier has said that a new window is needed."""
    failed: bool = False
    sinks: int = 0
    wrong: list[str] = field(default_factory=list)
    """What it was told and should not have been; a sink must not raise."""

    @property
    def wanted(self) -> list[int]:
        """Prompt and output to the end."""
        known = list(self.prompt)
        while len(known) < self.max_len:
            known.append(canonical(known, len(self.prompt)).token)
            if known[-1] in self.stops:
                break
        return known

    @property
    def ended(self) -> bool:
        return self.failed or self.tokens == self.wanted

    def follow(self, verifier: Verifier, credit: int, wrong: int = 0, proposed: int = 0) -> None:
        """A new window with candidates, of which the last `wrong` are."""
        rest = self.wanted[len(self.tokens) :][:proposed]
        good = max(0, len(rest) - wrong)
        changed = [(t + 1) % POISON if i >= good else t for i, t in enumerate(rest)]
        self.candidates, self.lost = tuple(changed), False
        self.sinks += 1
        window = Window(
            self.name, tuple(self.tokens), len(self.prompt), self.candidates, SamplingParams(),
            credit=credit, stop_token_ids=self.stops, max_len=self.max_len,
        )  # fmt: skip
        number, self.until = self.sinks, len(self.tokens) + 1 + credit
        verifier.follow(window, lambda answer: self.read(number, answer))

    def read(self, number: int, answer: Commit | Failure | LLM42Error) -> None:
        if number != self.sinks:
            self.wrong.append(f"{self.name} was replaced or released, and {answer} came")
        elif isinstance(answer, StepFailed):
            self.lost = True
        elif isinstance(answer, Failure) and POISON in self.prompt:
            self.failed = True
        elif isinstance(answer, Commit) and not self.ended and answer.base == len(self.tokens):
            fresh = [*self.candidates[: answer.accepted], answer.next_token, *answer.decoded]
            fresh = fresh[: self.max_len - answer.base]
            self.candidates = ()
            at = next((i + 1 for i, t in enumerate(fresh) if t in self.stops), len(fresh))
            self.tokens += fresh[:at]
            if self.tokens != self.wanted[: len(self.tokens)]:
                self.wrong.append(f"{self.tokens} instead of {self.wanted}")
        else:
            self.wrong.append(f"{answer} after {self.tokens}")

    def over(self) -> None:
        """Nothing may come any more."""
        self.sinks += 1

    def check(self) -> None:
        """Nothing wrong has come."""
        assert not self.wrong, self.wrong


PROMPT = st.lists(st.sampled_from([*[0, 1, 2] * 9, POISON]), min_size=1, max_size=6)
CREDIT = st.sampled_from([0, 2, 5, 14, 14])


class FollowMachine(RuleBasedStateMachine):
    """Replicas, and a verifier that they follow."""

    runner: type[ShadowRunner] = ShadowRunner
    followers: type[Followers] = Followers

    def __init__(self) -> None:
        super().__init__()
        self.verifier, self.shadow = verifier_of(self.runner, self.followers)
        self.live: dict[str, Reader] = {}
        self.begun = 0
        self.calls: list[Any] = []
        self.readers: list[Reader] = []

    def one(self, data: st.DataObject) -> Reader:
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        prompt=PROMPT,
        credit=CREDIT,
        output=st.integers(3, 15),
        stops=st.sampled_from([(), (), (), (0,)]),
        proposed=st.sampled_from([0, 0, 3]),
        wrong=st.integers(0, 2),
    )
    def begin(
        self, prompt: list[int], credit: int, output: int, stops: tuple[int, ...], proposed: int, wrong: int
    ) -> None:
        name = f"r{self.begun}"
        self.begun += 1
        most = min(ROOM, len(prompt) + output)
        reader = self.live[name] = Reader(name, prompt, most, stops, list(prompt))
        self.readers.append(reader)
        reader.follow(self.verifier, credit, wrong, proposed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), credit=CREDIT, proposed=st.sampled_from([0, 2]), wrong=st.integers(0, 2))
    def follow_again(self, data: st.DataObject, credit: int, proposed: int, wrong: int) -> None:
        """A new window in the place of the older follower."""
        reader = self.one(data)
        if not reader.ended:
            reader.follow(self.verifier, credit, wrong, proposed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=CREDIT)
    def renew(self, data: st.DataObject, more: int) -> None:
        """Perhaps less than before, or twice the same."""
        reader = self.one(data)
        reader.until = max(reader.until, len(reader.tokens) + more)
        self.ask(reader, len(reader.tokens) + more)

    def ask(self, reader: Reader, until: int) -> None:
        def told(known: bool, number: int = reader.sinks) -> None:
            if not known and number == reader.sinks and not reader.ended:
                reader.lost = True

        self.verifier.renew(reader.name, until, told)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = self.one(data)
        reader.over()
        del self.live[reader.name]
        self.verifier.release(reader.name)

    @rule(prompt=PROMPT)
    def window(self, prompt: list[int]) -> None:
        """Of a request in verify mode."""
        name = f"w{self.begun}"
        self.begun += 1
        self.calls.append(self.verifier.submit(Window(name, tuple(prompt), 1, (1, 1), SamplingParams())))

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.verifier.step()

    @rule(what=st.sampled_from([*[None] * 6, "fail", "forget"]))
    def now_and_then(self, what: str | None) -> None:
        """The next step writes half of its KV and raises; or what is idle is forgotten at once."""
        self.shadow.fail_next |= what == "fail"
        if what == "forget":
            self.verifier.forget_idle(-1.0)

    @invariant()
    def memory_is_sound(self) -> None:
        assert self.shadow.violations == []
        for reader in self.readers:
            reader.check()
        check_pool(self.verifier._pool)

    def drain(self) -> None:
        for _ in range(3000):
            if not self.verifier.step():
                return
        raise AssertionError("the verifier never comes to rest")

    def teardown(self) -> None:
        self.shadow.fail_next = False
        self.drain()
        for reader in self.live.values():
            reached = min(reader.until, len(reader.wanted))
            assert reader.lost or reader.ended or len(reader.tokens) >= reached, (
                "it stopped within its credit"
            )
            self.ask(reader, ROOM)
        self.drain()
        for reader in [r for r in self.live.values() if r.lost]:
            reader.follow(self.verifier, ROOM)
        self.drain()
        assert all(r.ended for r in self.live.values()), "one never came to its end"
        assert all(call.done() for call in self.calls)
        for name in self.live:
            self.verifier.release(name)
        self.verifier.forget_idle(-1.0)
        self.drain()
        self.memory_is_sound()
        stats = self.verifier.stats()
        assert stats.kv_held_blocks == stats.active == stats.waiting == stats.idle_sequences == 0
        assert stats.following == len(self.verifier._followers) == 0


class LateMachine(FollowMachine):
    """The same with two steps in flight."""

    runner = DelayedShadow


LONG = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestFollowers = FollowMachine.TestCase
TestFollowers.settings = LONG
TestLateFollowers = LateMachine.TestCase
TestLateFollowers.settings = LONG


# ---- broken versions: the same machine must notice each


class StaleToken(DelayedShadow):
    """Each row is fed its neighbour's token."""

    def _tokens(self, s: SequenceRows) -> list[int]:
        if s.feed >= 0:
            s.feed = (s.feed + 1) % len(self.sampled)
        return super()._tokens(s)


class OldToken(DelayedShadow):
    """What is fed is of the step before the step before."""

    def step(self, bucket: int, sequences: list[SequenceRows]) -> list[Any]:
        before = self.sampled
        try:
            return super().step(bucket, sequences)
        finally:
            self.sampled, self._newer = getattr(self, "_newer", before), self.sampled


class EmitsPastTheEnd(Followers):
    """A row in flight behind the last is not dropped."""

    def _let_go(self, d: Decode, keep: bool) -> None:
        super()._let_go(d, keep)
        d.abandoned = False


class PublishesInFlight(Followers):
    """Blocks are findable when their last row is asked for."""

    def plan(self, limit: int) -> list[Decode]:
        planned = super().plan(limit)
        for d in planned:
            self.store.publish(d.sequence, len(d.follower.tokens))
        return planned


class ForgetsToRoll(Followers):
    """After a preemption it goes on one token late."""

    def preempt_youngest(self) -> Follower | None:
        victim = super().preempt_youngest()
        if victim is not None and victim.tokens:
            victim.tokens.pop()
        return victim


class GrowsTooLate(Followers):
    """The block for a row is the last one again."""

    def _grow(self, d: Decode) -> bool:
        d.sequence.blocks.append(d.sequence.blocks[-1])
        return True


class LeaksOnRelease(Followers):
    """What a released one held stays held."""

    def release(self, request_id: str) -> None:
        follower = self._known.pop(request_id, None)
        if follower is not None:
            if isinstance(follower.work, Decode):
                del self.running[request_id]
            follower.ended = True


class LeavesThemWaiting(Followers):
    """Who waits for the prefix of one that is preempted or released is not told."""

    def _drop_work(self, follower: Follower, keep: bool) -> None:
        prefixes: Any = self.store._prefixes
        prefixes.forget = prefixes.forget_end
        super()._drop_work(follower, keep)
        del prefixes.forget


class StopsAtItsCredit(Followers):
    """A renewal that comes late is forgotten."""

    def renew(self, request_id: str, until: int, told: Any) -> None:
        told(request_id in self._known)
        if request_id in self._known and self._known[request_id].work is not None:
            super().renew(request_id, until, lambda _: None)


class NeverPreempts(Followers):
    """Who needs a block goes on without one of his own, for ever."""

    def _grow(self, d: Decode) -> bool:
        return self.store.grow(d.sequence)

    def plan(self, limit: int) -> list[Decode]:
        size = self.store.pool.block_size
        return [d for d in super().plan(limit) if d.issued < len(d.sequence.blocks) * size]


BROKEN: list[type] = [
    StaleToken,
    OldToken,
    EmitsPastTheEnd,
    PublishesInFlight,
    ForgetsToRoll,
    GrowsTooLate,
    LeaksOnRelease,
    LeavesThemWaiting,
    StopsAtItsCredit,
    NeverPreempts,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda c: c.__name__)
def test_control_broken_versions_are_noticed(broken: type) -> None:
    class Broken(LateMachine):
        runner = broken if issubclass(broken, ShadowRunner) else DelayedShadow
        followers = broken if issubclass(broken, Followers) else Followers

    quick = settings(
        max_examples=1500,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(Broken, settings=quick)
