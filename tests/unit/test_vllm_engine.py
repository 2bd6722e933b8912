"""The vLLM adapter over a fake AsyncLLM: lookahead, rollback, priorities, parking. Rules are also run
against an adapter that breaks them."""

from __future__ import annotations

import asyncio
import time

import pytest

from llm42.engine.vllm.engine import VllmEngine
from llm42.engine.vllm.stream import Stream
from llm42.protocol import FinishReason, Request
from tests.unit.fake_vllm import VOCAB, Client, FakeLLM, Make, Scene, continuation, request_of


def wrong(client: Client, request: Request, count: int) -> bool:
    """Whether the present epoch's output is not exactly the first `count` tokens."""
    return client.tokens != continuation(request.prompt, count)


def test_best_effort_runs_to_its_end_in_one_submission(make: Make) -> None:
    scene = make()
    for name, stop, count, reason in (
        ("length", (), 30, FinishReason.LENGTH),
        ("stop", (continuation(request_of("stop").prompt, 12)[11],), 12, FinishReason.STOP),
    ):
        request = request_of(name, deterministic=False, max_tokens=30, stop_token_ids=stop)
        client = scene.submit(request)
        scene.steps(35)
        assert not wrong(client, request, count)
        assert client.finish is reason
        assert [o.finish for o in client.outputs[:-1]] == [None] * (count - 1)
    assert len(scene.llm.added) == 2
    assert scene.idle


# ---- lookahead


class NoBound(VllmEngine):
    """Ignores the lookahead bound."""

    def _enter(self, stream: Stream) -> None:
        stream.limit = stream.request.max_tokens
        super()._enter(stream)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("engine", [VllmEngine, NoBound])
def test_the_bound_is_kept_and_costs_no_place(make: Make, engine: type[VllmEngine], lag: int) -> None:
    scene, request = make(FakeLLM(lag=lag), engine), request_of("d")
    client = scene.submit(request, 32)
    scene.steps(60)
    kept = not wrong(client, request, 32) and not scene.llm.jobs
    assert kept == (engine is VllmEngine)
    if kept:
        scene.extend("d", 50)
        scene.steps(60)
        assert not wrong(client, request, 50)
        # what was decoded beyond the bound is used or given up, never asked for twice
        assert scene.llm.added[1].tokens[:10] == list(request.prompt)


class RenewsEachTime(VllmEngine):
    """Submits anew on every extension."""

    def _extend(self, request_id: str, limit: int) -> None:
        self._stop(self._streams[request_id])
        super()._extend(request_id, limit)


@pytest.mark.parametrize("engine", [VllmEngine, RenewsEachTime])
def test_a_bound_that_moves_in_time_costs_no_submission(make: Make, engine: type[VllmEngine]) -> None:
    scene, request = make(None, engine), request_of("d")
    client = scene.submit(request, 32)
    for limit in range(48, 401, 16):
        scene.steps(16)
        scene.extend("d", limit)
    scene.steps(60)
    assert not wrong(client, request, 400)
    assert (len(scene.llm.added) == 1) == (engine is VllmEngine)


def test_a_renewal_submits_prompt_and_candidates_and_no_more_than_is_left(make: Make) -> None:
    scene, request = make(), request_of("d", max_tokens=100)
    client = scene.submit(request, 40)
    scene.steps(50)
    scene.extend("d", 100)
    job = scene.llm.added[1]
    assert job.tokens == [*request.prompt, *client.tokens]
    assert job.params.max_tokens == 60
    scene.steps(70)
    assert not wrong(client, request, 100)
    assert not scene.llm.jobs


def test_tokens_beyond_the_bound_are_shown_when_it_moves(make: Make) -> None:
    """Several tokens in one output, as when this side was slow."""
    scene, request = make(), request_of("d")
    client = scene.submit(request, 4)
    scene.do(lambda: [scene.llm.step() for _ in range(10)] and None)
    assert not wrong(client, request, 4)
    scene.extend("d", 6)
    assert not wrong(client, request, 6)
    scene.steps(20)
    assert not wrong(client, request, 6)
    scene.extend("d", 30)
    scene.steps(40)
    assert not wrong(client, request, 30)


# ---- rollback


class KeepsTheOldAttempt(VllmEngine):
    """Forgets to tell vLLM."""

    def _stop(self, stream: Stream) -> None:
        stream.attempt = None


@pytest.mark.parametrize("engine", [VllmEngine, KeepsTheOldAttempt])
def test_a_rollback_aborts_and_submits_the_committed_tokens(make: Make, engine: type[VllmEngine]) -> None:
    scene, request = make(None, engine), request_of("d")
    client = scene.submit(request, 64)
    scene.steps(20)
    committed = [*client.tokens[:11], 7]
    scene.roll_back("d", committed, 70)
    first, second = scene.llm.added
    assert second.id != first.id
    assert second.tokens == [*request.prompt, *committed]
    assert second.params.max_tokens == request.max_tokens - 12
    ordered = scene.llm.log[-2:] == [("abort", first.id), ("add", second.id)]
    assert (ordered and list(scene.llm.jobs) == [second.id]) == (engine is VllmEngine)
    scene.steps(5)
    assert client.tokens == [*committed, *continuation([*request.prompt, *committed], 5)]
    assert all(o.start >= 12 for o in client.outputs if o.epoch == 1)


class QueuesBehind(VllmEngine):
    """Submits again at the request's own priority."""

    def _proceed(self, stream: Stream) -> None:
        stream.attempts = 0
        super()._proceed(stream)


@pytest.mark.parametrize("engine", [VllmEngine, QueuesBehind])
def test_a_resubmission_goes_before_its_equals_in_a_full_queue(make: Make, engine: type[VllmEngine]) -> None:
    scene = make(FakeLLM(max_num_seqs=2), engine)
    client = scene.submit(request_of("d"), 64)
    for i in range(20):
        scene.submit(request_of(f"b{i}", deterministic=False, max_tokens=30))
    scene.steps(10)
    scene.roll_back("d", client.tokens[:5], 69)
    scene.steps(1)
    assert (len(client.tokens) == 6) == (engine is VllmEngine)


def test_a_resubmission_does_not_go_before_the_more_urgent(make: Make) -> None:
    scene = make(FakeLLM(max_num_seqs=1))
    client = scene.submit(request_of("d", priority=3), 64)
    scene.steps(10)
    urgent = scene.submit(request_of("u", deterministic=False, max_tokens=4, priority=2))
    scene.roll_back("d", client.tokens[:5], 69)
    scene.steps(4)
    assert (urgent.finish, len(client.tokens)) == (FinishReason.LENGTH, 5)
    scene.steps(1)
    assert len(client.tokens) == 6


def test_rollbacks_in_a_row_leave_one_attempt(make: Make) -> None:
    scene, request = make(), request_of("d")
    scene.submit(request, 64)
    scene.steps(9)
    for count in (8, 5, 3, 3):
        client = scene.clients["d"]
        client.epoch, client.tokens = client.epoch + 1, client.tokens[:count]
        scene.engine.rollback("d", client.tokens, client.epoch, 64)
    scene.do()
    assert len(scene.llm.jobs) == 1
    scene.steps(10)
    assert not wrong(client, request, 13)


# ---- end tokens


class NeverParks(VllmEngine):
    """Goes on after an end token."""

    def _proceed(self, stream: Stream) -> None:
        stream.parked = False
        super()._proceed(stream)


@pytest.mark.parametrize("engine", [VllmEngine, NeverParks])
def test_a_stream_parks_at_an_end_token_until_a_rollback(make: Make, engine: type[VllmEngine]) -> None:
    end = continuation(request_of("d").prompt, 13)[12]
    scene, request = make(None, engine), request_of("d", stop_token_ids=(end,))
    client = scene.submit(request, 64)
    scene.steps(30)
    scene.extend("d", 90)
    scene.steps(30)
    assert all(o.finish is None for o in client.outputs)
    assert (not wrong(client, request, 13) and not scene.llm.jobs) == (engine is VllmEngine)
    committed = [*client.tokens[:12], (end + 1) % VOCAB]
    scene.roll_back("d", committed, 90)
    scene.steps(4)
    assert client.tokens == [*committed, *continuation([*request.prompt, *committed], 4)]


# ---- when it rests


class NeverRests(VllmEngine):
    """Believes what vLLM said last: after an abort that is nothing more."""

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)


def works(scene: Scene) -> bool:
    """Whether time counts as vLLM's."""
    worked = scene.engine.times.worked
    before = worked.seconds
    time.sleep(0.01)
    return worked.seconds > before


def told(scene: Scene) -> None:
    """vLLM tells of a step that had one request."""
    assert scene.engine._connection is not None
    stats = scene.engine._connection.stats
    stats.running = 1
    scene.do(lambda: stats.told(1, 0, time.monotonic()))


@pytest.mark.parametrize("engine", [VllmEngine, NeverRests])
def test_who_is_left_by_all_does_not_work(make: Make, engine: type[VllmEngine]) -> None:
    """Else the verifier on the same device, whose requests these are now, seems to have half of it."""
    scene = make(None, engine)
    scene.submit(request_of("d"))
    scene.steps(3)
    told(scene)
    assert works(scene)
    scene.abort("d")
    assert works(scene) == (engine is NeverRests)
    told(scene)  # of the step that was under way
    assert not works(scene)
