"""What verifiers and their supervisor say in the log while nothing is wrong, and when something is."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.checkpoint import load
from llm42.config import Settings, TelemetrySettings
from llm42.telemetry.logs import LOGGERS, configure
from llm42.verifier import build
from llm42.verifier.jobs import VerifierStats
from llm42_serve.verifiers import actor as verifier_actor
from llm42_serve.verifiers import supervisor
from llm42_serve.verifiers.actor import VerifierActor
from tests.service.stand_ins import Cluster, started
from tests.support import until


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Where the actors' JSON lines go; the loggers are put back afterwards."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(x.handlers, x.level) for x in loggers]
    stream = io.StringIO()

    def captured(settings: TelemetrySettings, component: str) -> None:
        configure(settings.model_copy(update={"log_format": "json"}), component, stream)

    for module in (supervisor, verifier_actor):
        monkeypatch.setattr(module, "configure", captured)
    yield stream
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_a_verifier_says_when_it_starts_has_certified_and_is_ready(
    monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    usual = {"alive": True, "stalled_s": 0.0, "stats": VerifierStats, "forget_idle": lambda _: None}
    verifier = SimpleNamespace(fingerprint="llm42-a", start=lambda: verifier, **usual)
    monkeypatch.setattr(load, "load_for", lambda _: ("model", "tokenizer"))
    monkeypatch.setattr(build, "certificate_for", lambda *_, **__: SimpleNamespace(cached=True))
    monkeypatch.setattr(build, "build_verifier", lambda *_: verifier)
    actor = VerifierActor(Settings().model_dump(mode="json"))
    await until(lambda: "verifier is ready" in lines.getvalue())
    for task in actor._tasks:
        task.cancel()
    found = read(lines)
    assert [x["message"] for x in found] == ["verifier starts", "verifier has certified", "verifier is ready"]
    assert {x["level"] for x in found} == {"info"}
    assert {x["component"] for x in found} == {"verifier"}
    assert found[1]["seconds"] >= 0
    assert found[1]["kept"] is True
    assert found[2]["fingerprint"] == "llm42-a"


async def test_a_supervisor_says_what_becomes_of_its_verifiers(
    monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    cluster = Cluster(monkeypatch)
    made = await started(cluster, verifiers=1)
    watched = made._watched[0]
    watched.handle.dead = True
    await until(lambda: cluster.created == 2 and watched.status is not None)
    watched.handle.state = "starting"
    await until(lambda: watched.status is not None and watched.status.state == "starting")
    await made.condemn(watched.name, watched.actor_id, "it was wrong")
    made._task.cancel()
    found = read(lines)
    assert found[0]["message"] == "supervisor starts"
    assert found[0]["verifiers"] == [watched.name]
    told = [x["message"].replace(watched.name, "V").partition(":")[0] for x in found[1:]]
    assert told == [
        "verifier adopted or created", "verifier is ready", "V has died and is created again",
        "verifier adopted or created", "verifier is ready", "verifier is starting", "V is condemned",
    ]  # fmt: skip
    assert found[2]["fingerprint"] == "a"
    assert found[2]["verifier"] == watched.name
