"""The test plant around an engine: what it makes wrong, what it leaves alone, and that it is there when asked
for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import Settings
from llm42.engine.build import build_engine
from llm42.engine.corrupt import CorruptingEngine
from llm42.protocol import Request
from tests.unit.fake_vllm import Client, FakeLLM, Make, Scene, continuation, request_of


def submit(scene: Scene, share: float, request: Request, limit: int = 100) -> Client:
    """Starts a request through the plant around the scene's engine."""
    client = scene.clients[request.request_id] = Client()
    CorruptingEngine(scene.engine, share).submit(request, client, limit)
    scene.do()
    return client


def wrong_at(client: Client, request: Request) -> list[int]:
    right = continuation(request.prompt, len(client.tokens))
    return [i for i, (a, b) in enumerate(zip(client.tokens, right, strict=True)) if a != b]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_candidates_of_deterministic_requests_only(make: Make, share: float) -> None:
    scene, request = make(), request_of("d")
    best = request_of("b", deterministic=False, max_tokens=100)
    client, other = submit(scene, share, request), submit(scene, share, best)
    scene.steps(110)
    assert len(client.tokens) == 100
    count = len(wrong_at(client, request))
    assert count == {0.0: 0, 1.0: 100}.get(share, count)
    assert 15 < count < 45 or share != 0.3
    assert other.tokens == continuation(best.prompt, 100)


def test_the_same_ones_whatever_the_pieces_and_rollbacks_are(make: Make) -> None:
    request = request_of("d")
    together, rolled_back = make(FakeLLM(lag=3)), make()
    first, second = submit(together, 0.3, request), submit(rolled_back, 0.3, request)
    together.steps(110)
    rolled_back.steps(60)
    known = continuation(request.prompt, 40)
    again = [i for i in wrong_at(second, request) if i >= 40]
    rolled_back.roll_back("d", known, 100)
    rolled_back.steps(70)
    assert second.epoch == 1
    found = wrong_at(second, request)
    assert found == [i for i in wrong_at(first, request) if i >= 40]
    assert again
    assert set(again) <= set(found)
    other = submit(rolled_back, 0.3, request_of("another"))
    rolled_back.steps(110)
    assert wrong_at(other, request_of("another")) != wrong_at(first, request)


def test_end_tokens_are_left_alone(make: Make) -> None:
    """The engine waits after one, and the session for a verdict on it."""
    end = continuation(request_of("d").prompt, 6)[5]
    scene, request = make(), request_of("d", stop_token_ids=(end,))
    client = submit(scene, 1.0, request, 40)
    scene.steps(60)
    assert client.tokens[-1] == end
    assert wrong_at(client, request) == [0, 1, 2, 3, 4]
    scene.roll_back("d", [*continuation(request.prompt, 5), 17], 40)
    scene.steps(60)
    assert len(client.tokens) == 40, "a rollback goes on"


def test_the_rest_is_the_engines_own(make: Make) -> None:
    scene = make()
    engine = CorruptingEngine(scene.engine, 1.0)
    client = submit(scene, 1.0, request_of("d"), 5)
    scene.steps(10)
    engine.extend("d", 9)
    scene.steps(10)
    assert (len(client.tokens), engine.load(), engine.alive) == (9, scene.engine.load(), True)
    engine.abort("d")
    scene.do()
    assert scene.idle
    engine.close()
    assert not engine.alive


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_it_is_built_when_the_setting_asks_for_it(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    class Engine:
        extend = rollback = abort = load = close = None

        def __init__(self, *_: Any) -> None:
            pass

        def start(self) -> Engine:
            return self

    monkeypatch.setattr("llm42.engine.torch.engine.TorchEngine", Engine)
    settings = Settings.load({"engine": {"corrupt_share": share}})
    made: Any = build_engine(settings, SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(made, CorruptingEngine) == bool(share)
    assert isinstance(made.engine if share else made, Engine)
