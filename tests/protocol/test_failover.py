"""A replica is lost in the middle of an output: another one goes on, and the client cannot tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from llm42.api.errors import ServiceUnavailable
from llm42.config import ServerSettings
from llm42.errors import FingerprintChanged, LLM42Error, Overloaded, VerifierUnavailable, VersionSkew
from llm42.protocol import Delta, FinishReason, Request, SamplingParams
from llm42.session.driver import Generator
from llm42.session.outputs import EngineFailed
from llm42_serve.ingress.failover import ADMISSION_TRIES, Attempt, Failover, ReplicaLost, as_loss
from tests.support import PENALISED, SAMPLED, Answer, Lab, both_ways, differences, request_of

SERVER = ServerSettings(failover_s=20.0)
Script = Callable[[Request], AsyncGenerator[Delta, None]]
KINDS = {"greedy": SamplingParams(), "sampled": SAMPLED, "penalised": PENALISED}


def closing(script: Script) -> Attempt:
    """Attempts that a script makes."""
    return lambda request: aclosing(script(request))


async def survive(
    generators: list[Generator],
    request: Request,
    after: int,
    forget: bool = False,
    server: ServerSettings = SERVER,
) -> tuple[Answer, Failover]:
    """Loses the replica `after` deltas into each attempt but the last; `forget` resumes from nothing."""
    attempts = 0

    async def attempt(asked: Request) -> AsyncGenerator[Delta, None]:
        nonlocal attempts
        generator, last = generators[attempts % len(generators)], attempts + 1 >= len(generators)
        attempts += 1
        count = 0
        source = generator.generate(replace(asked, output=()) if forget else asked)
        async with aclosing(source) as deltas:
            async for delta in deltas:
                if count == after and not last:
                    raise ReplicaLost("killed")
                count += 1
                yield delta

    state = Failover(request, server)
    tokens: list[int] = []
    logprobs: list[Any] = []
    text, finish, stats = "", None, None
    async for delta in state.run(closing(attempt)):
        tokens += delta.token_ids
        logprobs += delta.logprobs
        text += delta.text
        finish, stats = delta.finish_reason, delta.stats or stats
    assert stats is not None or not request.deterministic
    return Answer(tuple(tokens), tuple(logprobs), text, finish, *([stats] if stats else [])), state


def replicas(lab: Lab, count: int) -> list[Generator]:
    """Generators with engines of their own over one verifier."""
    verifier = lab.verifier().start()
    return [lab.generator(lab.engine(), verifier, max_window=7, start_window=7) for _ in range(count)]


@both_ways
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_another_replica_goes_on_without_repeat_or_gap(lab: Lab, kind: str, after: int) -> None:
    request = request_of(f"f-{kind}", 5, max_tokens=60, sampling=KINDS[kind], num_logprobs=2)
    answer, state = asyncio.run(survive(replicas(lab, 3), request, after))
    assert differences(answer, lab.oracle(request)) == []
    assert state.losses == answer.stats.failovers == 2
    assert answer.stats.verified_tokens == len(answer.tokens)


@both_ways
def test_the_check_sees_a_replica_that_starts_again(lab: Lab) -> None:
    """Negative control: without the output so far, the client gets its beginning twice."""
    request = request_of("f-again", 5, max_tokens=60)
    answer, _ = asyncio.run(survive(replicas(lab, 2), request, 3, forget=True))
    assert differences(answer, lab.oracle(request))


@pytest.mark.parametrize("died", [True, False])
def test_an_engine_that_dies_is_a_loss_and_one_that_refuses_is_an_error(lab: Lab, died: bool) -> None:
    """The first replica's engine ends after the first delta; only a dead engine's requests go elsewhere."""
    request = request_of("f-dies", 5, max_tokens=60)
    first, second = replicas(lab, 2)
    asked: list[Request] = []

    async def attempt(current: Request) -> AsyncGenerator[Delta, None]:
        asked.append(current)
        generator = (first, second)[min(len(asked), 2) - 1]
        try:
            async with aclosing(generator.generate(current)) as deltas:
                async for delta in deltas:
                    yield delta
                    if generator is first:
                        raise EngineFailed("planted")
        except EngineFailed as error:
            raise as_loss(error, engine_alive=not died) from error

    async def run_all() -> tuple[int, ...]:
        found = [d async for d in Failover(request, SERVER).run(closing(attempt))]
        return tuple(t for d in found for t in d.token_ids)

    if died:
        assert asyncio.run(run_all()) == lab.oracle(request).tokens
        assert len(asked) == 2
    else:
        with pytest.raises(EngineFailed):
            asyncio.run(run_all())


def outcome_of(fates: Sequence[LLM42Error | None], **settings: Any) -> tuple[list[str], LLM42Error | None]:
    """The ids of the attempts that were made, and the error that the client sees. None: that one answers."""
    asked: list[str] = []

    async def attempt(current: Request) -> AsyncGenerator[Delta, None]:
        asked.append(current.request_id)
        fate = fates[len(asked) - 1]
        if fate is not None:
            raise fate
        yield Delta((1,), "x", finish_reason=FinishReason.LENGTH)

    async def run_all() -> None:
        server = SERVER.model_copy(update=settings)
        async for _ in Failover(request_of("q", 1), server).run(closing(attempt)):
            pass

    try:
        asyncio.run(run_all())
    except LLM42Error as error:
        return asked, error
    return asked, None


def test_a_replica_whose_engine_is_dead_refuses_nobody() -> None:
    """Until Serve has replaced it, its queue is the shortest: it must not answer "full" to all who come."""
    full = Overloaded("the engine is not running")
    dead = [as_loss(full, engine_alive=False)] * 6
    asked, error = outcome_of([*dead, None])
    assert (len(asked), error) == (7, None)
    asked, error = outcome_of([as_loss(full, engine_alive=True)] * 6)
    assert isinstance(error, Overloaded), "the control: one that is full says so"


def test_no_two_attempts_have_one_id() -> None:
    """An engine may still hold the attempt before; its abort must not end the next one."""
    full, lost = Overloaded("full"), ReplicaLost("gone")
    asked, error = outcome_of([full, lost, lost, full, lost, None])
    assert error is None
    assert len(asked) == len(set(asked)) == 6


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_failover_can_be_switched_off(seconds: float) -> None:
    asked, error = outcome_of([ReplicaLost("gone"), None], failover_s=seconds)
    assert (len(asked), type(error)) == ((1, ReplicaLost) if not seconds else (2, type(None)))


@both_ways
def test_a_stop_string_that_began_before_the_loss_is_found(lab: Lab) -> None:
    plain = request_of("f-stop", 9, max_tokens=60)
    whole = lab.oracle(plain)
    for cut in range(8, 40, 4):
        text = lab.tokenizer.decode(whole.tokens[:cut])
        stop = text[-3:]
        if "\ufffd" in stop or len(stop) < 3 or text.find(stop) != len(text) - 3:
            continue
        request = replace(plain, request_id=f"f-stop-{cut}", stop=(stop,))
        answer, state = asyncio.run(survive(replicas(lab, 2), request, 1))
        assert differences(answer, lab.oracle(request)) == []
        assert answer.finish is FinishReason.STOP
        assert state.losses <= 1
        return
    pytest.fail("no stop string was found in the oracle's text")


def test_best_effort_ends_with_an_error_unless_it_may_go_on(lab: Lab) -> None:
    request = replace(request_of("f-best", 5, max_tokens=40), deterministic=False)
    with pytest.raises(ServiceUnavailable):
        asyncio.run(survive(replicas(lab, 2), request, 2))
    resuming = SERVER.model_copy(update={"resume_best_effort": True})
    answer, state = asyncio.run(survive(replicas(lab, 2), request, 2, server=resuming))
    assert (len(answer.tokens), answer.finish, state.losses) == (40, FinishReason.LENGTH, 1)
    started = asyncio.run(survive(replicas(lab, 2), request, 0))[0]
    assert len(started.tokens) == 40, "before the first token it is simply sent again"


async def run(state: Failover, script: Script) -> list[Delta]:
    return [delta async for delta in state.run(closing(script))]


def tokens(*ids: int, last: bool = False, fingerprint: str | None = "a") -> Delta:
    return Delta(ids, "", finish_reason=FinishReason.LENGTH if last else None, fingerprint=fingerprint)


async def test_what_is_asked_of_the_next_replica(lab: Lab) -> None:
    asked: list[Request] = []

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        asked.append(request)
        if len(asked) == 1:
            yield tokens(1, 2)
            raise ReplicaLost("killed")
        if len(asked) == 2:
            raise Overloaded("full")
        yield tokens(3, last=True)
        raise ReplicaLost("killed after the end: nobody minds")

    found = await run(Failover(request_of("q", 1), SERVER), script)
    assert [d.token_ids for d in found] == [(1, 2), (3,)]
    assert [(r.output, r.fingerprint) for r in asked] == [((), None), ((1, 2), "a"), ((1, 2), "a")]
    assert len({r.request_id for r in asked}) == 3


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "best effort"])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), Overloaded("full"), VerifierUnavailable("none")])
async def test_an_attempt_that_fails_behind_its_end_loses_and_repeats_nothing(
    error: LLM42Error, deterministic: bool
) -> None:
    """The last delta is read when the attempt is left, and is not given yet. Who goes on behind it would
    leave it out."""
    asked: list[Request] = []

    @asynccontextmanager
    async def attempt(request: Request) -> AsyncIterator[AsyncIterator[Delta]]:
        asked.append(request)
        yield rest(request)
        if len(asked) == 1:
            raise error

    async def rest(request: Request) -> AsyncIterator[Delta]:
        for token in range(len(request.output) + 1, 4):
            yield tokens(token, last=token == 3)

    request = replace(request_of("q", 1, max_tokens=3), deterministic=deterministic)
    found = [delta async for delta in Failover(request, SERVER).run(attempt)]
    assert [d.token_ids for d in found] == [(1,), (2,), (3,)]
    assert [d.finish_reason for d in found] == [None, None, FinishReason.LENGTH]
    assert len(asked) == 1, "everything was there"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (VerifierUnavailable("none"), 1),
        (FingerprintChanged("other"), ADMISSION_TRIES),  # another replica may not share these two
        (VersionSkew("code"), ADMISSION_TRIES),
    ],
)
async def test_no_verifier_is_an_error_before_the_first_token(
    error: VerifierUnavailable, expected: int
) -> None:
    tries: list[int] = []

    async def script(_: Request) -> AsyncGenerator[Delta, None]:
        tries.append(1)
        raise error
        yield tokens(1)

    with pytest.raises(type(error)):
        await run(Failover(request_of("q", 1), SERVER), script)
    assert len(tries) == expected


async def test_another_fingerprint_does_not_go_on() -> None:
    asked: list[Request] = []

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        asked.append(request)
        if len(asked) == 1:
            yield tokens(1)
            raise ReplicaLost("killed")
        raise FingerprintChanged("other verifiers")

    with pytest.raises(FingerprintChanged):
        await run(Failover(request_of("q", 1), SERVER), script)
    assert len(asked) == 2


async def test_the_wait_for_another_replica_is_bounded() -> None:
    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        if not request.output:
            yield tokens(1)
        raise ReplicaLost("killed")

    with pytest.raises(ServiceUnavailable):
        await run(Failover(request_of("q", 1), ServerSettings(failover_s=0.3)), script)


@both_ways
def test_the_other_replicas_verifier_must_have_the_same_fingerprint(lab: Lab) -> None:
    request = replace(request_of("f-other", 5), output=lab.oracle(request_of("f-other", 5)).tokens[:4])
    (generator,) = replicas(lab, 1)

    async def first(asked: Request) -> Delta:
        async with aclosing(generator.generate(asked)) as deltas:
            return await anext(deltas)

    with pytest.raises(FingerprintChanged):
        asyncio.run(first(replace(request, fingerprint="another")))
    assert asyncio.run(first(replace(request, fingerprint="tiny"))).token_ids
