"""The service over HTTP: real Ray Serve, real model, two replicas that also propose wrong tokens."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import ray

from llm42.checkpoint.load import sampled_identity
from llm42.config import Settings
from llm42.config.serve_file import APP_NAME
from llm42.protocol import Request, SamplingParams
from llm42.verifier.build import build_verifier
from llm42_serve.launch import Service
from llm42_serve.verifiers.actor import VerifierActor
from llm42_serve.verifiers.names import NAMESPACE, verifier_names
from tests.service.conftest import WAIT_S
from tests.service.served import on_the_tiny_model_only
from tests.service.traffic import Answer, ask, noise
from tests.support import Lab

pytestmark = pytest.mark.service
MESSAGES: Any = [{"role": "user", "content": "Write a short poem about a cat that likes the sea."}]


def verifier_name(settings: Settings) -> str:
    """The first actor's name."""
    return verifier_names(settings, sampled_identity(settings.model.path), 1)[0]


@pytest.fixture(scope="module")
def prompt(served: Lab) -> list[int]:
    return served.tokenizer.encode(served.tokenizer.apply_chat_template(MESSAGES))


def oracle(served: Lab, prompt: list[int], sampling: SamplingParams, tokens: int) -> Answer:
    """What a deterministic request must be answered with."""
    request = Request("oracle", tuple(prompt), tokens, sampling, True, num_logprobs=0)
    return Answer(*served.oracle(request).sent)


def test_another_process_has_the_same_fingerprint(served: Lab, service: Service) -> None:
    """With the service's settings, and a certificate of the same inputs."""
    parts = served.model, served.tokenizer, served.certificate
    assert build_verifier(service.settings, *parts).fingerprint == service.health()["fingerprint"]


def test_the_openai_client_gets_what_it_expects(client: openai.OpenAI, settings: Settings) -> None:
    assert [m.id for m in client.models.list()] == [settings.model.name]
    reply = client.chat.completions.create(
        model=settings.model.name, messages=MESSAGES, max_tokens=8, extra_body={"deterministic": True}
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage
    assert reply.usage.completion_tokens == 8
    assert (reply.system_fingerprint or "").startswith("llm42-")
    evidence = (reply.model_extra or {})["llm42"]
    assert evidence["deterministic"] is True
    assert evidence["verified_tokens"] == 8
    assert evidence["windows"] > 0
    assert evidence["seed"] == settings.server.default_seed
    plain = client.chat.completions.create(model=settings.model.name, messages=MESSAGES, max_tokens=8)
    assert plain.system_fingerprint is None
    assert (plain.model_extra or {})["llm42"]["deterministic"] is False


def tokens_of(model: str) -> int:
    """How long answers are: shorter where each token takes long."""
    return 48 if model == "tiny" else 24


async def copies(
    aclient: openai.AsyncOpenAI, model: str, prompt: list[int], n: int, **extra: Any
) -> tuple[set[Answer], int]:
    """The distinct answers to n equal requests sent at once beside noise, and how many rollbacks they had."""
    longest = 300 if model == "tiny" else 100
    beside = asyncio.create_task(noise(aclient, model, n, 12, longest))
    got = await asyncio.gather(*(ask(aclient, model, prompt, tokens_of(model), **extra) for _ in range(n)))
    await beside
    return {answer for answer, _ in got}, sum(int(str(e["rollbacks"])) for _, e in got)


@pytest.mark.parametrize(
    ("served_name", "temperature"),
    [
        ("tiny", 0.0),
        ("tiny", 1.0),
        pytest.param("smollm2", 0.0, marks=pytest.mark.slow),
        pytest.param("smollm2", 1.0, marks=pytest.mark.slow),
    ],
    indirect=["served_name"],
    scope="session",
)
async def test_sixteen_copies_under_noise_are_one_answer_the_oracles(
    aclient: openai.AsyncOpenAI,
    served: Lab,
    prompt: list[int],
    settings: Settings,
    service: Service,
    temperature: float,
) -> None:
    """On two replicas, greedy and seeded, with wrong candidates: ids and floats equal."""
    sampling = {"temperature": temperature, "seed": 7}
    distinct, rollbacks = await copies(
        aclient, settings.model.name, prompt, 16, deterministic=True, **sampling
    )
    asked = SamplingParams(temperature=temperature, seed=7)
    assert distinct == {oracle(served, prompt, asked, tokens_of(settings.model.name))}
    assert rollbacks > 0, "the planted wrong candidates were not met"
    served = {s["replica"]: s["served"] for s in [service.health() for _ in range(40)]}
    assert len(served) == 2
    assert all(served.values()), "both replicas have taken part"


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_a_joined_stream_is_the_whole_text(client: openai.OpenAI, settings: Settings, path: str) -> None:
    """Pieces put together are what is answered in one piece."""
    shared: Any = {
        "model": settings.model.name,
        "max_tokens": 40,
        "stop": ["\nand"],
        "temperature": 0.8,
        "seed": 3,
        "extra_body": {"deterministic": True, "return_token_ids": True},
    }
    usage: Any = {"include_usage": True}
    if path == "chat":
        create: Any = client.chat.completions.create
        shared |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    else:
        create = client.completions.create
        shared |= {"prompt": "The cat looked at the waves", "logprobs": 2}
    whole = create(**shared).choices[0]
    chunks = list(create(**shared, stream=True, stream_options=usage))
    parts = [c.choices[0] for c in chunks if c.choices]
    if path == "chat":
        text, joined = whole.message.content, "".join(p.delta.content or "" for p in parts)
        floats = [e.logprob for p in parts for e in p.logprobs.content]
        assert floats == [e.logprob for e in whole.logprobs.content]
    else:
        text, joined = whole.text, "".join(p.text for p in parts)
        floats = [e for p in parts for e in p.logprobs.token_logprobs]
        assert floats == whole.logprobs.token_logprobs
    assert joined == text
    assert len(floats) == chunks[-1].usage.completion_tokens
    assert [t for p in parts for t in p.model_extra["token_ids"]] == whole.model_extra["token_ids"]
    assert all(p.finish_reason is None for p in parts[:-1])
    assert parts[-1].finish_reason == whole.finish_reason
    assert len(parts) > 1


@on_the_tiny_model_only
def test_errors_reach_the_openai_client_by_type(
    client: openai.OpenAI, settings: Settings, service: Service
) -> None:
    model: Any = {"model": settings.model.name}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**model, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(**model, prompt=[1] * 5000, stream=True)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            **model, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    reply = httpx.post(
        f"{service.url}/v1/completions", content="{", headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"
    assert httpx.get(f"{service.url}/v1/nothing").json()["error"]["type"] == "not_found_error"


def engine_busy(service: Service, samples: int = 12) -> int:
    """The most requests any sampled replica has; health answers come from either."""
    states = [service.health() for _ in range(samples)]
    return max(s["running"] + s["waiting"] for s in states)


@on_the_tiny_model_only
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave_free_the_engines(
    service: Service, settings: Settings, deterministic: bool, stream: bool
) -> None:
    """After 8 clients have cut their connections, both replicas are idle within two seconds."""
    body = {
        "model": settings.model.name, "prompt": "Once", "max_tokens": settings.model.max_model_len - 100,
        "stream": stream, "deterministic": deterministic, "ignore_eos": True,
    }  # fmt: skip

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=300) as http:
            if not stream:
                await http.post(f"{service.url}/v1/completions", json=body, timeout=2.0)
                return
            async with http.stream("POST", f"{service.url}/v1/completions", json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for _ in reply.aiter_lines():
                    return

    left = [asyncio.create_task(leave()) for _ in range(8)]
    if not stream:
        await asyncio.sleep(1.5)
        assert await asyncio.to_thread(engine_busy, service) > 0, "the requests were not under way"
    await asyncio.gather(*left, return_exceptions=stream is False)
    gone = time.monotonic()
    while await asyncio.to_thread(engine_busy, service) > 0:
        assert time.monotonic() - gone < 2.0, "requests of clients that have left still run"
    kv = [(await asyncio.to_thread(service.health))["kv_used"] for _ in range(12)]
    assert max(kv) == 0


@on_the_tiny_model_only
async def test_a_verifier_killed_mid_stream_changes_nothing(
    aclient: openai.AsyncOpenAI, served: Lab, prompt: list[int], settings: Settings, service: Service
) -> None:
    """The stream waits for the next verifier and goes on; best-effort requests do not notice."""
    model = settings.model.name
    sampling: Any = {"temperature": 1.0, "seed": 11}
    long = 64 if model != "tiny" else 1600
    stream = await aclient.completions.create(
        model=model, prompt=prompt, max_tokens=long, stream=True, logprobs=0, **sampling,
        extra_body={"deterministic": True, "return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    tokens: list[int] = []
    logprobs: list[float] = []
    killed = False
    async for chunk in stream:
        choice = chunk.choices[0]
        tokens += (choice.model_extra or {})["token_ids"]
        logprobs += (choice.logprobs and choice.logprobs.token_logprobs) or []
        if not killed:
            killed = True
            ray.kill(ray.get_actor(verifier_name(settings), namespace=NAMESPACE), no_restart=True)
            await asyncio.wait_for(ask(aclient, model, prompt, 4), 10)
    assert len(tokens) == long
    expected = oracle(served, prompt, SamplingParams(**sampling), long)
    assert Answer(tuple(tokens), tuple(logprobs)) == expected
    again, _ = await ask(aclient, model, prompt, 8, deterministic=True, **sampling)
    assert again.tokens == expected.tokens[:8]


@on_the_tiny_model_only
def test_metrics_leave_through_ray(service: Service, client: openai.OpenAI, settings: Settings) -> None:
    """The series are on the node's metrics endpoint, labelled by replica, with what has happened."""
    body: Any = {"deterministic": True, "ignore_eos": True}
    client.completions.create(model=settings.model.name, prompt="Once", max_tokens=200, extra_body=body)
    port = ray.nodes()[0]["MetricsExportPort"]
    wanted = ("llm42_committed_tokens_total", "llm42_rollbacks_total", "llm42_verify_seconds_bucket")
    deadline = time.monotonic() + 25
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as reply:
            lines = reply.read().decode().splitlines()
        ours = [line for line in lines if 'deployment="FastPath"' in line]
        found = {w: [line for line in ours if line.startswith(f"ray_{w}")] for w in wanted}
        if all(found.values()):
            break
        assert time.monotonic() < deadline, f"missing: {[w for w, x in found.items() if not x]}"
        time.sleep(1)
    for series in found.values():
        assert sum(float(x.rsplit(" ", 1)[1]) for x in series) > 0
        assert all('replica="' in x for x in series)


@on_the_tiny_model_only
def test_a_verifier_nobody_asks_ends_itself(service: Service, settings: Settings) -> None:
    """Two actors with a lease of four seconds: the one that is asked for its state lives on."""
    tree = settings.model_dump(mode="json")
    tree["model"]["path"] = "/nonexistent"  # certification is not what this is about
    asked, forgotten = (ray.remote(VerifierActor).remote(tree, 4.0) for _ in range(2))
    ray.get(forgotten.status.remote())
    for _ in range(28):
        status = ray.get(asked.status.remote())
        time.sleep(0.25)
    assert status.state == "failed"
    assert "/nonexistent" in status.detail
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(forgotten.status.remote())
    ray.kill(asked)


@on_the_tiny_model_only
async def test_beyond_the_bound_requests_are_refused(service: Service, settings: Settings) -> None:
    """429 with Retry-After once as many as may wait are waiting in both replicas; the admitted are served."""
    body = {
        "model": settings.model.name,
        "prompt": "Once",
        "max_tokens": settings.model.max_model_len - 100,
        "ignore_eos": True,
        "stream": True,
    }
    release = asyncio.Event()

    async def one(http: httpx.AsyncClient) -> tuple[int, str | None]:
        async with http.stream("POST", f"{service.url}/v1/completions", json=body) as reply:
            if reply.status_code == 200:
                await release.wait()
            return reply.status_code, reply.headers.get("retry-after")

    room = settings.server.max_queued + settings.engine.max_batch
    total = 2 * room + 20
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        tasks = [asyncio.create_task(one(http)) for _ in range(total)]
        done: set[asyncio.Task[tuple[int, str | None]]] = set()
        while len(done) < 5:
            done, _ = await asyncio.wait(tasks, timeout=300, return_when=asyncio.FIRST_COMPLETED)
            assert done, "nothing was refused"
            await asyncio.sleep(0.2)
        states = [await asyncio.to_thread(service.health) for _ in range(12)]
        release.set()
        answers = await asyncio.gather(*tasks)
    refused = [retry for status, retry in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}
    assert all(retry and int(retry) > 0 for retry in refused)
    queued = {s["replica"]: s["queued"] for s in states}
    assert max(queued.values()) <= settings.server.max_queued, "more wait than may"
    assert min(queued.values()) > 0, "one replica refuses while the other one has places"
    # a replica whose queue is full for a moment may refuse what the other one has room for a moment later
    assert len(refused) <= 20 + total // 20, "more was refused than is beyond the bound"


class AcceptsEverything:
    """A verifier that is broken on purpose: it is ready when told so, and accepts every candidate. `request`:
    what a right one's manifest says of the request side."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._ready, self._request = False, request
        self._boxes: Any = None

    async def open(self) -> None:
        self._ready = True

    async def status(self) -> Any:
        from llm42_serve.verifiers.actor import VerifierStatus

        if not self._ready:
            return VerifierStatus("starting")
        return VerifierStatus("ready", "llm42-rogue", request=self._request)

    async def exchange(self, up: Any) -> Any:
        from llm42_serve.verifiers.outboxes import Outboxes

        self._boxes = self._boxes or Outboxes(self)
        return await self._boxes.exchange(up)

    def submit(self, window: Any) -> Any:
        from concurrent.futures import Future

        from llm42.protocol import Commit, TokenLogprob

        logprobs = tuple(TokenLogprob(t, -1.0) for t in (*window.candidates, 0))
        base, count, answer = len(window.tokens), len(window.candidates), Future[Any]()
        answer.set_result(Commit(window.request_id, base, count, 0, logprobs, "llm42-rogue"))
        return answer

    def load(self, request: Any) -> None:
        """Nothing is known of how busy it is."""

    def progressed_s(self, request_id: str) -> float:
        return 0.0

    def release(self, request_id: str) -> None:
        return None


@on_the_tiny_model_only
@pytest.mark.slow
async def test_without_a_real_verifier_the_checks_above_fail(
    service: Service, settings: Settings, prompt: list[int]
) -> None:
    """Negative control, on a second application. While its verifier is not ready: best-effort is served,
    deterministic requests get 503. Once it is, but accepts everything: the copies differ from each other."""
    from ray import serve

    from llm42_serve.app import build

    tree = settings.model_dump(mode="json")
    tree["verifier"]["max_waiting"] = 255  # other settings, other actor names
    tree["server"]["fastpath_replicas"] = 1
    rogue = ray.remote(AcceptsEverything).options(
        name=verifier_name(Settings.load(tree)), namespace=NAMESPACE, lifetime="detached"
    )
    manifest = httpx.get(f"{service.url}/v1/fingerprint", timeout=300).json()["manifest"]
    handle: Any = rogue.remote(manifest["request"])
    ray.get(handle.status.remote())
    await asyncio.to_thread(serve.run, build(tree), name="rogue", route_prefix="/rogue")
    client = openai.AsyncOpenAI(
        base_url=f"http://{urlsplit(service.url).netloc}/rogue/v1",
        api_key="none",
        max_retries=0,
        timeout=WAIT_S,
    )
    model = settings.model.name
    await ask(client, model, prompt, 4)
    with pytest.raises(openai.InternalServerError) as refused:
        await ask(client, model, prompt, 4, deterministic=True)
    assert refused.value.status_code == 503
    assert "retry-after" in refused.value.response.headers
    ray.get(handle.open.remote())
    for _ in range(int(WAIT_S / 0.2)):
        if json.loads((await client.get("/../health", cast_to=httpx.Response)).text)["deterministic"]:
            break
        await asyncio.sleep(0.2)
    distinct, _ = await copies(client, model, prompt, 8, deterministic=True, temperature=0.0)
    assert len(distinct) > 1, (
        "a broken verifier must make the copies differ, else the test above proves nothing"
    )
    await client.close()
    await asyncio.to_thread(serve.delete, "rogue")
    ray.kill(handle)
    assert APP_NAME in serve.status().applications
