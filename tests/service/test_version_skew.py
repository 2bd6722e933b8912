"""Parts of one service that are not of one release: no deterministic answer, and the fields that differ.

The real ingress, replica, pool and verifier; only Ray between them is a stand-in.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from llm42.api.app import create_app
from llm42.config import ServerSettings, Settings
from llm42.errors import VersionSkew
from llm42.fingerprint.request import request_facts
from llm42.fingerprint.skew import require_agreement
from llm42.protocol import Commit, Delta, FinishReason, Request, SamplingParams, Window
from llm42.telemetry.metrics import Metrics
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.build import build_verifier
from llm42.verifier.scheduler import Verifier
from llm42_serve.ingress.failover import Failover, ReplicaLost
from llm42_serve.ingress.ingress import RayBackend
from llm42_serve.replica import fastpath
from llm42_serve.replica.fastpath import FastPath, admission_for
from llm42_serve.replica.member import Member
from llm42_serve.replica.verifier_pool import VerifierPool
from llm42_serve.verifiers.actor import VerifierStatus
from llm42_serve.verifiers.outboxes import Outboxes
from tests.service.stand_ins import Call
from tests.support import Lab, request_of

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "deterministic": True}


class Replica(FastPath):
    """Assembled by a test, which ends the parts."""

    def __init__(self) -> None:
        self._metrics = Metrics()

    def __del__(self) -> None:
        pass


class Remote:
    """A deployment's handle: what it is given goes through pickle, as between processes."""

    def __init__(self, *replicas: FastPath, name: str = "", stream: bool = False) -> None:
        self.replicas, self.name, self.stream, self.calls = replicas, name, stream, 0

    def options(self, method_name: str, stream: bool = False) -> Remote:
        return Remote(*self.replicas, name=method_name, stream=stream)

    def remote(self, *args: Any) -> Any:
        replica = self.replicas[min(self.calls, len(self.replicas) - 1)]
        self.calls += 1
        found = getattr(replica, self.name)(*pickle.loads(pickle.dumps(args)))
        return Stream(found) if self.stream else found


class Stream:
    """What a streaming call answers."""

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def cancel(self) -> None:
        self._ended = asyncio.ensure_future(self._items.aclose())


@dataclass
class World:
    """One release's model, verifier and replica."""

    settings: Settings
    tokenizer: Tokenizer
    verifier: Verifier
    lab: Lab

    def replica(self) -> FastPath:
        """A replica whose engine and verifier run in this process."""
        made: Any = Replica()
        made._settings, made._replica, made._served = self.settings, "replica", 0
        made._admission = admission_for(self.settings)
        made._pool = pool = VerifierPool(self.settings, Metrics())
        handle = SimpleNamespace(
            exchange=Call(Outboxes(self.verifier).exchange),
            verify_cold=Call(lambda windows: self.verifier.verify(windows, cold=True)),
            manifest=Call(lambda: dict(self.verifier.manifest)),
        )
        facts = self.verifier.manifest["request"]
        status = VerifierStatus("ready", self.verifier.fingerprint, request=facts)
        pool.members, pool.fingerprint = [Member("verifier-0", "0", handle, status)], status.fingerprint
        made._generator = self.lab.generator(self.lab.engine(), pool)
        made._engine = made._generator.engine
        made._facts = request_facts(self.settings, self.tokenizer)
        found: FastPath = made
        return found

    @asynccontextmanager
    async def ingress(
        self, *replicas: FastPath, settings: Settings | None = None, **facts: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A client of an ingress with other settings, or with other facts, than the replica's."""
        settings = settings or self.settings
        tokenizer = Tokenizer.load(settings.model.path)
        own = request_facts(settings, tokenizer) | facts
        remote: Any = Remote(*(replicas or [self.replica()]))
        backend = RayBackend(remote, own, settings.server, Metrics())
        transport = httpx.ASGITransport(create_app(settings, tokenizer, backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as http:
            yield http


@pytest.fixture(scope="module")
def model(tiny: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = Path(shutil.copytree(tiny.settings.model.path, tmp_path_factory.mktemp("skew") / "model"))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture
def world(lab: Lab, model: Path) -> World:
    settings, tokenizer = with_model(lab.settings, path=str(model), max_model_len=256), Tokenizer.load(model)
    verifier = build_verifier(settings, lab.model, tokenizer, lab.certificate).start()
    lab.parts.append(verifier)
    return World(settings, tokenizer, verifier, lab)


def with_model(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"model": settings.model.model_copy(update=changes)})


def refused(reply: httpx.Response, *fields: str) -> str:
    """The message of a 503 that names these fields."""
    assert reply.status_code == 503, reply.text
    assert reply.headers["Retry-After"]
    error = reply.json()["error"]
    assert error["code"] == "version_skew"
    assert error["type"] == "service_unavailable_error"
    assert all(f"{field} (" in error["message"] for field in fields), error["message"]
    return str(error["message"])


async def test_one_release_answers(world: World) -> None:
    """The control of all that follows."""
    async with world.ingress() as http:
        reply = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5})
        assert reply.status_code == 200, reply.text
        assert reply.json()["system_fingerprint"] == world.verifier.fingerprint
        health = (await http.get("/health")).json()
        assert (health["deterministic"], health["skew"]) == (True, False)


async def test_health_says_which_rollbacks_the_engine_expects(world: World) -> None:
    replica: Any = world.replica()
    async with world.ingress(replica) as http:
        assert (await http.get("/health")).json()["rollbacks_expected"] == ""
        replica._engine.facts = {"rollbacks_expected": "not measured"}
        assert (await http.get("/health")).json()["rollbacks_expected"] == "not measured"


async def test_an_ingress_with_another_context(world: World) -> None:
    """Chat without max_tokens fills the context: 128 and 256 would be two answers of one fingerprint."""
    other = with_model(world.settings, max_model_len=128)
    async with world.ingress(settings=other) as http:
        reply = await http.post("/v1/chat/completions", json=CHAT)
        assert "max_model_len (128, verifiers 256)" in refused(reply)
        refused(await http.post("/v1/chat/completions", json=CHAT | {"stream": True}), "max_model_len")
        best_effort = CHAT | {"deterministic": False, "max_tokens": 5}
        assert (await http.post("/v1/chat/completions", json=best_effort)).status_code == 200


async def test_without_the_comparison_one_fingerprint_had_two_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what the refusal prevents."""
    monkeypatch.setattr(fastpath, "require_agreement", lambda *_: None)
    seen = []
    for length in (48, 64):
        body = CHAT | {"ignore_eos": True}
        async with world.ingress(settings=with_model(world.settings, max_model_len=length)) as http:
            reply = (await http.post("/v1/chat/completions", json=body)).json()
            seen.append((reply["system_fingerprint"], reply["usage"]["completion_tokens"]))
    assert seen[0][0] == seen[1][0] == world.verifier.fingerprint
    assert seen[0][1] != seen[1][1]


@pytest.mark.parametrize("field", ["code", "python", "unicode", "tokenizer", "end_of_text"])
async def test_an_ingress_with_another_fact(world: World, field: str) -> None:
    async with world.ingress(**{field: "another"}) as http:
        refused(await http.post("/v1/completions", json=COMPLETION), field)
        assert (await http.post("/v1/completions", json=BEST_EFFORT)).status_code == 200


COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "deterministic": True}
BEST_EFFORT = COMPLETION | {"deterministic": False}


async def test_a_replica_with_another_fact(world: World) -> None:
    """It judges ends and makes text: its half counts as much as the ingress's."""
    replica: Any = world.replica()
    replica._facts = replica._facts | {"end_of_text": [3]}
    async with world.ingress(replica) as http:
        said = refused(await http.post("/v1/completions", json=COMPLETION), "end_of_text")
        assert "the replica differs" in said
        assert (await http.post("/v1/completions", json=BEST_EFFORT)).status_code == 200


@pytest.mark.parametrize("facts", [None, "a tokenizer's identity, as an older release sends it"])
async def test_whoever_does_not_say_who_he_is_is_refused(world: World, facts: Any) -> None:
    async for item in world.replica().generate(request_of("r", 1, max_tokens=3), facts):
        assert isinstance(item, VersionSkew)
        assert "the ingress is of another release" in str(item)
    deltas = [
        d async for d in world.replica().generate(request_of("b", 1, max_tokens=3, deterministic=False))
    ]
    assert isinstance(deltas[-1], Delta)


async def test_verifiers_of_another_release_answer_nothing(world: World) -> None:
    replica: Any = world.replica()
    replica._pool.members[0].status = VerifierStatus("ready", world.verifier.fingerprint)
    async with world.ingress(replica) as http:
        refused(await http.post("/v1/completions", json=COMPLETION))


async def test_health_says_so(world: World) -> None:
    async with world.ingress(chat_template="another") as http:
        reply = await http.get("/health")
        assert reply.status_code == 200, "best effort goes on"
        told = reply.json()
        assert (told["status"], told["deterministic"]) == ("best_effort_only", False)
        assert "chat_template" in told["detail"]


async def test_audits_are_refused_too(world: World) -> None:
    """They plan a stored question anew: with other defaults, a true answer would be called false."""
    async with world.ingress() as http:
        reply = (await http.post("/v1/completions", json=COMPLETION | {"return_token_ids": True})).json()
        records = {"records": [{"request": COMPLETION, "response": reply}]}
        audited = (await http.post("/v1/audit", json=records)).json()
        assert audited["summary"]["confirmed"] == 1, "the control"
    async with world.ingress(chat_template="another") as http:
        refused(await http.post("/v1/audit", json=records), "chat_template")
        shown = (await http.get("/v1/fingerprint")).json()
        assert shown["manifest"]["request"] == world.verifier.manifest["request"], "it is still shown"


async def test_a_cold_verification_compares_by_itself(world: World) -> None:
    """Between an audit's first look and its windows, another replica may have taken over."""
    replica: Any = world.replica()
    window = Window("w", (5, 6), 2, (7,), SamplingParams())
    refusal = await replica.verify_cold([window], replica._facts | {"code": "another"})
    assert isinstance(refusal, VersionSkew)
    (answer,) = await replica.verify_cold([window], replica._facts)
    assert isinstance(answer, Commit), "the control"


async def test_verifiers_that_take_over_after_the_comparison(world: World) -> None:
    """What was compared is one fingerprint's manifest: no token of another one leaves."""
    replica: Any = world.replica()
    status = replica._pool.members[0].status
    replica._pool.members[0].status = replace(status, fingerprint="llm42-before")
    async with world.ingress(replica) as http:
        reply = await http.post("/v1/completions", json=COMPLETION)
        assert reply.status_code == 503
        assert "another fingerprint" in reply.json()["error"]["message"]


async def test_a_replica_of_the_ingress_s_release_is_found(world: World) -> None:
    """While a release is rolled out, replicas of both are there."""
    old: Any = world.replica()
    old._facts = old._facts | {"code": "older"}
    async with world.ingress(old, world.replica()) as http:
        reply = await http.post("/v1/completions", json=COMPLETION)
        assert reply.status_code == 200, reply.text


async def test_a_stream_does_not_go_on_with_another_release(world: World) -> None:
    """Its replica is lost, and those that are left are of another release."""
    replica: Any = world.replica()
    replica._facts = replica._facts | {"code": "newer"}
    state = Failover(request_of("r", 1, max_tokens=4), ServerSettings(failover_s=0.3))
    facts, sent = world.verifier.manifest["request"], list[int]()

    async def attempt(request: Request) -> AsyncGenerator[Delta, None]:
        if state.attempts == 1:
            yield Delta((5,), "x", fingerprint=world.verifier.fingerprint)
            raise ReplicaLost("gone")
        async for item in replica.generate(request, facts, True):
            if isinstance(item, Exception):
                raise item
            yield item

    async def run() -> None:
        async for delta in state.run(lambda r: aclosing(attempt(r))):
            sent.extend(delta.token_ids)
            assert delta.finish_reason in (None, FinishReason.LENGTH)

    with pytest.raises(VersionSkew, match="the replica differs"):
        await run()
    assert sent == [5]


OTHER_PROCESS = """
import json, pickle, sys
from pathlib import Path
from llm42.api.audit_routes import request_maker
from llm42.config import Settings
from llm42.fingerprint.request import request_facts
from llm42.text.tokenizer import Tokenizer

tree, body, elsewhere, libraries = json.loads(sys.argv[1])
found = {}
for name in ("same", "context", "template", "library"):
    changed = {"context": {"max_model_len": 128}, "template": {"path": elsewhere}}.get(name, {})
    settings = Settings.load(tree | {"model": tree["model"] | changed})
    if name == "library":
        sys.path.insert(0, libraries)
    tokenizer = Tokenizer.load(settings.model.path)
    found[name] = request_maker(settings, tokenizer)(body)[0], request_facts(settings, tokenizer)
sys.stdout.buffer.write(pickle.dumps(found))
"""


async def test_a_process_of_another_release(world: World, tmp_path: Path) -> None:
    """Requests that another process has planned: as this one would; with half the context; with an edited
    chat template; beside another version of Jinja."""
    elsewhere = Path(shutil.copytree(world.settings.model.path, tmp_path / "model"))
    (elsewhere / "chat_template.jinja").write_text(TEMPLATE.replace(": ", " says "))
    metadata = tmp_path / "libraries" / "jinja2-99.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: Jinja2\nVersion: 99.1\n")
    given = (world.settings.model_dump(mode="json"), CHAT, str(elsewhere), str(metadata.parents[1]))
    told = await asyncio.to_thread(
        subprocess.check_output, [sys.executable, "-c", OTHER_PROCESS, json.dumps(given)]
    )
    found: dict[str, tuple[Request, dict[str, Any]]] = pickle.loads(told)
    replica = world.replica()

    async def asked(name: str) -> list[Any]:
        request, facts = found[name]
        return [item async for item in replica.generate(replace(request, max_tokens=4), facts)]

    assert isinstance((await asked("same"))[-1], Delta), "the control"
    for name, field in (
        ("context", "max_model_len (128, verifiers 256)"),
        ("template", "chat_template ("),
        ("library", "libraries.jinja2 (99.1, verifiers "),
    ):
        (error,) = await asked(name)
        assert isinstance(error, VersionSkew)
        assert field in str(error)
    assert found["context"][0].max_tokens != found["same"][0].max_tokens
    assert found["template"][0].prompt != found["same"][0].prompt


def test_the_message_is_short_and_pickles() -> None:
    fields = {f"field{n}": "x" * 1000 for n in range(3)}
    with pytest.raises(VersionSkew) as caught:
        require_agreement(fields | {"field1": "y"}, {"ingress": fields})
    assert "field1" in str(caught.value)
    assert "field0" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
