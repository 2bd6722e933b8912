"""A deterministic request is not starved by a steady stream of best-effort arrivals (in the reference code
its prompt waits for a round without any)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llm42.engine.base import EngineOutput
from llm42.engine.torch.engine import Running, TorchEngine
from llm42.host.threads import torch_threads
from tests.support import Lab, request_of

ROUNDS = 120


def rounds_until_the_first_candidate(engine: TorchEngine) -> int | None:
    """Two best-effort requests arrive in each round, more than the batch can hold; after ten rounds a
    deterministic one. In how many rounds it has its first candidate; None: not in ROUNDS."""
    got: list[EngineOutput] = []
    ignore: Callable[[EngineOutput], None] = lambda output: None  # noqa: E731
    for number in range(ROUNDS):
        for i in range(2):
            name = f"best-{number}-{i}"
            best = replace(request_of(name, i, length=12, max_tokens=4), deterministic=False)
            engine.submit(best, ignore, best.max_tokens)
        if number == 10:
            engine.submit(request_of("det", 9, length=40), got.append, 16)
        engine.step()
        # most of those who wait give up: the queue in front of any request stays short
        for running in [r for r in engine._waiting if not r.request.deterministic][8:]:
            engine.abort(running.request.request_id)
        if got:
            return number - 10
    return None


class PrefersBestEffort(TorchEngine):
    """Admits a deterministic request only when no other one waits."""

    def _wait(self, running: Running, last: bool) -> None:
        super()._wait(running, last)
        self._waiting.sort(key=lambda r: r.request.deterministic)


def test_a_steady_stream_of_others_does_not_starve_a_deterministic_request(lab: Lab) -> None:
    engine = lab.engine(start=False, max_batch=4, prefill_chunk=16)
    with torch_threads(1):
        rounds = rounds_until_the_first_candidate(engine)
    assert rounds is not None
    assert rounds <= 40


def test_control_a_starved_request_is_noticed(lab: Lab) -> None:
    settings = lab.settings.engine.model_copy(update={"max_batch": 4, "prefill_chunk": 16})
    with torch_threads(1):
        assert rounds_until_the_first_candidate(PrefersBestEffort(lab.model, settings)) is None
