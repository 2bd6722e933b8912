"""What only vLLM can show: its own sampler, agreement through our logits processor, the bound, its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llm42.config import Settings
from llm42.engine.base import Engine, EngineOutput
from llm42.engine.vllm.engine import VllmEngine
from llm42.engine.vllm.options import EngineUnavailable
from llm42.engine.vllm.sampling import token_logprobs
from llm42.errors import Overloaded
from llm42.local.assembly import Local
from llm42.protocol import Request, SamplingParams
from tests.support import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Answer,
    Lab,
    VllmPool,
    bare,
    collect,
    differences,
    request_of,
    vllm_settings,
    wait_until,
)

pytestmark = pytest.mark.vllm


@pytest.fixture
def lab(tiny_vllm: Lab) -> Iterator[Lab]:
    yield tiny_vllm
    tiny_vllm.close()


async def direct(engine: VllmEngine, request: Request) -> tuple[list[int], list[Any]]:
    """vLLM's own stream for a greedy request, with no adapter between."""
    connection = engine._connection
    assert connection is not None
    arguments = {"temperature": 0.0, "max_tokens": request.max_tokens, "ignore_eos": True, "logprobs": 2}
    tokens: list[int] = []
    positions: list[Any] = []

    async def consume() -> None:
        async for output in connection.generate("direct", request.prompt, arguments, 0):
            tokens.extend(output.outputs[0].token_ids)
            positions.extend(output.outputs[0].logprobs)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(consume(), engine._loop))
    return tokens, positions


def test_best_effort_output_is_vllms_own(lab: Lab) -> None:
    engine = lab.engine()
    request = replace(request_of("best", 3, sampling=GREEDY, max_tokens=60), deterministic=False)
    answer = asyncio.run(collect(lab.generator(engine, None), request))
    tokens, positions = asyncio.run(direct(engine, request))
    assert answer.tokens == tuple(tokens)
    assert answer.logprobs == token_logprobs(tokens, positions, 2)
    assert len({x.logprob for x in answer.logprobs}) > 30
    assert all(len(x.top) == 2 and x.top[0][1] >= x.top[1][1] for x in answer.logprobs)


@pytest.mark.parametrize("stop", [False, True])
def test_best_effort_requests_end_at_their_stop_token_or_length(lab: Lab, stop: bool) -> None:
    generator = lab.generator(lab.engine(), None)
    free = replace(request_of("free", 5, sampling=GREEDY, max_tokens=30), deterministic=False)
    tokens = asyncio.run(collect(generator, free)).tokens
    at = next(i for i in range(5, 30) if tokens[i] not in tokens[:i])
    ids = (tokens[at],) if stop else ()
    answer = asyncio.run(collect(generator, replace(free, request_id="again", stop_token_ids=ids)))
    assert (len(answer.tokens), answer.finish) == ((at + 1, "stop") if stop else (30, "length"))


def rollbacks(lab: Lab, sampling: SamplingParams, **vllm: Any) -> int:
    """Rollbacks of four requests with this sampling."""
    assert lab.vllm is not None
    engine = lab.vllm.get(lab.settings, dtype="float32", **vllm)
    generator = lab.generator(engine, lab.verifier().start())
    requests = [request_of(f"r{i}", i, sampling=sampling) for i in range(4)]

    async def everyone() -> list[Answer]:
        return list(await asyncio.gather(*(collect(generator, r) for r in requests)))

    answers = asyncio.run(everyone())
    assert lab.wrong(answers, requests) == []
    return sum(a.stats.rollbacks for a in answers)


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_the_logits_processor_makes_candidates_agree(lab: Lab, sampling: SamplingParams) -> None:
    agreeing = rollbacks(lab, sampling, sampled_agreement=True)
    guessing = rollbacks(lab, sampling)
    print(f"{agreeing} rollbacks with the canonical draw, {guessing} with the argmax, of 192 tokens")
    assert 4 * agreeing < guessing


def test_a_held_request_takes_no_place_and_nothing_goes_beyond_the_bound(lab: Lab) -> None:
    engine, got = lab.engine(), list[EngineOutput]()
    request = request_of("held", 4, sampling=GREEDY, max_tokens=200)
    engine.submit(request, got.append, 24)
    assert wait_until(lambda: sum(len(o.tokens) for o in got) == 24, 30)
    assert wait_until(lambda: engine.load().running == engine.load().kv_used == 0, 5)
    best = replace(request_of("best", 5, sampling=GREEDY, max_tokens=60), deterministic=False)
    assert len(asyncio.run(collect(lab.generator(engine, None), best)).tokens) == 60
    assert sum(len(o.tokens) for o in got) == 24
    engine.extend("held", 40)
    assert wait_until(lambda: sum(len(o.tokens) for o in got) == 40, 30)
    assert [o.start for o in got] == [sum(len(x.tokens) for x in got[:i]) for i in range(len(got))]
    engine.abort("held")


def nothing_left(engine: Engine) -> bool:
    """Neither here nor inside vLLM."""
    engine = bare(engine)
    connection = engine._connection
    assert connection is not None
    left = connection.llm.output_processor.get_num_unfinished_requests()
    stats = connection.stats
    return not (engine._streams or engine._tasks or left or stats.running or stats.kv_usage)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_the_whole_context_is_used_and_nothing_is_left_in_vllm(lab: Lab, wrong: float) -> None:
    """max_model_len is reached exactly, also when every candidate is wrong and resubmitted."""
    engine, length = lab.engine(corrupt_share=wrong), lab.settings.model.max_model_len
    generator = lab.generator(engine, lab.verifier().start())
    requests = [
        replace(r, max_tokens=40, prompt=(*(r.prompt * 200)[: length - 40],))
        for r in (request_of(f"whole-{i}", i, sampling=s) for i, s in enumerate((GREEDY, SAMPLED, PENALISED)))
    ]

    async def every() -> list[Answer]:
        return list(await asyncio.gather(*(collect(generator, r) for r in requests)))

    answers = asyncio.run(every())
    for request, answer in zip(requests, answers, strict=True):
        assert len(request.prompt) + len(answer.tokens) == length
        assert differences(answer, lab.oracle(request)) == []
    assert wait_until(lambda: nothing_left(engine), 5)
    engine.submit(replace(requests[0], request_id="stays"), lambda _: None, 40)
    assert wait_until(lambda: not nothing_left(engine), 5), "control: a request is seen there"
    engine.abort("stays")
    assert wait_until(lambda: nothing_left(engine), 5)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_dead_engine_process_ends_requests_with_an_error(lab: Lab, how: signal.Signals) -> None:
    """Told to stop, vLLM first ends its requests as aborted and lives on for a while."""
    assert lab.vllm is not None
    lab.vllm.close()  # its processes are then the only ones
    engine = lab.vllm.get(lab.settings)
    got: list[EngineOutput] = []
    held, long = (request_of(n, 4, sampling=GREEDY, max_tokens=700) for n in ("held", "long"))
    engine.submit(held, got.append, 4)
    for name, count in (("plain", None), ("scored", 2)):
        best = replace(long, request_id=name, deterministic=False, num_logprobs=count)
        engine.submit(best, got.append, 700)
    engine.submit(long, got.append, 700)
    assert wait_until(lambda: len(got) > 10, 30)
    (process,) = _engine_processes()
    process.send_signal(how)
    assert wait_until(lambda: sum(o.error is not None for o in got) == 4, 30)
    assert not engine.alive
    assert all("engine process is gone" in o.error for o in got if o.error)
    assert not any(o.finish for o in got)
    with pytest.raises(Overloaded):
        engine.submit(request_of("late", 4), got.append, 4)


def test_a_hanging_engine_process_is_a_dead_one(lab: Lab) -> None:
    assert lab.vllm is not None
    lab.vllm.close()
    engine, got = lab.vllm.get(lab.settings, stall_s=10.0), list[EngineOutput]()
    engine.submit(request_of("long", 4, sampling=GREEDY, max_tokens=700), got.append, 700)
    assert wait_until(lambda: len(got) > 10, 30)
    (process,) = _engine_processes()
    process.suspend()
    assert wait_until(lambda: bool(got[-1].error), 40)
    assert "stall_s" in (got[-1].error or "")
    assert not engine.alive
    lab.vllm.close()  # it hangs still
    assert _engine_processes() == []


def _engine_processes() -> list[psutil.Process]:
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "EngineCore" in "".join(p.cmdline())]


LAUNCH = """
import json, sys, time
from llm42.config import Settings
from llm42.engine.vllm.engine import VllmEngine
if __name__ == "__main__":
    engine = VllmEngine(Settings.load(json.loads(sys.argv[1]))).start()
    print("ready", flush=True)
    time.sleep(300)
"""


def test_vllm_ends_with_a_process_that_is_killed(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "launch.py"  # a file: vLLM's processes import the main module
    script.write_text(LAUNCH)
    engine = {"kind": "vllm", "vllm": vllm_settings()}
    tree = json.dumps(lab.settings.model_dump(mode="json") | {"engine": engine})
    path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, str(script), tree]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert any(line == "ready\n" for line in parent.stdout)
        started = psutil.Process(parent.pid).children(recursive=True)
        assert any("EngineCore" in "".join(p.cmdline()) for p in started)
        parent.kill()
    assert psutil.wait_procs(started, timeout=20)[1] == []


def test_an_argument_that_vllm_does_not_know_is_a_typed_error(lab: Lab) -> None:
    engine = {"kind": "vllm", "vllm": vllm_settings(extra_args={"no_such_argument": 1})}
    settings = Settings.load(lab.settings.model_dump(mode="json") | {"engine": engine})
    with pytest.raises(EngineUnavailable, match="no_such_argument"):
        VllmEngine(settings).start()


def test_a_vocabulary_that_is_not_the_verifiers_is_a_typed_error(lab: Lab) -> None:
    """Its candidates could be ids that the verifier's model has no row for."""
    other = {"hf_overrides": {"vocab_size": 1024}, "load_format": "dummy"}
    engine = {"kind": "vllm", "vllm": vllm_settings(extra_args=other)}
    settings = Settings.load(lab.settings.model_dump(mode="json") | {"engine": engine})
    with pytest.raises(EngineUnavailable, match="1024 token ids"):
        VllmEngine(settings).start()


def test_the_model_runner_and_expected_rollbacks_are_told(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    assert lab.vllm is not None
    lab.vllm.close()
    with caplog.at_level("INFO"):
        engine = lab.engine()
    assert engine.facts["model_runner"] in ("V1", "V2")
    assert f"model_runner {engine.facts['model_runner']}" in caplog.text
    expected = engine.facts["rollbacks_expected"]
    assert expected.startswith("Expect rollbacks: verifier.affinity is not vllm")
    assert ("INFO", expected) in [(r.levelname, r.getMessage()) for r in caplog.records]


def test_one_process_with_vllm(lab: Lab, vllm_pool: VllmPool, tmp_path: Path) -> None:
    vllm_pool.close()  # room for one more
    engine = {"kind": "vllm", "vllm": vllm_settings()}
    settings = Settings.load(lab.settings.model_dump(mode="json") | {"engine": engine})
    request = request_of("local", 6, sampling=GREEDY)
    with Local(settings) as local:
        answer = asyncio.run(collect(local.generator, request))
        best = replace(request, request_id="best", deterministic=False)
        assert len(asyncio.run(collect(local.generator, best)).tokens) == request.max_tokens
    assert differences(answer, lab.oracle(request)) == []
