"""How near a fast path's bits are to the verifier's: how many rollbacks to expect, and under which load.

The fast path's own outputs go through the verifier with every token before a position as the fast
path had it (teacher forcing). A *mismatch* is a position where the verifier would have chosen another token:
each costs a rollback. The share of equal log-probabilities moves long before mismatches vanish, so it says
which way a change of kernels leads.

What else is in a step can change the bits of the fast path, so it is measured under two loads
(affinity_loads.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llm42.config import Settings
from llm42.engine.torch.engine import TorchEngine
from llm42.errors import VerificationFailed
from llm42.local.affinity_loads import Load, answers, loads_of
from llm42.local.affinity_trace import OperatorDifference, first_difference
from llm42.local.assembly import Local, Progress, require_fast_path, verified
from llm42.protocol import Failure, SamplingParams, Window
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cpu import cpu_operators

EQUAL = 1e-5
"""Log-probabilities this near are equal: sums over the vocabulary in another order differ by less."""
TRACED_TOKENS = 24
WINDOWS_AT_ONCE = 64


@dataclass(slots=True)
class Comparison:
    """What the verifier says to the outputs."""

    tokens: int = 0
    mismatches: int = 0
    equal: int = 0
    """Positions without mismatch whose log-probabilities agree to EQUAL."""

    @property
    def mismatches_per_1000(self) -> float:
        """Mismatches per 1,000 output tokens."""
        return 1000 * self.mismatches / max(1, self.tokens)

    @property
    def equal_share(self) -> float:
        """Share of output tokens with equal log-probabilities."""
        return self.equal / max(1, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, with the two figures."""
        figures = {"mismatches_per_1000": self.mismatches_per_1000, "equal_share": self.equal_share}
        return asdict(self) | figures


@dataclass(slots=True)
class AffinityReport:
    """Outcome of `llm42 affinity`."""

    engine: str
    fingerprint: str
    loads: list[tuple[Load, Comparison]]
    operator: OperatorDifference | None = None
    note: str = ""
    """Why no operator is named."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        found = asdict(self)
        loads = [
            {"load": load.kind, "concurrent": load.concurrent, "requests": load.requests} | seen.to_json()
            for load, seen in self.loads
        ]
        return found | {"loads": loads}


async def compare_outputs(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    sampling: SamplingParams | None = None,
) -> Comparison:
    """Teacher forcing through a started verifier. Raises VerificationFailed where it cannot answer."""
    params, found = sampling or SamplingParams(), Comparison(tokens=sum(map(len, outputs)))
    # zip by the outputs: a probe may have answered the first prompts only
    waiting = [(i, 0) for i, output in enumerate(outputs) if output]
    while waiting:
        part, waiting = waiting[:WINDOWS_AT_ONCE], waiting[WINDOWS_AT_ONCE:]
        windows = [_window(i, begin, prompts[i], outputs[i], params) for i, begin in part]
        for (i, begin), answer in zip(part, await verifier.verify(windows), strict=True):
            if isinstance(answer, Failure):
                raise VerificationFailed(answer.message)
            theirs = logprobs[i][begin : begin + answer.accepted]
            ours = [x.logprob for x in answer.logprobs[: answer.accepted]]
            found.equal += sum(abs(a - b) <= EQUAL for a, b in zip(ours, theirs, strict=True))
            end = begin + answer.accepted
            if end < len(outputs[i]):
                found.mismatches += 1
                end += 1  # go on after the fast path's own token
            if end < len(outputs[i]):
                waiting.append((i, end))
            else:
                verifier.release(f"compare-{i}")
    return found


def _window(
    index: int, begin: int, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams
) -> Window:
    tokens = (*prompt, *output[:begin])
    return Window(f"compare-{index}", tokens, len(prompt), tuple(output[begin:]), sampling)


def measure_affinity(
    settings: Settings,
    requests: int | None = None,
    max_tokens: int = 128,
    concurrent: Sequence[int] = (),
    progress: Progress = lambda _: None,
) -> AffinityReport:
    """Runs the configured fast path under each load, compares its outputs with the verifier's, and operators
    where this process can see them. requests: of a load; None: twice what it has at a time. concurrent: how
    many at a time; none: what suits the device. Raises LLM42Error."""
    require_fast_path(settings)
    settings = verified(settings)  # or a verifier might be compared with itself
    loads = loads_of(settings, concurrent, requests)
    with Local(settings, progress=progress) as local:
        report = AffinityReport(settings.engine.kind, local.verifier.fingerprint, [])
        for load in loads:
            progress(f"Generating: {load.kind}, {load.concurrent} at a time")
            prompts = load.prompts(local.tokenizer, settings.model.max_model_len - max_tokens)
            outputs = asyncio.run(answers(local, load, prompts, max_tokens))
            progress(f"Comparing: {load.kind}, {load.concurrent} at a time")
            tokens, logprobs = [o.tokens for o in outputs], [o.logprobs for o in outputs]
            found = asyncio.run(compare_outputs(local.verifier, prompts, tokens, logprobs))
            report.loads.append((load, found))
            if load is loads[0]:
                begin = len(prompts[0])
                sequence = (*prompts[0], *tokens[0])[: begin + TRACED_TOKENS]
        engine = local.engine
        if not isinstance(engine, TorchEngine) or settings.model.device != "cpu":
            report.note = "operators are compared where both sides run in this process on CPU"
            return report
        progress("Comparing operators")
        parts = settings, engine.model, cpu_operators(), local.verifier.manifest
        report.operator = first_difference(*parts, sequence, begin, loads[0].concurrent)
        if report.operator is None:
            report.note = f"no operator differs over {len(sequence)} tokens"
        return report
