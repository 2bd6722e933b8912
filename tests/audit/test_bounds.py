"""What audits may take of a service: a bounded part of the verifiers' queue, of the fast path, and of a key's
share; and what is counted against audit.max_records."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import llm42.api.audit_routes as audit_api
from llm42.api.audit_routes import LimitedAnswers
from llm42.api.deltas import interleave
from llm42.api.keys import KeyPolicy
from llm42.audit.file import parse_lines
from llm42.audit.remote import BATCH_ANSWERS, _batches
from llm42.audit.replayer import REGENERATIONS, windows_per_call
from llm42.config import ApiKeySettings, Settings
from llm42.errors import LLM42Error
from llm42.protocol import Commit, Delta, Failure, FinishReason, Request, Window
from tests.audit.support import (
    ASK,
    FINGERPRINT,
    MANIFEST,
    audit,
    client,
    post,
)
from tests.support import Lab


def flat(number: int) -> dict[str, Any]:
    return {"fingerprint": FINGERPRINT, "prompt": [5 + number], "output": [7], "sampling": {"seed": "1"}}


def with_audit(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"audit": settings.audit.model_copy(update=changes)})


# ---- the verifiers' queue


@pytest.mark.parametrize(("waiting", "calls", "most"), [(256, 2, 64), (256, 1, 128), (3, 2, 1)])
def test_the_calls_of_an_audit_fill_at_most_half_of_a_queue(waiting: int, calls: int, most: int) -> None:
    assert windows_per_call(waiting, calls) == most


async def test_many_short_answers_leave_room_in_the_verifiers_queue(lab: Lab, settings: Settings) -> None:
    """300 answers of one token are far below batch_tokens, and more windows than a verifier lets wait."""
    async with client(lab, settings) as (http, backend):
        calls: list[int] = []
        verify = backend.verify_cold

        async def counted(windows: Sequence[Window]) -> list[Commit | Failure]:
            calls.append(len(windows))
            return await verify(windows)

        backend.verify_cold = counted  # type: ignore[method-assign]
        found = await audit(http, [flat(i) for i in range(300)])
        assert {r["verdict"] for r in found} <= {"confirmed", "differs"}, "each is computed"
    assert sorted(c for c in calls if c > 1) == [44, 64, 64, 64, 64], "and one window to explain a difference"


@pytest.mark.parametrize(("ingresses", "sent"), [(1, [4, 4, 4]), (2, [2] * 6)])
async def test_an_answer_of_many_windows_is_sent_in_pieces(
    lab: Lab, settings: Settings, ingresses: int, sent: list[int]
) -> None:
    """A queue of 16: half of it, for two calls at a time of each ingress."""
    tree = settings.model_dump(mode="json")
    tree["audit"]["max_window"], tree["verifier"]["max_waiting"] = 1, 16
    tree["server"]["ingress_replicas"] = ingresses
    settings = Settings.load(tree)
    async with client(lab, settings) as (http, backend):
        calls: list[int] = []
        verify = backend.verify_cold

        async def counted(windows: Sequence[Window]) -> list[Commit | Failure]:
            calls.append(len(windows))
            return await verify(windows)

        backend.verify_cold = counted  # type: ignore[method-assign]
        body = ASK | {"receipt": {"output": "tokens"}}
        receipt = (await post(http, "/v1/completions", body))["llm42"]["receipt"]
        (found,) = await audit(http, [receipt])
    assert found["verdict"] == "confirmed"
    assert calls == sent


# ---- records and choices


def exchange(choices: int, **more: Any) -> dict[str, Any]:
    reply = {
        "system_fingerprint": FINGERPRINT,
        "choices": [{"index": i, "text": "x", "finish_reason": "length"} for i in range(choices)],
    }
    return {"request": ASK | {"n": choices} | more, "response": reply}


async def test_answers_count_against_max_records(lab: Lab, settings: Settings) -> None:
    async with client(lab, with_audit(settings, max_records=32)) as (http, _):
        many = {"records": [exchange(16), exchange(16), flat(0)]}
        refused = await post(http, "/v1/audit", many, 400)
        assert "33 answers" in refused["error"]["message"]
        assert "audit.max_records" in refused["error"]["message"]
        assert len(await audit(http, [exchange(16), exchange(16)])) == 32


async def test_a_record_is_planned_once(
    lab: Lab, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each choice: templates and tokenisers take their time."""
    made: list[Any] = []
    plan = audit_api.plan_request

    def counted(body: Any, *more: Any) -> Any:
        made.append(body)
        return plan(body, *more)

    monkeypatch.setattr(audit_api, "plan_request", counted)
    async with client(lab, settings) as (http, _):
        await audit(
            http, [exchange(6), exchange(3, seed=1), exchange(2, top_k=5), exchange(4, model="large")]
        )
    assert [b.n for b in made] == [6, 3, 2, 4]


def test_a_clients_calls_are_small_in_answers_too() -> None:
    lines = [exchange(n) for n in (20, 20, 40, 1, 1)]
    records = parse_lines([json.dumps(x).encode() for x in lines])
    assert BATCH_ANSWERS == 32
    assert [[line for line, _ in batch] for batch in _batches(records)] == [[1], [2], [3], [4, 5]]


# ---- answers that are generated again


@dataclass
class Gated:
    """A backend whose outputs wait for a gate, and that counts how many are under way."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most: int = 0
    total: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.running += 1
        self.total += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            yield Delta((7,), "x", finish_reason=FinishReason.LENGTH, fingerprint=FINGERPRINT)
        finally:
            self.running -= 1

    async def fingerprint(self, agreed: bool = False) -> tuple[str, dict[str, Any]]:
        return FINGERPRINT, MANIFEST

    async def settled(self) -> None:
        """Until everything that can run without the gate has."""
        for _ in range(1000):
            await asyncio.sleep(0)


REQUEST = Request("r", (5,), 1, deterministic=True)


def key(settings: Settings, share: float) -> KeyPolicy:
    made = ApiKeySettings(name="k", sha256="0" * 64, deterministic_share=share)
    return KeyPolicy(made, settings)


def limits_of(concurrency: int) -> tuple[asyncio.Semaphore, asyncio.Semaphore]:
    return asyncio.Semaphore(concurrency), asyncio.Semaphore(concurrency * REGENERATIONS)


async def consume(answers: LimitedAnswers) -> list[Delta]:
    return [delta async for delta in answers.generate(REQUEST)]


async def test_all_audits_of_an_ingress_share_the_places_for_generating_again(settings: Settings) -> None:
    backend, limits = Gated(), limits_of(1)
    audits = [LimitedAnswers(backend, KeyPolicy(None, settings), *limits) for _ in range(5)]  # type: ignore[arg-type]
    tasks = [asyncio.create_task(consume(a)) for a in audits for _ in range(REGENERATIONS)]
    await backend.settled()
    assert backend.running == REGENERATIONS
    backend.gate.set()
    await asyncio.gather(*tasks)
    assert (backend.most, backend.total, backend.running) == (REGENERATIONS, len(tasks), 0)


async def test_generating_again_counts_towards_the_keys_share_and_waits_for_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key may have two outputs under way; one is taken by a request of its own."""
    monkeypatch.setattr(audit_api, "KEY_PAUSE_S", 0.0)
    monkeypatch.setattr(audit_api, "KEY_TRIES", 10**9)
    backend, places = Gated(), settings.engine.max_batch / settings.server.ingress_replicas
    policy = key(settings, 2 / places)
    own = interleave([Gated(backend.gate).generate(REQUEST)], policy.held(1))
    first = asyncio.create_task(anext(own))
    await backend.settled()
    answers = LimitedAnswers(backend, policy, *limits_of(4))  # type: ignore[arg-type]
    tasks = [asyncio.create_task(consume(answers)) for _ in range(6)]
    await backend.settled()
    assert backend.running == 1
    backend.gate.set()
    await first
    await own.aclose()
    await asyncio.gather(*tasks)
    assert (backend.total, backend.running, policy._held) == (6, 0, 0)
    assert backend.most <= 2


async def test_an_audit_over_http_is_counted_so(
    lab: Lab, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[str, int]] = []
    taken = KeyPolicy.held

    def counted(self: KeyPolicy, outputs: int) -> Any:
        held.append((self.name, outputs))
        return taken(self, outputs)

    monkeypatch.setattr(KeyPolicy, "held", counted)
    tree = settings.model_dump(mode="json")
    tree["server"]["api_keys"] = [{"name": "k", "sha256": hashlib.sha256(b"secret").hexdigest()}]
    async with client(lab, Settings.load(tree)) as (http, _):
        http.headers["Authorization"] = "Bearer secret"
        body = ASK | {"receipt": True}
        receipt = (await post(http, "/v1/completions", body))["llm42"]["receipt"]
        held.clear()
        (found,) = await audit(http, [receipt])
    assert (found["verdict"], held) == ("confirmed", [("k", 1)])


async def test_an_audit_that_ends_early_gives_its_places_back(settings: Settings) -> None:
    backend, limits, policy = Gated(), limits_of(1), key(settings, 1.0)
    answers = LimitedAnswers(backend, policy, *limits)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(consume(answers)) for _ in range(2 * REGENERATIONS)]
    await backend.settled()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await backend.settled()
    assert (backend.running, policy._held, limits[1]._value) == (0, 0, REGENERATIONS)


async def test_a_key_without_room_fails_the_record_in_the_end(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_api, "KEY_PAUSE_S", 0.0)
    backend, policy = Gated(), key(settings, 1e-9)
    own = interleave([Gated(backend.gate).generate(REQUEST)], policy.held(1))
    first = asyncio.create_task(anext(own))
    await backend.settled()
    answers = LimitedAnswers(backend, policy, *limits_of(1))  # type: ignore[arg-type]
    with pytest.raises(LLM42Error, match="the key 'k' had no place left"):
        await consume(answers)
    backend.gate.set()
    await first
    await own.aclose()
    assert len(await consume(answers)) == 1
