"""The vLLM adapter over a fake AsyncLLM: who leaves, what goes wrong, that everything is freed and told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.engine.vllm.engine import VllmEngine
from llm42.engine.vllm.stream import Stream
from llm42.errors import Overloaded, RequestRejected
from llm42.protocol import FinishReason, SamplingParams
from tests.support import wait_until
from tests.unit.fake_vllm import VOCAB, Client, FakeLLM, Make, Scene, output_of, request_of


class TellsNobody(VllmEngine):
    """Forgets to tell vLLM that an attempt is over."""

    def _stop(self, stream: Stream) -> None:
        stream.attempt = None


def waiting(scene: Scene) -> None:
    scene.steps(0)


def running(scene: Scene) -> None:
    scene.llm.max_num_seqs = 4
    scene.steps(5)


def held(scene: Scene) -> None:
    scene.llm.max_num_seqs = 4
    scene.steps(40)


def rolled_back(scene: Scene) -> None:
    running(scene)
    scene.roll_back("d", scene.clients["d"].tokens[:3], 40)


def just_submitted(scene: Scene) -> None:
    scene.abort("d")
    scene.engine.submit(request_of("d"), scene.clients["d"], 20)  # not in the loop yet


def unknown(scene: Scene) -> None:
    scene.abort("d")


@pytest.mark.parametrize("state", [waiting, running, held, rolled_back, just_submitted, unknown])
def test_an_abort_in_any_state_frees_everything(make: Make, state: Callable[[Scene], None]) -> None:
    scene = make(FakeLLM(max_num_seqs=0))
    client = scene.submit(request_of("d"), 20)
    state(scene)
    heard = len(client.outputs)
    scene.abort("d")
    scene.abort("d")
    scene.llm.max_num_seqs = 4
    scene.steps(5)
    assert scene.idle
    assert len(client.outputs) == heard
    assert scene.engine.load().running == scene.engine.load().waiting == 0


def test_control_an_abort_that_vllm_does_not_hear_of_is_noticed(make: Make) -> None:
    scene = make(None, TellsNobody)
    scene.submit(request_of("d"), 200)
    scene.steps(3)
    scene.abort("d")
    assert not scene.idle


# ---- errors


def test_a_refused_request_gets_an_error_and_no_other_does(make: Make) -> None:
    scene = make()
    scene.llm.refuse = lambda name: name.startswith("bad")
    fine, bad = scene.submit(request_of("fine"), 64), scene.submit(request_of("bad"), 64)
    best = scene.submit(request_of("bad-best", deterministic=False))
    scene.steps(10)
    assert "refused" in (bad.error or "")
    assert "refused" in (best.error or "")
    assert (fine.error, len(fine.tokens), scene.engine.alive) == (None, 10, True)


class KeepsServing(VllmEngine):
    """Broken on purpose: takes vLLM's word for one request's end."""

    def _take(self, stream: Stream, output: Any) -> bool:
        if output.outputs[0].finish_reason == "abort":
            stream.report((), (), FinishReason.ABORT)
            return False
        return super()._take(stream, output)


def stop_vllm(scene: Scene) -> dict[str, Client]:
    """What clients see when vLLM is told to stop: it ends what runs before its process goes, and repeats the
    last log-probabilities with that."""
    clients = {"held": scene.submit(request_of("held"), 5), "runs": scene.submit(request_of("runs"), 64)}
    for name, count in (("plain", None), ("scored", 1)):
        request = request_of(name, deterministic=False, num_logprobs=count)
        clients[name] = scene.submit(request)
    scene.steps(8)
    last = [{7: SimpleNamespace(logprob=-1.0, rank=1)}]
    jobs = list(scene.llm.jobs.values())
    scene.do(lambda: [j.outbox.put(output_of([], "abort", last)) for j in jobs])
    return clients


def test_vllm_told_to_stop_is_a_dead_engine(make: Make) -> None:
    """So the service goes on elsewhere, as after a crash."""
    scene = make()
    clients = stop_vllm(scene)
    for client in clients.values():
        assert "engine process is gone" in (client.error or "")
        assert client.finish is None
        assert sum(o.error is not None for o in client.outputs) == 1
    assert not scene.engine.alive
    with pytest.raises(Overloaded):
        scene.engine.submit(request_of("late"), Client(), 64)
    assert scene.idle


def test_control_an_engine_that_takes_the_abort_for_an_end_is_noticed(make: Make) -> None:
    scene = make(engine=KeepsServing)
    clients = stop_vllm(scene)
    assert scene.engine.alive
    assert clients["plain"].finish is FinishReason.ABORT
    assert clients["held"].error is None


def test_a_vllm_that_says_nothing_is_a_dead_engine(make: Make) -> None:
    scene = make(vllm={"stall_s": 2.0})
    clients = [scene.submit(request_of("runs"), 64), scene.submit(request_of("best", deterministic=False))]
    for _ in range(12):  # longer than that in all: it speaks, however slowly
        time.sleep(0.25)
        scene.steps(1)
        assert scene.engine.alive
    assert wait_until(lambda: all("stall_s" in (c.error or "") for c in clients))
    scene.do()
    assert not scene.engine.alive
    assert scene.idle


def test_control_a_vllm_without_requests_may_say_nothing(make: Make) -> None:
    scene = make(vllm={"stall_s": 1.0})
    held = scene.submit(request_of("held"), 5)
    scene.steps(8)
    assert len(held.tokens) == 5
    time.sleep(2.0)
    assert (scene.engine.alive, held.error) == (True, None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_id_twice_at_a_time_ends_both(make: Make, deterministic: bool) -> None:
    """Either's owner aborts by the id when it is told: the other would wait for ever."""
    scene = make()
    request = request_of("same", deterministic=deterministic)
    first, second = scene.submit(request, 64), Client()
    scene.steps(3)
    scene.engine.submit(request, second, 64)
    scene.steps(3)
    for client in (first, second):
        assert "id of its own" in (client.error or "")
        assert sum(o.error is not None for o in client.outputs) == 1
    scene.abort("same")
    scene.abort("same")
    assert (scene.engine.alive, scene.idle) == (True, True)
    again = scene.submit(request, 64)
    scene.steps(3)
    assert (again.error, len(again.tokens)) == (None, 3)


def test_a_stop_id_without_a_row_does_not_reach_vllm(make: Make) -> None:
    """A tokenizer may know an end token that the model has no row for; vLLM would die of it."""
    scene = make()
    client = scene.submit(request_of("r", deterministic=False, stop_token_ids=(3, VOCAB)), 64)
    scene.steps(2)
    (job,) = scene.llm.jobs.values()
    assert job.params.stop_token_ids == [3]
    assert (client.error, len(client.tokens)) == (None, 2)


@pytest.mark.parametrize("reason", ["error", "repetition"])
def test_a_finish_that_is_an_error(make: Make, reason: str) -> None:
    scene = make()
    client = scene.submit(request_of("b", deterministic=False))
    scene.steps(2)
    (job,) = scene.llm.jobs.values()
    scene.do(lambda: job.outbox.put(output_of([], reason)))
    assert reason in (client.error or "")


def test_death_reaches_every_request_also_those_that_wait_for_their_verifier(make: Make) -> None:
    scene = make()
    clients = [scene.submit(request_of("held"), 5), scene.submit(request_of("runs"), 64)]
    clients.append(scene.submit(request_of("best", deterministic=False)))
    scene.steps(10)
    assert scene.engine.alive
    scene.do(scene.llm.die)
    assert all(c.error is not None for c in clients)
    assert sum(o.error is not None for c in clients for o in c.outputs) == 3
    assert not scene.engine.alive
    assert scene.idle
    with pytest.raises(Overloaded):
        scene.engine.submit(request_of("late"), Client(), 64)


def test_close_tells_who_is_running(make: Make) -> None:
    scene = make()
    clients = [scene.submit(request_of("held"), 5), scene.submit(request_of("runs"), 64)]
    scene.steps(10)
    scene.close()
    assert [c.error for c in clients] == ["the engine stopped"] * 2
    assert scene.llm.closed
    assert not scene.engine.alive
    assert not scene.llm.jobs
    with pytest.raises(Overloaded):
        scene.engine.submit(request_of("late"), Client(), 64)
    scene.engine.abort("held")
    scene.engine.extend("held", 9)
    scene.engine.rollback("held", (), 1, 9)
    scene.engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 4090},
        {"prompt": ()},
        {"prompt": (5, VOCAB)},
        {"prompt": (-1,)},
        {"num_logprobs": 21},
        {"prompt_logprobs": 21},
        {"deterministic": False, "sampling": SamplingParams(temperature=2.5)},
    ],
    ids=str,
)
def test_what_vllm_would_refuse_is_refused_at_once(make: Make, changes: dict[str, Any]) -> None:
    scene = make()
    with pytest.raises(RequestRejected) as caught:
        scene.engine.submit(replace(request_of("r"), **changes), Client(), 64)
    assert caught.value.param
    assert scene.idle
