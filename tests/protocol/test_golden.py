"""Known answers and cold windows: what tells a verifier that has changed from one that has not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llm42 import fingerprint as fp
from llm42.host.threads import torch_threads
from llm42.protocol import Commit
from llm42.verifier.build import build_verifier
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.known_answers import golden_answers, golden_answers_now
from llm42.verifier.scheduler import Verifier
from tests.support import Lab, answer_of, check_pool, request_of, window_of


def off_by_one_ulp(verifier: Verifier) -> None:
    """One operator of the running verifier gives another last bit, the same for every row."""
    runner: Any = verifier._runner
    assert isinstance(runner, CPURunner)
    right = runner.ops.rms_norm

    def wrong(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, r = right(x, residual, weight, eps)
        y[..., 0] = torch.nextafter(y[..., 0], torch.tensor(float("inf"), dtype=y.dtype))
        return y, r

    runner.ops = replace(runner.ops, rms_norm=wrong)


def test_the_fingerprint_names_the_known_answers(lab: Lab) -> None:
    verifier = build_verifier(lab.settings, lab.model, lab.tokenizer, lab.certificate)
    again = build_verifier(lab.settings, lab.model, lab.tokenizer, lab.certificate)
    assert verifier.fingerprint == again.fingerprint == fp.fingerprint(verifier.manifest)
    off_by_one_ulp(again)
    with torch_threads(1):
        other = golden_answers_now(again).digest
    assert other != verifier.manifest["golden"]
    assert fp.fingerprint({**verifier.manifest, "golden": other}) != verifier.fingerprint


def test_a_running_verifier_is_tested_beside_its_work(lab: Lab) -> None:
    with torch_threads(1):
        verifier = lab.verifier()
        want = golden_answers_now(verifier).digest
    verifier.start()

    async def both() -> str:
        windows = [window_of(request_of(f"w{i}", i, length=30), []) for i in range(12)]
        answers, golden = await asyncio.gather(verifier.verify(windows), golden_answers(verifier))
        assert all(isinstance(a, Commit) for a in answers)
        return golden

    assert asyncio.run(both()) == want
    off_by_one_ulp(verifier)
    assert asyncio.run(golden_answers(verifier)) != want


def test_a_cold_window_takes_nothing_from_the_cache_and_leaves_nothing(lab: Lab) -> None:
    """The cache is poisoned: a warm window repeats its error, a cold one does not see it."""
    request = request_of("cold", 3, length=60)
    with torch_threads(1):
        verifier = lab.verifier()
        first = answer_of(verifier, window_of(request, []))
        verifier.release("cold")
        held = verifier.stats()
        blocks = [b for b, key in enumerate(verifier._pool._keys) if key is not None]
        assert blocks
        verifier._runner.kv.fill(blocks, 0.5)  # type: ignore[attr-defined]
        cold_future = verifier.submit(replace(window_of(request, []), request_id="audit"), cold=True)
        while not cold_future.done():
            verifier.step()
        cold = cold_future.result()
        warm = answer_of(verifier, replace(window_of(request, []), request_id="warm"))
    assert isinstance(cold, Commit)
    assert (cold.next_token, cold.logprobs) == (first.next_token, first.logprobs)
    assert cold.timings.cached_rows == 0
    assert warm.logprobs != first.logprobs, "the control: the poison is there to be found"
    after = verifier.stats()
    assert after.kv_cached_blocks <= held.kv_cached_blocks
    check_pool(verifier._pool)


def test_an_audit_of_a_request_in_progress_does_not_disturb_it(lab: Lab) -> None:
    """A cold window under the id of a request whose KV is held between its windows."""
    request = request_of("both", 4, length=40)
    want = lab.oracle(request).tokens
    with torch_threads(1):
        verifier = lab.verifier()
        answer_of(verifier, window_of(request, []))
        kept = verifier.stats().idle_sequences
        future = verifier.submit(window_of(request, []), cold=True)
        while not future.done():
            verifier.step()
        assert verifier.stats().idle_sequences == kept == 1
        warm = answer_of(verifier, window_of(request, want[:1], want[1:5]))
    assert warm.accepted == 4
    assert warm.timings.cached_rows > 0
