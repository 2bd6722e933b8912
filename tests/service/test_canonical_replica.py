"""A replica without an engine (engine.kind canonical): the real ingress, replica, pool, exchange and
verifier; only Ray between them is a stand-in."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from llm42.config import Settings
from llm42.engine.build import build_engine
from llm42.errors import VersionSkew
from llm42.fingerprint.request import request_facts
from llm42.protocol import Delta, Request, SamplingParams
from llm42.session import driver
from llm42.session.driver import Generator
from llm42.session.ways import Ways
from llm42.telemetry.metrics import Metrics
from llm42.verifier.build import build_verifier
from llm42.verifier.scheduler import Verifier
from llm42_serve.replica import fastpath
from llm42_serve.replica.fastpath import FastPath, admission_for
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.outboxes import Outboxes
from tests.service.stand_ins import Call
from tests.service.test_version_skew import Replica, World
from tests.support import Lab, canonical, request_of

PROMPT = [5, 9, 40, 77, 130, 8, 21, 300]
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
both_classes = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "best effort"])


@dataclass
class Layout(World):
    """The service in the layout of its settings."""

    kv_tokens: int = 8192
    """What the verifier says that it has."""
    state: Any = "ready"

    def replica(self) -> FastPath:
        """With or without an engine."""
        made: Any = Replica()
        made._settings, made._replica, made._served = self.settings, "replica", 0
        made._pool = pool = VerifierPool(self.settings, Metrics())
        made._admission = admission_for(self.settings)
        boxes = Outboxes(self.verifier)
        handle = SimpleNamespace(
            verify_cold=Call(lambda windows: self.verifier.verify(windows, cold=True)),
            exchange=Call(boxes.exchange),
            manifest=Call(lambda: dict(self.verifier.manifest)),
        )
        facts, name = self.verifier.manifest["request"], self.verifier.fingerprint
        status = VerifierStatus(self.state, name, request=facts, kv_tokens=self.kv_tokens)
        pool.members, pool.fingerprint = [Member("verifier-0", "0", handle, status)], name
        made._engine = build_engine(self.settings, self.lab.model)
        if self.settings.engine.decodes:
            self.lab.parts.append(made._engine)
        made._generator = Generator(made._engine, self.tokenizer, self.settings, pool)
        made._facts = request_facts(self.settings, self.tokenizer)
        found: FastPath = made
        return found

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Of one replica."""
        replica: Any = self.replica()
        replica._pool.refresh = asyncio.Event().wait  # nobody knows of other verifiers
        async with self.ingress(replica) as http:
            yield http
        replica._pool.close()


def layout_of(lab: Lab, settings: Settings) -> Layout:
    verifier: Verifier = build_verifier(settings, lab.model, lab.tokenizer, lab.certificate).start()
    lab.parts.append(verifier)
    return Layout(settings, lab.tokenizer, verifier, lab)


@pytest.fixture
def alone(lab: Lab) -> Layout:
    """Verifiers decode everything."""
    return layout_of(lab, canonical(lab.settings, credit=4))


@pytest.fixture
def beside(lab: Lab) -> Layout:
    """An engine and a verifier."""
    return layout_of(lab, lab.settings)


async def post(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/completions", json=BODY | fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def oracle(lab: Lab, seed: int, tokens: int = 12, **fields: Any) -> list[int]:
    sampling = SamplingParams(**({"temperature": 1.0, "seed": seed} | fields))
    return list(lab.oracle(Request("o", tuple(PROMPT), tokens, sampling, num_logprobs=0)).tokens)


async def test_best_effort_gets_the_reply_of_best_effort(lab: Lab, alone: Layout, beside: Layout) -> None:
    """The same fields as with an engine, and nothing is promised; but the seed would repeat it."""
    async with alone.client() as http, beside.client() as other:
        got, want = await post(http, ignore_eos=True), await post(other, ignore_eos=True)
        assert got["system_fingerprint"] is None
        seed, evidence = got["llm42"].pop("seed"), got["llm42"]
        del want["llm42"]["seed"], evidence["verifier"], want["llm42"]["verifier"]
        assert evidence == want["llm42"] | {"deterministic": False}, "counts are zero"
        assert got.keys() == want.keys()
        assert got["usage"] == want["usage"]
        assert got["choices"][0]["token_ids"] == oracle(lab, seed)
        again = await post(http, ignore_eos=True)
        assert again["llm42"]["seed"] != seed, "each unseeded request draws one"
        assert again["usage"]["prompt_tokens_details"] == got["usage"]["prompt_tokens_details"]


@both_classes
async def test_all_kinds_of_request(lab: Lab, alone: Layout, deterministic: bool) -> None:
    """Choices, an echo without a token, stop strings and a stream: both classes have one answer."""
    asked: dict[str, Any] = {"deterministic": deterministic, "seed": 7, "ignore_eos": True}
    async with alone.client() as http:
        two = await post(http, n=2, logprobs=1, prompt_logprobs=1, **asked)
        assert two["choices"][0]["token_ids"] == oracle(lab, 7)
        assert len({tuple(c["token_ids"]) for c in two["choices"]}) == 2
        assert all(len(c["prompt_logprobs"]) == len(PROMPT) for c in two["choices"])
        echo = await post(http, echo=True, logprobs=0, **asked | {"max_tokens": 0})
        assert len(echo["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)
        assert echo["usage"]["completion_tokens"] == 0
        stop = two["choices"][0]["text"][3:6]
        ended = await post(http, stop=[stop], **asked)
        assert ended["choices"][0]["text"] == two["choices"][0]["text"].partition(stop)[0]
        assert ended["choices"][0]["finish_reason"] == "stop"
        reply = await http.post("/v1/completions", json=BODY | asked | {"stream": True})
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        tokens = [t for e in events for c in e["choices"] for t in c["token_ids"]]
        assert tokens == oracle(lab, 7)
    assert {two["system_fingerprint"], ended["system_fingerprint"]} == (
        {alone.verifier.fingerprint} if deterministic else {None}
    )


@both_classes
@pytest.mark.parametrize("stream", [False, True])
async def test_with_no_verifier_ready_nothing_is_answered(
    alone: Layout, deterministic: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm42_serve.replica.verifier_pool.LOOK_S", 0.05)
    alone.state = "starting"
    async with alone.client() as http:
        asked = BODY | {"deterministic": deterministic, "stream": stream}
        reply = await http.post("/v1/completions", json=asked)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "verifier_unavailable")
        assert reply.headers["Retry-After"]
        assert "No verifier is ready" in reply.json()["error"]["message"]
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")


async def test_a_gateway_sees_the_kv_of_who_decodes(alone: Layout, beside: Layout) -> None:
    """And as running, who has a place."""
    for layout, total in ((alone, 8192), (beside, beside.settings.engine.kv_tokens)):
        replica: Any = layout.replica()
        (member,) = replica._pool.members
        member.status = replace(member.status, kv_used=512)
        async with replica._admission.place(False), replica._admission.place(True):
            shown = await replica.near_status()
            assert (shown.running, shown.waiting, shown.queued) == (2, 0, 0)
            assert (shown.kv_used, shown.kv_total) == (512 if layout is alone else 0, total)
        assert (await replica.near_status()).running == 0
        replica._pool.close()


async def test_control_with_one_everything_is(alone: Layout) -> None:
    async with alone.client() as http:
        for deterministic in (True, False):
            await post(http, deterministic=deterministic)
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")


async def test_control_beside_an_engine_best_effort_needs_none(
    beside: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm42_serve.replica.verifier_pool.LOOK_S", 0.05)
    beside.state = "starting"
    async with beside.client() as http:
        await post(http)
        assert (await http.post("/v1/completions", json=BODY | {"deterministic": True})).status_code == 503
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "best_effort_only")


@both_classes
async def test_a_request_beyond_the_kv_that_is_reported_is_a_400(alone: Layout, deterministic: bool) -> None:
    """8 tokens of prompt and 12 of output."""
    for kv_tokens, status in ((19, 400), (20, 200), (0, 200)):  # 0: of a release that does not say
        alone.kv_tokens = kv_tokens
        async with alone.client() as http:
            reply = await http.post("/v1/completions", json=BODY | {"deterministic": deterministic})
            assert reply.status_code == status
            if status == 400:
                error = reply.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert "need 20 tokens of KV cache; a verifier has 19" in error["message"]


async def test_so_it_is_beside_an_engine_where_only_determinism_needs_it(beside: Layout) -> None:
    beside.kv_tokens = 19
    async with beside.client() as http:
        assert (await http.post("/v1/completions", json=BODY | {"deterministic": True})).status_code == 400
        await post(http)


async def test_the_largest_that_is_ready_counts(alone: Layout) -> None:
    """And what one says that is not ready is not heard."""
    pool: VerifierPool = alone.replica()._pool  # type: ignore[attr-defined]
    (member,) = pool.members
    assert member.status is not None
    for number, (state, kv_tokens) in enumerate((("ready", 9000), ("mixed", 99999))):
        status = replace(member.status, state=state, kv_tokens=kv_tokens)
        pool.members.append(Member(f"verifier-{number + 1}", str(number + 1), member.handle, status))
    assert pool.kv_tokens == 9000
    pool.members.clear()
    assert pool.kv_tokens is None


async def pieces(layout: Layout, request: Request) -> list[Delta]:
    """What a replica sends for it."""
    replica: Any = layout.replica()
    facts = request_facts(layout.settings, layout.tokenizer)
    found: list[Delta] = []
    async with aclosing(replica.generate(request, facts)) as deltas:
        async for delta in deltas:
            assert isinstance(delta, Delta), delta
            if not found:
                status, settings = await replica.status(facts), layout.settings
                # who has to wait for its reader's credit cannot be over, however long this has taken
                waits = request.stream and request.max_tokens > 3 * settings.session.credit
                assert settings.engine.decodes or status.kv_total == 0
                assert settings.engine.decodes or status.running == 1 or not waits
            found.append(delta)
    assert (await replica.status(facts)).running == 0
    replica._pool.close()
    return found


def of_120(deterministic: bool, **more: Any) -> Request:
    return request_of("w", 3, max_tokens=120, deterministic=deterministic, num_logprobs=None, **more)


@both_classes
async def test_a_whole_reply_is_sent_in_few_pieces(lab: Lab, deterministic: bool) -> None:
    began, found = (
        time.monotonic(),
        await pieces(layout_of(lab, quick(lab)), of_120(deterministic, stream=False)),
    )
    assert sum(len(d.token_ids) for d in found) == 120
    assert len(found) <= 3 + (time.monotonic() - began) / driver.KEEP_ALIVE_S


@both_classes
@pytest.mark.parametrize("stream", [True, False])
async def test_the_last_piece_says_who_has_computed_it(
    alone: Layout, deterministic: bool, stream: bool
) -> None:
    """Also where the request is over before its pieces are sent."""
    found = await pieces(alone, replace(of_120(deterministic, stream=stream), max_tokens=3))
    assert (found[-1].replica, found[-1].verifier) == ("replica", "verifier-0")


async def test_control_with_the_request_the_name_is_forgotten(
    alone: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = VerifierPool.release

    def forgets(self: VerifierPool, request_id: str) -> None:
        release(self, request_id)
        self.forget(request_id)

    monkeypatch.setattr(VerifierPool, "release", forgets)
    found = await pieces(alone, replace(of_120(True, stream=False), max_tokens=3))
    assert found[-1].verifier == ""


@both_classes
async def test_control_as_it_is_decoded_there_are_more(
    lab: Lab, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpath, "coalesce", lambda source, _: source)
    assert len(await pieces(layout_of(lab, quick(lab)), of_120(deterministic, stream=False))) > 10


@pytest.mark.parametrize("planted", [False, True])
async def test_what_a_verifier_decodes_of_a_best_effort_reply_comes_joined_too(
    lab: Lab, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine beside, session.mode auto. planted: sent as it is decoded, the control."""
    monkeypatch.setattr(Ways, "next_best_effort", lambda *_: "direct")
    if planted:
        monkeypatch.setattr(fastpath, "coalesce", lambda source, _: source)
    auto = {"mode": "auto", "credit": 8, "commit_interval_s": 1e-4}
    settings = Settings.load(lab.settings.model_dump(mode="json") | {"session": auto})
    began, found = (
        time.monotonic(),
        await pieces(layout_of(lab, settings), of_120(False, stream=False, seeded=False)),
    )
    assert sum(len(d.token_ids) for d in found) == 120
    assert (len(found) <= 3 + (time.monotonic() - began) / driver.KEEP_ALIVE_S) != planted


async def test_whoever_reads_along_gets_what_is_committed_as_it_comes(lab: Lab) -> None:
    assert len(await pieces(layout_of(lab, quick(lab)), of_120(True, stream=True))) > 10


def quick(lab: Lab) -> Settings:
    """Of 120 tokens at most 9 come together, however slow the machine is."""
    return canonical(lab.settings, credit=8, commit_interval_s=1e-4)


async def test_best_effort_is_not_compared_with_anybodys_release(alone: Layout) -> None:
    replica: Any = alone.replica()
    for deterministic, kind in ((False, Delta), (True, VersionSkew)):
        request = request_of("r", 1, max_tokens=3, deterministic=deterministic)
        last = [item async for item in replica.generate(request, None)][-1]
        assert isinstance(last, kind)
    replica._pool.close()


async def test_both_classes_share_what_the_verifiers_sustain(alone: Layout, beside: Layout) -> None:
    for layout, held in ((alone, 1), (beside, 3)):
        admission = admission_for(layout.settings)
        admission.deterministic_limit = 1.0
        entered = [asyncio.ensure_future(admission._enter(False)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(t.done() for t in entered) == held
        for task in entered:
            task.cancel()
        await asyncio.gather(*entered, return_exceptions=True)
