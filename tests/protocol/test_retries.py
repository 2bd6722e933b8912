"""Answers that come late, never, or after their caller has asked again: the output is the oracle's, and
nothing stays behind. And what is refused before any of it begins."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llm42.errors import Overloaded, RequestRejected, VerifierUnavailable
from llm42.protocol import Commit, Failure, Request, Window
from llm42.session.driver import Generator
from llm42.verifier.scheduler import Verifier
from tests.support import (
    PATIENCE_S,
    PENALISED,
    SAMPLED,
    Answer,
    Lab,
    Wrapped,
    all_ways,
    both_engines,
    check_pool,
    collect,
    differences,
    prompt_of,
    request_of,
)

KINDS = (SAMPLED, PENALISED)


class Unreliable(Wrapped):
    """Every call is computed, but some answers are lost, some come when nobody waits any more, and some
    calls fail before or after the work is done."""

    def __init__(self, verifier: Verifier, seed: int) -> None:
        super().__init__(verifier)
        self.rng, self.calls, self.lost = random.Random(seed), 0, 0
        self.late: list[asyncio.Task[list[Commit | Failure]]] = []

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        self.calls += 1
        fate = self.rng.choice(["good"] * 7 + ["lost", "late", "busy", "died"])
        self.lost += fate != "good"
        if fate == "busy":
            raise Overloaded("planted")
        if fate == "late":  # it goes on while the caller asks again
            self.late.append(asyncio.create_task(super().verify(windows)))
            await asyncio.sleep(60)
        answers = await super().verify(windows)
        if fate == "lost":
            await asyncio.sleep(60)
        if fate == "died":
            raise VerifierUnavailable("planted")
        return answers


class AnswersTheOldWindow(Wrapped):
    """A transport that gives a repeated call the answer of an earlier one, of whatever length."""

    first: Commit | Failure | None = None

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        answers = await super().verify(windows)
        self.first = self.first or answers[0]
        return [self.first]


async def idle(lab_generator: Generator, verifier: Verifier, seconds: float = PATIENCE_S) -> bool:
    """Whether engine and verifier hold nothing, within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        load, stats = lab_generator.engine.load(), verifier.stats()
        busy = load.running, load.waiting, load.kv_used, stats.kv_held_blocks, stats.active, stats.waiting
        if not any((*busy, stats.idle_sequences)):
            return True
        await asyncio.sleep(0.01)
    return False


@both_engines
@pytest.mark.parametrize("seed", range(2))
def test_lost_late_and_failed_calls_change_nothing(lab: Lab, seed: int) -> None:
    """Two calls for one window may then run in the verifier at once."""
    requests = [request_of(f"u{seed}-{i}", i, max_tokens=32, sampling=KINDS[i % 2]) for i in range(8)]
    verifier, engine = lab.verifier(kv_tokens=512).start(), lab.engine(corrupt_share=0.1)
    client = Unreliable(verifier, seed)
    generator = lab.generator(engine, client, verify_timeout_s=0.3, verify_attempts=40)

    async def scene() -> tuple[list[Answer], bool]:
        answers = list(await asyncio.gather(*(collect(generator, r) for r in requests)))
        await asyncio.gather(*client.late, return_exceptions=True)
        for request in requests:  # what the late calls have left behind is not the driver's any more
            verifier.release(request.request_id)
        return answers, await idle(generator, verifier)

    answers, free = asyncio.run(scene())
    assert lab.wrong(answers, requests) == []
    assert client.lost > 5
    retries = sum(a.stats.verify_retries for a in answers)
    assert retries >= client.lost  # on a busy machine a good answer may come too late as well
    assert sum(a.stats.windows for a in answers) == client.calls - retries
    assert free
    check_pool(verifier._pool)


@both_engines
def test_control_an_answer_to_an_older_window_is_noticed(lab: Lab) -> None:
    request = request_of("old", 1)
    generator = lab.generator(lab.engine(), AnswersTheOldWindow(lab.verifier().start()))
    with pytest.raises(ValueError, match="does not answer this session's window"):
        asyncio.run(collect(generator, request))


class Silent(Wrapped):
    """Never answers."""

    calls = 0

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        self.calls += 1
        await asyncio.sleep(600)
        raise AssertionError


@both_engines
def test_a_verifier_that_never_answers_is_given_up_after_the_attempts(lab: Lab) -> None:
    verifier, engine = lab.verifier().start(), lab.engine()
    client = Silent(verifier)
    generator = lab.generator(engine, client, verify_timeout_s=0.05, verify_attempts=3)

    async def scene() -> bool:
        with pytest.raises(VerifierUnavailable, match=r"no answer from the verifier in 0\.05 s"):
            await collect(generator, request_of("silent", 2))
        return await idle(generator, verifier)

    assert asyncio.run(scene())
    assert client.calls == 3


class ThreeTimesDead(Wrapped):
    """Refuses at once, more often than there are attempts, whenever a new window comes."""

    refusals, seen = 0, ""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        if self.seen != (now := repr(windows[0].tokens)):
            self.seen, self.refusals = now, 0
        self.refusals += 1
        if self.refusals <= 3:
            raise Overloaded("planted") if self.refusals % 2 else VerifierUnavailable("planted")
        return await super().verify(windows)


@both_engines
def test_refusals_at_once_are_no_attempts(lab: Lab) -> None:
    """A verifier that is being replaced refuses fast; the stream waits for its successor."""
    request = request_of("dead", 2, max_tokens=24)
    client = ThreeTimesDead(lab.verifier().start())
    answer = asyncio.run(collect(lab.generator(lab.engine(), client, verify_attempts=2), request))
    assert differences(answer, lab.oracle(request)) == []
    assert answer.stats.verify_retries == 3 * answer.stats.windows


@both_engines
def test_control_refusals_end_when_the_attempts_would_have(lab: Lab) -> None:
    client = ThreeTimesDead(lab.verifier().start())
    generator = lab.generator(lab.engine(), client, verify_timeout_s=0.1, verify_attempts=2)
    with pytest.raises(VerifierUnavailable, match="planted"):
        asyncio.run(collect(generator, request_of("dead", 2, max_tokens=24)))


@all_ways
def test_a_closed_verifier_ends_streams_with_an_error_and_best_effort_goes_on(lab: Lab) -> None:
    verifier, engine = lab.verifier().start(), lab.engine()
    generator = lab.generator(engine, verifier, verify_timeout_s=5.0, verify_attempts=1)
    best = replace(request_of("best", 5, max_tokens=60), deterministic=False)

    async def scene() -> tuple[BaseException | Answer, Answer]:
        stream = asyncio.create_task(collect(generator, request_of("det", 4, max_tokens=400)))
        while not verifier.stats().windows:
            await asyncio.sleep(0.005)
        other = asyncio.create_task(collect(generator, best))
        await asyncio.to_thread(verifier.close)
        (error,) = await asyncio.gather(stream, return_exceptions=True)
        return error, await other

    error, answer = asyncio.run(scene())
    assert isinstance(error, VerifierUnavailable)
    assert len(answer.tokens) == 60


@all_ways
@pytest.mark.parametrize(
    ("length", "tokens", "refused"), [(100, 156, False), (100, 157, True), (257, 1, True)]
)
def test_a_request_beyond_a_verifiers_cache_is_refused_before_it_starts(
    lab: Lab, length: int, tokens: int, refused: bool
) -> None:
    """Not after half of it has been streamed."""
    engine, verifier = lab.engine(), lab.verifier(kv_tokens=256).start()
    generator, before = lab.generator(engine, verifier), engine.load().steps
    smaller = generator.settings.verifier.model_copy(update={"kv_tokens": 256})
    generator.settings = generator.settings.model_copy(update={"verifier": smaller})
    request = Request("big", prompt_of(8, length), tokens, SAMPLED, True, num_logprobs=2)
    if refused:
        with pytest.raises(RequestRejected, match=r"verifier\.kv_tokens") as caught:
            asyncio.run(collect(generator, request))
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        assert engine.load().steps == before
    else:
        answer = asyncio.run(collect(generator, request))
        assert differences(answer, lab.oracle(request)) == []
    best = asyncio.run(collect(generator, replace(request, request_id="best", deterministic=False)))
    assert len(best.tokens) == tokens  # the verifier's cache is no limit to others
