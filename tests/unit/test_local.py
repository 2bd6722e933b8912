"""A whole LLM-42 in one process: its parts as asked for, and nothing left of one that could not be made."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest

from llm42.config import Settings
from llm42.errors import LLM42Error, VerifierUnavailable
from llm42.local import affinity, assembly, demo
from llm42.local.affinity import measure_affinity
from llm42.local.assembly import Local
from llm42.local.demo import run_demo
from llm42.protocol import Commit
from llm42.telemetry.tracing import Tracer
from llm42.verifier.scheduler import Verifier
from tests.support import Lab, collect, request_of, window_of


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been closed, in order."""
    found: list[str] = []

    def noting(name: str, close: Any) -> Any:
        def run(*arguments: Any) -> None:
            found.append(name)
            close(*arguments)

        return run

    monkeypatch.setattr(Verifier, "close", noting("verifier", Verifier.close))
    monkeypatch.setattr(Tracer, "close", noting("tracer", Tracer.close))
    return found


def test_both_parts(tiny: Lab, closed: list[str]) -> None:
    steps: list[str] = []
    with Local(tiny.settings, progress=steps.append) as local:
        answer = asyncio.run(collect(local, request_of("r", 1, max_tokens=8)))
        alive = local.verifier.alive, local.engine.alive
    assert len(answer.tokens) == 8
    assert [step for step in steps if ":" not in step] == ["Loading the model", "Certifying"]
    assert (alive, local.verifier.alive, local.engine.alive) == ((True, True), False, False)
    assert closed == ["verifier", "tracer"]


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("command", [measure_affinity, run_demo])
def test_what_is_about_the_fast_path_pins_verify(
    tiny: Lab, command: Any, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `llm42 affinity` might hold a verifier against itself, and `make demo` show no windows. Planted:
    the settings stay, the control."""
    found = list[str]()

    def local(settings: Settings, **_: Any) -> NoReturn:
        found.append(settings.session.mode)
        raise LLM42Error("seen")

    for module in (affinity, demo):
        monkeypatch.setattr(module, "Local", local)
        if planted:
            monkeypatch.setattr(module, "verified", lambda settings: settings)
    session = tiny.settings.session.model_copy(update={"mode": "auto"})
    with pytest.raises(LLM42Error, match="seen"):
        command(tiny.settings.model_copy(update={"session": session}))
    assert found == ["auto" if planted else "verify"]


def test_a_verifier_alone(tiny: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "build_engine", None)
    with Local(tiny.settings, engine=False) as local:
        (commit,) = asyncio.run(local.verify_cold([window_of(request_of("r", 1), [])]))
        name, manifest = asyncio.run(local.fingerprint(agreed=True))
    assert isinstance(commit, Commit)
    assert (commit.fingerprint, manifest) == (name, local.verifier.manifest)


def test_an_engine_alone(tiny: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "build_verifier", None)
    with Local(tiny.settings, verifier=False) as local, pytest.raises(VerifierUnavailable):
        asyncio.run(collect(local, request_of("r", 1)))


@pytest.mark.parametrize("part", ["load_for", "certificate_for", "build_engine"])
def test_nothing_is_left_of_what_could_not_be_made(
    part: str, tiny: Lab, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise LLM42Error("planted")

    monkeypatch.setattr(assembly, part, fail)
    with pytest.raises(LLM42Error, match="planted"):
        Local(tiny.settings)
    assert closed == (["verifier", "tracer"] if part == "build_engine" else ["tracer"])
