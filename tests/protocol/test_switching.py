"""Requests that change their way while they run, at any commit: the output is the oracle's. The tests of both
ways have this as a third one (`lab` "switching"); here is what is special about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random

import pytest

from llm42.api.requests import _all_fields
from llm42.config import SessionSettings
from llm42.errors import RequestRejected
from llm42.protocol import Commit, FinishReason, Request, TokenLogprob, Window
from llm42.session import drive
from llm42.session.actions import Emit, Renew, Resend
from llm42.session.load import LEAST_LEFT, Load, Progress, Way
from llm42.session.machine import Session
from tests.protocol.direct_model import commit_of
from tests.protocol.session_model import END, FastPath, canonical, logprob, oracle, prompt_of, verify
from tests.protocol.switching import KINDS, OneLate, nothing_left, switching
from tests.support import (
    SAMPLED,
    Lab,
    check_blocks,
    check_pool,
    collect,
    request_of,
    sweep,
    together,
    wait_until,
)

# ---- the session alone, against a simulated verifier and fast path


def answer(window: Window, more: int) -> Commit:
    """With so many tokens decoded behind the verifier's own, as credit and the output's end allow."""
    commit = verify(window)
    tokens = [*window.tokens, *window.candidates[: commit.accepted], commit.next_token]
    decoded, logprobs = list[int](), list[TokenLogprob]()
    while len(decoded) < min(more, window.credit) and tokens[-1] != END and len(tokens) < window.max_len:
        token = canonical(tokens)
        logprobs.append(logprob(tokens, token))
        decoded.append(token)
        tokens.append(token)
    return replace(commit, decoded=tuple(decoded), logprobs=(*commit.logprobs, *logprobs))


def play_switching(seed: int, make: Callable[..., Session] = Session) -> list[str]:
    """One request whose way is drawn anew at each commit; returns the broken properties (none: all hold)."""
    rng, now, settings = Random(seed), 0.0, SessionSettings(min_window=3, start_window=3, credit=6)
    prompt = prompt_of(seed)
    want, want_logprobs, reason = oracle(60, prompt)
    request = Request("r", prompt, 60, deterministic=True, stop_token_ids=(END,))
    session = make(request, settings, now)
    fast, flight = FastPath(rng, prompt, 0.9, session.limit), None
    shown, logprobs = list[int](), list[TokenLogprob]()
    for _ in range(20000):
        if session.finish:
            break
        now += 0.01
        if not session.direct:
            fast.step()
            if fast.outbox and rng.random() < 0.7:
                for action in session.candidates(*fast.deliver(3)):
                    fast.apply(action)
        flight = session.due(now) or flight
        if flight is None or rng.random() < 0.5:
            continue
        if session.direct and len(session.committed) + len(prompt) > len(flight.tokens):  # it goes on
            known = [*prompt, *session.committed]
            follows = answer(replace(flight, tokens=tuple(known), candidates=()), rng.randrange(4))
            commit = replace(follows, accepted=0)
        else:
            commit = answer(flight, rng.randrange(7))
        actions = session.commit(commit, now)
        flight = flight if session.direct else None
        for action in actions:
            if isinstance(action, Emit):
                shown += action.tokens
                logprobs += action.logprobs
            elif not isinstance(action, Renew | Resend):
                fast.apply(action)
        if not session.finish and rng.random() < 0.5:
            session.turn("verify" if session.direct else "direct")
            flight = None
            fast = FastPath(rng, prompt, 0.9, session.limit, output=list(session.committed))
            fast.delivered = list(session.committed)
        if shown != want[: len(shown)]:
            return [f"{shown} is not the beginning of {want}"]
    if shown != want or logprobs != want_logprobs or session.finish != reason:
        return [f"{shown} ({session.finish}) instead of {want} ({reason})"]
    return []


def test_a_session_that_switches_at_any_commit() -> None:
    assert [seed for seed in range(300) if play_switching(seed)] == []


def test_control_a_switch_that_resumes_one_token_late() -> None:
    assert any(play_switching(seed, OneLate) for seed in range(50))


def test_a_window_that_goes_direct_brings_its_candidates() -> None:
    session = Session(Request("r", (3, 1), 50, deterministic=True), SessionSettings(), 0.0)
    right = oracle(50, (3, 1))[0]
    session.candidates(0, 0, [*right[:3], (right[3] + 1) % 40])
    session.turn("direct")
    window = session.due(0.0)
    assert window is not None
    assert (window.candidates[:3], len(window.candidates), window.credit) == ((*right[:3],), 4, 64)
    emit, *_ = session.commit(verify(window), 0.0)
    assert isinstance(emit, Emit) and emit.tokens == (*right[:4],)
    assert session.stats.rollbacks == 1, "one of them was wrong"
    session.lost()
    again = session.due(0.0)
    assert again is not None and again.candidates == (), "they are used up"
    assert session.commit(commit_of([3, 1, *right], 6, 8), 0.0)
    assert session.committed == right[:6]


def test_what_is_under_way_must_be_known() -> None:
    session = Session(Request("r", (3, 1), 50, deterministic=True), SessionSettings(), 0.0)
    session.candidates(0, 0, range(1, 20))
    assert session.due(0.0) is not None
    with pytest.raises(AssertionError):
        session.turn("direct")
    with pytest.raises(AssertionError):
        session.turn("verify")


# ---- the whole


@pytest.mark.parametrize(("seed", "count"), sweep([(0, 12), (1, 4), (2, 12), (3, 1)], quick=[(0, 12)]))
def test_at_any_load(lab: Lab, seed: int, count: int) -> None:
    """Several choices of one prompt, all kinds of sampling, stop strings and ids, too little KV on both
    sides, best effort beside, a client that leaves."""
    lab, ways = switching(lab, seed)
    engine, verifier = lab.engine(corrupt_share=0.1, kv_tokens=512), lab.verifier(512).start()
    generator = lab.generator(engine, verifier, min_window=1, start_window=2, credit=(1, 5, 64)[seed % 3])
    requests = [request_of(f"s{i}", i % 3, max_tokens=40, sampling=KINDS[i % 3]) for i in range(count)]
    choices = [replace(requests[0], request_id=f"n{i}", sampling=replace(SAMPLED, seed=i)) for i in range(3)]
    ends = lab.oracle(choices[0])
    stops = [
        replace(choices[0], request_id="id", stop_token_ids=(ends.tokens[17],)),
        replace(choices[0], request_id="text", stop=(ends.text[12:15],)),
    ]
    plain = replace(requests[0], request_id="plain", deterministic=False)
    asked = [*requests, *choices, *stops]

    async def everyone() -> list[object]:
        leaver = asyncio.create_task(collect(generator, replace(requests[0], request_id="leaver")))
        asyncio.get_running_loop().call_later(0.3, leaver.cancel)
        found = await asyncio.gather(*(collect(generator, r) for r in [*asked, plain]))
        await asyncio.gather(leaver, return_exceptions=True)
        return list(found)

    answers = asyncio.run(everyone())
    assert lab.wrong(answers[:-1], asked) == []  # type: ignore[arg-type]
    assert ways.changes > count
    assert wait_until(lambda: engine.load().kv_used == 0 and verifier.stats().kv_held_blocks == 0, 5.0)
    check_pool(verifier._pool)
    check_blocks(engine)
    assert nothing_left(generator)


def test_both_ways_have_committed_and_are_counted(lab: Lab) -> None:
    lab, ways = switching(lab, 3)
    generator = lab.generator(lab.engine(), lab.verifier().start(), min_window=1, start_window=3)
    requests = [request_of(f"c{i}", i, max_tokens=60) for i in range(3)]
    answers = together(generator, requests)
    assert lab.wrong(answers, requests) == []
    assert ways.changes > 3
    stats = [a.stats for a in answers]
    assert 0 < sum(s.direct_tokens for s in stats) < sum(s.verified_tokens for s in stats) == 180


def test_control_one_token_late_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "Session", OneLate)
    lab, _ = switching(lab, 1)
    generator = lab.generator(lab.engine(), lab.verifier().start(), min_window=1, start_window=1)
    requests = [request_of(f"l{i}", i, max_tokens=60) for i in range(6)]
    assert lab.wrong(together(generator, requests), requests)


def test_whom_the_engine_refuses_the_verifier_decodes(lab: Lab) -> None:
    """Which way is taken follows from load; whether there is an answer must not."""
    lab, _ = switching(lab, 2)
    engine, verifier = lab.engine(kv_tokens=32), lab.verifier().start()
    requests = [request_of(f"big{i}", i, max_tokens=40) for i in range(3)]
    answers = together(lab.generator(engine, verifier), requests)
    assert lab.wrong(answers, requests) == []
    assert all(a.stats.direct_tokens == 40 for a in answers)
    with pytest.raises(RequestRejected):
        together(lab.generator(engine, verifier, mode="verify"), requests[:1])


def test_what_the_policy_is_told(lab: Lab) -> None:
    """Measured steps of both, and who is in progress."""
    told: list[tuple[Progress, Load]] = []
    expected: list[dict[Way, float]] = []

    def decide(request: Progress, load: Load) -> Way:
        told.append((request, load))
        expected.append(generator.ways.expected(verifier))
        return "direct" if request.output >= 20 else "verify"

    lab = replace(lab, mode="auto", decide=decide, parts=lab.parts)
    requests = [request_of(f"t{i}", i, max_tokens=60) for i in range(2)]
    best_effort = replace(request_of("b", 9, max_tokens=200), deterministic=False, seeded=False)
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(), verifier, min_window=1, start_window=3)
    together(generator, [*requests, best_effort])
    assert all(rate > 0.0 for rate in expected[-1].values()), "for the dashboard"
    assert set(expected[-1]) == {"verify", "direct"} and set(expected[0].values()) == {0.0}
    assert set(generator.ways.expected(verifier).values()) == {0.0}, "nobody is there any more"
    assert told[0][0].way is None
    request, load = told[-1]
    assert (request.way, request.length - request.output, request.most) == ("direct", 20, 60)
    assert request.left > 0 and request.held >= 40, "what the engine had when it was left"
    assert {t.deterministic for _, t in told} <= {1, 2}
    assert max(t.best_effort for _, t in told) == max(t.movable for _, t in told) == 1
    assert max(t.promised for _, t in told) > 0, "to the other one"
    assert load.is_known and load.verifier is not None
    known = load.verifier
    assert known.kv_free > 0 and known.places == 128 and known.others == 0
    assert max(t.verifier.direct for _, t in told if t.verifier) >= 1
    for costs in (load.fast, known.decode_steps, known.window_steps):
        assert costs.times and costs.times[0][1] > 0
    assert nothing_left(generator)
    assert generator.ways.lengths.output != LEAST_LEFT and generator.ways.lengths.prompt == 20, (
        "what is typical"
    )


def test_a_client_cannot_choose() -> None:
    """No field of a body or of a request is about it; which fields there are is what decides on others."""
    named = {"session", "mode", "session_mode", "way"}
    assert not named & (_all_fields() | {field.name for field in fields(Request)})
    assert {"deterministic", "seed"} <= _all_fields(), "the control"


@pytest.mark.parametrize("way", ["verify", "direct"])
def test_a_pinned_mode_asks_nobody(lab: Lab, way: Way) -> None:
    def decide(request: Progress, load: Load) -> Way:
        raise AssertionError

    generator = replace(lab, mode=way, decide=decide, parts=lab.parts).generator(
        lab.engine(), lab.verifier().start()
    )
    (got,) = together(generator, [request_of("p", 1)])
    assert got.finish is FinishReason.LENGTH
    assert (got.stats.direct_tokens == got.stats.verified_tokens) == (way == "direct")
