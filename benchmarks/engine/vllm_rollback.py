"""How long a rollback takes in vLLM: from a mismatch to the first new candidate.

    python -m benchmarks.engine.vllm_rollback [--model 8b] [--max-num-seqs 64] [--queue 64] [--rollbacks 100]
    python -m benchmarks.engine.vllm_rollback --device cpu --model .models/smollm2/... --dtype float32 \
        --eager --max-num-seqs 8 --queue 16 --input 128 --rollbacks 30

One deterministic request is rolled back again and again by a few tokens, in three states: alone; in a full
batch of best-effort requests; in a full batch with `--queue` more waiting. Beside each time stands the step
time of that state, the median between two candidates. The last state is measured again with resubmissions at
the request's own priority: they wait behind the queue, which is what the better priority is for. A renewal (a
request that stood at its lookahead bound goes on) is timed alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.report import Figure, arguments, report
from benchmarks.lib.vllm_setup import add_arguments, prompts_of, settings_of
from llm42.engine.base import EngineOutput
from llm42.engine.vllm.engine import VllmEngine
from llm42.engine.vllm.stream import Stream
from llm42.protocol import Request, SamplingParams

BEFORE, LOST = 24, 8
"""Candidates between two rollbacks, and how many of them a rollback takes back."""
PATIENCE_S = 60.0
_numbers = itertools.count()


class OwnPriority(VllmEngine):
    """Resubmits at the request's own priority."""

    boosted = False

    def _proceed(self, stream: Stream) -> None:
        attempts = stream.attempts
        if not self.boosted:
            stream.attempts = 0
        super()._proceed(stream)
        stream.attempts = max(attempts, stream.attempts)


@dataclass
class Probe:
    """The deterministic request: its outputs with their times, and its present output."""

    engine: VllmEngine
    request: Request
    inbox: queue.SimpleQueue[tuple[float, EngineOutput]] = field(default_factory=queue.SimpleQueue)
    output: list[int] = field(default_factory=list)
    epoch: int = 0

    def start(self) -> None:
        self.engine.submit(
            self.request, lambda o: self.inbox.put((time.perf_counter(), o)), self.request.max_tokens
        )

    def candidates(self, count: int) -> list[float]:
        """Waits for `count` more candidates; returns when each output came."""
        times = []
        wanted = len(self.output) + count
        while len(self.output) < wanted:
            when, output = self.inbox.get(timeout=PATIENCE_S)
            assert output.error is None, output.error
            if output.epoch == self.epoch:
                self.output += output.tokens
                times.append(when)
        return times

    def roll_back(self) -> float:
        """Seconds from a rollback to the first new candidate."""
        self.output = [*self.output[:-LOST], self.output[-LOST] ^ 1]
        self.epoch += 1
        began = time.perf_counter()
        self.engine.rollback(self.request.request_id, self.output, self.epoch, self.request.max_tokens)
        return self.candidates(1)[0] - began

    def renew(self) -> float:
        """Seconds from an extension of the bound, where the request stood at it, to the next candidate."""
        self.epoch += 1
        limit = len(self.output) + LOST
        self.engine.rollback(self.request.request_id, self.output, self.epoch, limit)
        self.candidates(LOST)
        time.sleep(0.2)
        began = time.perf_counter()
        self.engine.extend(self.request.request_id, limit + LOST)
        return self.candidates(1)[0] - began


class Crowd:
    """Best-effort requests; each that ends is replaced, so their number stays."""

    def __init__(self, engine: VllmEngine, count: int, prompts: list[tuple[int, ...]], tokens: int) -> None:
        self.engine, self.tokens, self.going = engine, tokens, True
        self.names: set[str] = set()
        self.prompts = itertools.cycle(prompts)
        for _ in range(count):
            self._one()

    def _one(self) -> None:
        request = Request(
            f"crowd-{next(_numbers)}", next(self.prompts), self.tokens, SamplingParams(), seeded=False
        )
        self.names.add(request.request_id)

        def sink(output: EngineOutput) -> None:
            if output.finish is not None:
                self.names.discard(request.request_id)
                if self.going:
                    self._one()

        self.engine.submit(request, sink, self.tokens)

    def leave(self) -> None:
        self.going = False
        for name in list(self.names):
            self.engine.abort(name)
        time.sleep(0.5)


def state(engine: VllmEngine, args: argparse.Namespace, others: int, rollbacks: int) -> dict[str, Any]:
    """Times of one state, in milliseconds."""
    vocab = engine.facts["vocab_size"]
    prompts = prompts_of(2 * args.max_num_seqs + 1, args.input, vocab)
    length = args.max_model_len - args.input - 1
    probe = Probe(engine, Request(f"probe-{next(_numbers)}", prompts[0], length, SamplingParams(), True))
    probe.start()
    probe.candidates(1)  # before the crowd: else it waits for a place like everyone
    crowd = Crowd(engine, others, prompts[1:], min(length, args.crowd_tokens))
    probe.candidates(BEFORE)
    waits, steps = [], []
    for _ in range(rollbacks):
        if len(probe.output) + 2 * BEFORE > length:
            break
        waits.append(1000 * probe.roll_back())
        times = probe.candidates(BEFORE)
        steps += [1000 * (b - a) for a, b in itertools.pairwise(times)]
    load = engine.load()
    renewals = [1000 * probe.renew() for _ in range(10)] if not others else []
    engine.abort(probe.request.request_id)
    crowd.leave()
    ordered = sorted(waits)
    return {
        "rollback_ms": statistics.median(waits),
        "rollback_ms_p90": ordered[int(0.9 * (len(ordered) - 1))],
        "step_ms": statistics.median(steps),
        "renewal_ms": statistics.median(renewals) if renewals else None,
        "rollbacks": len(waits),
        "running": load.running,
        "waiting": load.waiting,
        "all_ms": [round(w, 2) for w in waits],
    }


def main() -> None:
    """Runs all states and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--queue", type=int, default=64, help="requests that wait in the last state")
    parser.add_argument("--input", type=int, default=512, help="prompt tokens")
    parser.add_argument("--crowd-tokens", type=int, default=256, help="output tokens of the others")
    parser.add_argument("--rollbacks", type=int, default=50)
    args = parser.parse_args()
    engine = OwnPriority(settings_of(args))
    engine.start()
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, others, boosted in (
            ("warm-up", 0, True),
            ("alone", 0, True),
            ("full_batch", args.max_num_seqs - 1, True),
            ("full_queue", args.max_num_seqs - 1 + args.queue, True),
            ("full_queue_own_priority", args.max_num_seqs - 1 + args.queue, False),
        ):
            engine.boosted = boosted
            count = args.rollbacks if boosted else max(3, args.rollbacks // 10)
            found[name] = state(engine, args, others, 3 if name == "warm-up" else count)
            print(name, {k: v for k, v in found[name].items() if k != "all_ms"}, flush=True)
    finally:
        engine.close()
    del found["warm-up"]
    figures = {
        f"{figure}_{name}": Figure(round(s[f"{figure}_ms"], 2), "ms")
        for name, s in found.items()
        for figure in ("rollback", "step")
    }
    figures["renewal_alone"] = Figure(round(found["alone"]["renewal_ms"], 2), "ms")
    raw = {"states": found, "engine": engine.facts, "arguments": arguments(args)}
    raw["load_average"] = os.getloadavg()
    print(report(args.name or f"{args.device}-vllm-rollback", figures, raw, args.out))


if __name__ == "__main__":
    main()
