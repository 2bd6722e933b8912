"""The canonical layout (engine.kind canonical) in one process: every kind of request, deterministic or not,
is what the oracle says, and the fingerprint is that of the other layouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from llm42.engine.none import NoEngine
from llm42.errors import FingerprintChanged, NoFastPath, RequestRejected, VerifierUnavailable
from llm42.local.affinity import measure_affinity
from llm42.local.assembly import Local
from llm42.local.demo import run_demo
from llm42.protocol import Commit, Delta, FinishReason, Request, Window
from llm42.session.drive import Drive
from llm42.session.driver import Generator
from llm42.session.interfaces import Sink
from llm42.telemetry.request_metrics import Observed, mode_of
from llm42.verifier.scheduler import Verifier
from tests.metrics_page import PrometheusMetrics
from tests.support import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Answer,
    Lab,
    canonical,
    check_pool,
    collect,
    differences,
    request_of,
    together,
    wait_until,
)

KINDS = (GREEDY, SAMPLED, PENALISED)
both_classes = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "best effort"])


@pytest.fixture(scope="module")
def alone(tiny: Lab) -> Iterator[Local]:
    """A model whose verifier decodes everything. Credit is renewed often."""
    with Local(canonical(tiny.settings, credit=8)) as local:
        yield local


def answers_of(local: Local, requests: Sequence[Request]) -> list[Answer]:
    return together(local, requests)  # type: ignore[arg-type]


def of_every_kind(lab: Lab, deterministic: bool) -> list[Request]:
    """Sampling of each kind, choices of one prompt, and all ways to end."""
    made = [request_of(f"k{i}", i, 20 + 7 * i, 40, KINDS[i % 3]) for i in range(6)]
    made += [replace(made[1], request_id=f"n{i}", sampling=replace(SAMPLED, seed=i)) for i in range(3)]
    free = lab.oracle(made[0])
    at = next(i for i in range(30, len(free.text)) if free.text.find(free.text[i : i + 3]) == i)
    stop = (free.text[at : at + 3],)
    made.append(replace(made[0], request_id="stop", stop=stop))
    made.append(replace(made[0], request_id="included", stop=stop, include_stop=True))
    made.append(replace(made[1], request_id="id", stop_token_ids=(lab.oracle(made[1]).tokens[11],)))
    made.append(replace(made[2], request_id="plain", num_logprobs=None))
    made.append(replace(made[3], request_id="one", max_tokens=1))
    made.append(replace(made[4], request_id="salted", cache_salt="salt"))
    return [replace(r, deterministic=deterministic) for r in made]


@both_classes
def test_every_kind_of_request_is_the_oracles(lab: Lab, alone: Local, deterministic: bool) -> None:
    requests = of_every_kind(lab, deterministic)
    answers = answers_of(alone, requests)
    assert lab.wrong(answers, requests) == []
    ends = {r.request_id: a.finish for r, a in zip(requests, answers, strict=True)}
    assert ends["stop"] is ends["included"] is ends["id"] is FinishReason.STOP
    assert wait_until(lambda: not alone.verifier.stats().following)
    assert wait_until(lambda: alone.verifier.stats().kv_held_blocks == 0)
    check_pool(alone.verifier._pool)


def test_control_another_seed_is_another_answer(lab: Lab, alone: Local) -> None:
    requests = of_every_kind(lab, False)
    answers = answers_of(alone, requests)
    requests[1] = replace(requests[1], sampling=replace(SAMPLED, seed=12))
    assert lab.wrong(answers, requests)


async def deltas_of(local: Local, request: Request) -> list[Delta]:
    async with aclosing(local.generate(request)) as deltas:
        return [delta async for delta in deltas]


def test_best_effort_is_promised_nothing_and_hears_what_an_engine_says(lab: Lab, alone: Local) -> None:
    """No fingerprint and no `llm42` counts; of its prompt what was in the cache, with its first tokens."""
    request = request_of("b", 31, 40, deterministic=False, cache_salt="told")
    for cached in (0, 32):  # two blocks of 16
        deltas = asyncio.run(deltas_of(alone, request))
        assert {d.fingerprint for d in deltas} == {None}
        assert {d.stats for d in deltas} == {None}
        assert [d.cached_tokens for d in deltas] == [cached] + [None] * (len(deltas) - 1)
    promised = asyncio.run(deltas_of(alone, replace(request, deterministic=True)))
    assert {d.fingerprint for d in promised} == {alone.verifier.fingerprint}
    assert promised[-1].stats is not None
    assert promised[-1].stats.direct_tokens == 48


@both_classes
@pytest.mark.parametrize("max_tokens", [0, 9])
def test_the_prompts_own_log_probabilities(
    lab: Lab, alone: Local, max_tokens: int, deterministic: bool
) -> None:
    """As the verifier has them in every layout; they come first."""
    request = request_of("p", 7, max_tokens=max_tokens, prompt_logprobs=1, deterministic=deterministic)
    want = asyncio.run(anext(lab.generator(lab.engine(), lab.verifier().start()).generate(
        replace(request, deterministic=True)
    ))).prompt_logprobs  # fmt: skip
    first, *rest = asyncio.run(deltas_of(alone, request))
    assert (first.prompt_logprobs, first.token_ids) == (want, ())
    assert want is not None
    assert len(want) == len(request.prompt) - 1
    assert first.finish_reason is (None if max_tokens else FinishReason.LENGTH)
    assert (first.fingerprint is None) == (not deterministic)
    assert sum((d.token_ids for d in rest), ()) == (lab.oracle(request).tokens if max_tokens else ())


@both_classes
def test_what_the_client_has_is_where_it_begins(lab: Lab, alone: Local, deterministic: bool) -> None:
    """A replica is lost in the middle; another one goes on."""
    whole = request_of("f", 6, max_tokens=30, deterministic=deterministic)
    had = lab.oracle(whole).tokens[:12]
    (answer,) = answers_of(alone, [replace(whole, output=had)])
    assert (*had, *answer.tokens) == lab.oracle(whole).tokens


@both_classes
def test_a_request_beyond_the_cache_is_the_clients_error(lab: Lab, alone: Local, deterministic: bool) -> None:
    """By what the verifier has, whatever the settings say."""
    assert alone.verifier.kv_tokens == 8192
    request = request_of("long", 1, 20, 8173, deterministic=deterministic)
    with pytest.raises(RequestRejected, match=r"8193 tokens of KV cache; a verifier has 8192") as caught:
        asyncio.run(collect(alone, request))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_the_limit_is_the_verifiers_in_every_layout(lab: Lab) -> None:
    generator = lab.generator(lab.engine(), lab.verifier(kv_tokens=128).start())
    assert generator.settings.verifier.kv_tokens == 8192
    with pytest.raises(RequestRejected, match="a verifier has 128"):
        asyncio.run(collect(generator, request_of("long", 1, 20, 109)))
    assert len(asyncio.run(collect(generator, request_of("fits", 1, 20, 108))).tokens) == 108


def test_layout_and_mode_are_not_in_the_fingerprint(lab: Lab, alone: Local) -> None:
    """And what the one has answered the other confirms: the answer is in its cold windows, bit for bit."""
    with Local(lab.settings) as verifying:
        assert verifying.verifier.manifest == alone.verifier.manifest
        assert verifying.verifier.fingerprint == alone.verifier.fingerprint
        request = request_of("both", 9, max_tokens=24)
        answers = [asyncio.run(collect(x, request)) for x in (verifying, alone)]  # type: ignore[arg-type]
        assert differences(*answers) == []
        assert answers[0].stats.candidate_tokens > answers[1].stats.candidate_tokens == 0


def test_nothing_waits_for_an_engine(alone: Local) -> None:
    """Not even a mistake: what reached it would never be answered."""
    assert isinstance(alone.engine, NoEngine)
    assert alone.engine.alive
    assert alone.engine.load().running == 0
    with pytest.raises(RuntimeError, match="no engine"):
        alone.engine.submit(request_of("e", 1), lambda _: None, 1)
    engine = NoEngine()
    engine.close()
    assert not engine.alive


def test_a_local_one_for_best_effort_alone_has_a_verifier_too(lab: Lab) -> None:
    """As `llm42 generate --best-effort` makes it."""
    request = request_of("g", 3, max_tokens=12, deterministic=False)
    with Local(canonical(lab.settings), verifier=False) as local:
        (answer,) = answers_of(local, [request])
    assert differences(answer, lab.oracle(request)) == []


@pytest.mark.parametrize("command", [run_demo, measure_affinity])
def test_commands_about_the_fast_path_say_that_there_is_none(
    lab: Lab, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(Local, "__init__", None)
    with pytest.raises(NoFastPath, match=r"engine\.kind to torch or vllm"):
        command(canonical(lab.settings))


@both_classes
def test_a_client_that_leaves_frees_everything(lab: Lab, alone: Local, deterministic: bool) -> None:
    verifier: Verifier = alone.verifier

    async def leave() -> None:
        request = request_of("l", 8, max_tokens=400, deterministic=deterministic)
        async with aclosing(alone.generate(request)) as deltas:
            await anext(deltas)

    asyncio.run(leave())
    assert alone.generator._streams == 0
    assert wait_until(lambda: verifier.stats().kv_held_blocks == verifier.stats().following == 0)


def test_best_effort_streams_are_counted_while_they_run(alone: Local) -> None:
    """Their number decides how often each gets something (Generator.pause_s); others do not count."""

    async def counts() -> list[int]:
        seen = []
        for more in (
            {"deterministic": False},
            {"deterministic": True},
            {"deterministic": False, "stream": False},
        ):
            async with aclosing(alone.generate(request_of("c", 2, max_tokens=20, **more))) as deltas:
                await anext(deltas)
                seen.append(alone.generator._streams)
        return seen

    assert asyncio.run(counts()) == [1, 0, 0]


class ReplacedBetween:
    """Another verifier, with another fingerprint, takes over after the first window's commit."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.windows = verifier, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.verifier, name)

    def follow(self, window: Window, sink: Sink) -> None:
        self.windows += 1
        name, first, told = f"fp{self.windows}", self.windows == 1, list[Any]()

        def heard(answer: Any) -> None:
            if first and told:
                return
            told.append(answer)
            sink(replace(answer, fingerprint=name) if isinstance(answer, Commit) else answer)
            if first:
                sink(VerifierUnavailable("planted: it is gone"))

        self.verifier.follow(window, heard)


@both_classes
def test_other_verifiers_go_on_where_nothing_is_promised(lab: Lab, alone: Local, deterministic: bool) -> None:
    client = ReplacedBetween(alone.verifier)
    generator = Generator(NoEngine(), alone.tokenizer, alone.settings, client)
    request = request_of("replaced", 5, max_tokens=12, deterministic=deterministic)
    if deterministic:
        with pytest.raises(FingerprintChanged):
            asyncio.run(collect(generator, request))
    else:
        assert differences(asyncio.run(collect(generator, request)), lab.oracle(request)) == []
    assert client.windows == 2


@both_classes
def test_metrics_say_the_class_and_the_way(alone: Local, deterministic: bool) -> None:
    metrics = PrometheusMetrics("tiny")
    generator = Generator(NoEngine(), alone.tokenizer, alone.settings, alone.verifier, metrics)
    request = request_of("m", 4, max_tokens=24, deterministic=deterministic)
    observed = Observed(request, metrics)

    async def run() -> None:
        async for _ in observed.run(generator.generate(request)):
            pass

    asyncio.run(run())
    page, mode = generate_latest(metrics.registry).decode(), mode_of(request)
    for line in (
        f'llm42_output_tokens_total{{mode="{mode}",model="tiny"}} 24.0',
        f'llm42_requests_total{{mode="{mode}",model="tiny",outcome="finished"}} 1.0',
        'llm42_committed_tokens_total{model="tiny",way="direct"} 24.0',
        'llm42_windows_total{model="tiny"} 1.0',
    ):
        assert line in page
    assert 'way="verify"} 0.0' in page
    assert mode == ("deterministic" if deterministic else "best_effort")


def test_control_a_fingerprint_that_is_passed_on_is_noticed(
    lab: Lab, alone: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drive, "_as_asked", lambda _self, delta, _cached=None: delta)
    with pytest.raises(AssertionError):
        test_best_effort_is_promised_nothing_and_hears_what_an_engine_says(lab, alone)
