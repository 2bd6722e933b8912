"""Whom an audit condemns, over stand-ins for actors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llm42.protocol import Commit, SamplingParams, TokenLogprob, Window
from llm42.telemetry.metrics import AUDIT_MISMATCHES, AUDITS, Metrics
from llm42_serve.replica.kept_answers import KeptAnswers
from llm42_serve.replica.member import Member
from llm42_serve.replica.spot_check import Auditor, same_answer
from tests.service.stand_ins import Actor, Call, answer


class Counts(Metrics):
    """Counters by name."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def inc(self, metric: Any, value: float = 1.0, **_: str) -> None:
        self.of[metric.name] = self.of.get(metric.name, 0) + value


class Pool:
    """The part of a VerifierPool that audits use."""

    def __init__(self, *actors: Actor) -> None:
        self.ready = [Member(a.name, a.name, a, a.said()) for a in actors]
        self.condemned: list[str] = []

    async def condemn(self, member: Member, reason: str) -> None:
        self.condemned.append(member.name)


ONE_ULP = 2.0**-52
WINDOW = Window("r", (1, 2), 2, (7,), SamplingParams())


async def audit(pool: Pool, by: int, answers: list[Any]) -> Counts:
    counts = Counts()
    auditor = Auditor(pool, 1.0, counts)  # type: ignore[arg-type]
    await auditor.audit(pool.ready[by], [WINDOW], answers)
    return counts


@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_the_odd_one_of_three_is_condemned(wrong: int) -> None:
    actors = [Actor(str(i)) for i in range(3)]
    actors[wrong].off = ONE_ULP
    for by in range(3):
        pool = Pool(*actors)
        for _ in range(20):  # whichever second and third are drawn
            counts = await audit(pool, by, [answer(WINDOW, actors[by].off)])
            assert counts.of[AUDITS.name] == 1
        assert set(pool.condemned) <= {str(wrong)}
        if by == wrong:
            assert len(pool.condemned) == 20


async def test_of_two_the_one_that_fails_its_known_answers_is_condemned() -> None:
    good, bad = Actor("good"), Actor("bad")
    bad.off, bad.healthy = ONE_ULP, False
    for by in (0, 1):
        pool = Pool(good, bad)
        counts = await audit(pool, by, [answer(WINDOW, (good, bad)[by].off)])
        assert pool.condemned == ["bad"]
        assert counts.of[AUDIT_MISMATCHES.name] == 1
    bad.healthy = True
    pool = Pool(good, bad)
    await audit(pool, 0, [answer(WINDOW)])
    assert sorted(pool.condemned) == ["bad", "good"], "nobody can tell: neither may go on"


async def test_a_lone_verifier_is_checked_against_itself() -> None:
    pool = Pool(Actor("only"))
    assert AUDIT_MISMATCHES.name not in (await audit(pool, 0, [answer(WINDOW)])).of
    await audit(pool, 0, [answer(WINDOW, ONE_ULP)])
    assert pool.condemned == ["only"]


async def test_equal_answers_condemn_nobody_and_nobody_waits_for_audits() -> None:
    pool, counts = Pool(*[Actor(str(i)) for i in range(3)]), Counts()
    auditor = Auditor(pool, 1.0, counts)  # type: ignore[arg-type]
    for _ in range(50):
        auditor.consider(pool.ready[0], [WINDOW], [answer(WINDOW)])
    assert len(auditor._running) == 2, "no backlog"
    await asyncio.gather(*auditor._running)
    assert (pool.condemned, counts.of) == ([], {AUDITS.name: 2.0})
    none = Auditor(pool, 0.0, counts)  # type: ignore[arg-type]
    none.consider(pool.ready[0], [WINDOW], [answer(WINDOW)])
    assert not none._running


async def test_answers_of_two_fingerprints_are_not_held_against_each_other() -> None:
    """Around a change of the pool's fingerprint, both verifiers are right."""
    old, new = Actor("old"), Actor("new", "b")
    new.off = ONE_ULP
    for by in (0, 1):
        pool = Pool(old, new)
        counts = await audit(pool, by, [answer(WINDOW, (old, new)[by].off, "ab"[by])])
        assert (pool.condemned, counts.of) == ([], {})


async def test_a_third_opinion_of_another_fingerprint_is_none() -> None:
    good, bad, other = Actor("good"), Actor("bad"), Actor("other", "b")
    bad.off = other.off = ONE_ULP
    bad.healthy = False
    pool = Pool(good, bad, other)
    members = dict(zip(("good", "bad", "other"), pool.ready, strict=True))
    auditor = Auditor(pool, 1.0, Counts())  # type: ignore[arg-type]
    answers = (answer(WINDOW), answer(WINDOW, ONE_ULP))
    odd = await auditor._odd_ones(members["good"], members["bad"], WINDOW, *answers)
    assert [m.name for m in odd] == ["bad"], "it would have sided with the bad one"


async def test_the_successor_of_a_wrong_verifier_is_not_condemned_for_it() -> None:
    bad = Actor("bad")
    pool = Pool(bad)
    member = pool.ready[0]

    def replaced_meanwhile(windows: list[Window]) -> list[Commit]:
        member.actor_id = "the next actor of that name"
        return [answer(w) for w in windows]

    bad.verify_cold = Call(replaced_meanwhile)
    await audit(pool, 0, [answer(WINDOW, ONE_ULP)])
    assert pool.condemned == []


def test_what_counts_as_the_same_answer() -> None:
    a = answer(WINDOW)
    assert same_answer(a, answer(WINDOW))
    assert not same_answer(a, answer(WINDOW, ONE_ULP)), "bits, not nearly"


def decoded(base: int, *tokens: int) -> Commit:
    found = tuple(TokenLogprob(t, -t / 8) for t in tokens)
    return Commit("r", base, 0, tokens[0], found, "a", decoded=tokens[1:])


def test_what_is_kept_of_an_answer_is_each_position_once_by_who_has_decoded_it() -> None:
    kept, first, second = KeptAnswers(1.0), Member("first", "1"), Member("second", "2")
    for tokens in ((1, 2), (1, 2, 3, 4, 5)):  # the second window is a later try: the first one decides
        kept.begin(Window("r", tokens, 2, (), SamplingParams(), credit=9, max_len=20))
    for member, commit in (
        (first, decoded(2, 3, 4)),
        (first, decoded(3, 4, 5)),  # one of it again
        (second, decoded(9, 9)),  # behind a gap
        (second, decoded(5, 6)),
        (second, decoded(6, 7, 8)),
        (first, decoded(2, 3)),  # late
    ):
        kept.committed(member, commit)
    parts = kept.end("r")
    assert [(p.member, p.actor_id) for p in parts] == [(first, "1"), (second, "2")]
    claims = [p.claim() for p in parts]
    assert [(w.tokens, w.candidates, c.next_token) for w, c in claims] == [
        ((1, 2), (3, 4), 5),
        ((1, 2, 3, 4, 5), (6, 7), 8),
    ]
    assert [(w.credit, w.max_len, w.prompt_len) for w, _ in claims] == [(0, 0, 2)] * 2
    assert claims[1][1].logprobs == tuple(TokenLogprob(t, -t / 8) for t in (6, 7, 8))
    assert kept.end("r") == []


def test_what_windows_have_decided_lies_between_two_parts() -> None:
    """One verifier has decoded what stands before and behind it."""
    kept, member = KeptAnswers(1.0), Member("first", "1")
    kept.begin(Window("r", (1, 2), 2, (), SamplingParams(), credit=9, max_len=20))
    kept.committed(member, decoded(2, 3, 4))
    kept.begin(Window("r", (1, 2, 3, 4, 5, 6), 2, (7, 8), SamplingParams(), credit=9, max_len=20))
    kept.committed(member, decoded(4, 5))  # late, of the first one
    kept.committed(member, decoded(6, 7, 8, 9))
    claims = [p.claim() for p in kept.end("r")]
    assert [(w.tokens, w.candidates, c.next_token) for w, c in claims] == [
        ((1, 2), (3, 4), 5),
        ((1, 2, 3, 4, 5, 6), (7, 8), 9),
    ]


def test_nothing_of_what_is_known_already_joins_two_parts() -> None:
    """A late commit inside of what windows have decided; what comes then is behind a hole all the same."""
    kept, member = KeptAnswers(1.0), Member("first", "1")
    kept.begin(Window("r", (1, 2), 2, (), SamplingParams(), credit=9, max_len=20))
    kept.committed(member, decoded(2, 3))
    kept.begin(Window("r", (1, 2, 3, 4, 5, 6), 2, (), SamplingParams(), credit=9, max_len=20))
    kept.committed(member, decoded(4, 5))
    kept.committed(member, decoded(6, 7))
    claims = [p.claim() for p in kept.end("r")]
    assert [(w.tokens, w.candidates, c.next_token) for w, c in claims] == [
        ((1, 2), (), 3),
        ((1, 2, 3, 4, 5, 6), (), 7),
    ]


async def test_a_verifier_that_is_gone_is_not_audited() -> None:
    pool = Pool(Actor("good"), Actor("other"))
    auditor = Auditor(pool, 1.0, Counts())  # type: ignore[arg-type]
    for gone in (False, True):
        auditor.kept.begin(WINDOW)
        auditor.kept.committed(pool.ready[0], decoded(2, 3))  # not what the others say
        if gone:
            pool.ready[0].actor_id = "its successor"
        auditor.ended("r")
        await asyncio.gather(*auditor._running)
        assert (pool.condemned == []) == gone
        pool.condemned.clear()
