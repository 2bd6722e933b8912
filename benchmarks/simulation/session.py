"""What rollbacks cost: a simulated service with the session's present rules, and with those before.

    python -m benchmarks.simulation.session [--scale 1]

Clients are as many as the batch has places (nobody waits for one), or twice as many. What is simulated:
events.py.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.lib.report import Figure, arguments, report
from benchmarks.simulation.events import Costs, Simulation
from llm42.protocol import Commit
from llm42.session.machine import Session

RATES = (0.0, 0.001, 0.01, 0.04)
SLOTS = (8, 64, 256)
SERVICES = {
    "near": Costs(),
    "far": Costs(round_trip=0.45),
    "busy": Costs(host_per_output=1e-4, host_per_window=1e-3),
}
"""Commits come at once, late (as a run on GPUs must have had it: docs/measurements/rollbacks.md), or
through a driver's process that has hardly time for them."""


class Before(Session):
    """The rules as they were: the whole lookahead always, windows that grow after every full match."""

    @property
    def limit(self) -> int:
        """Up to which output token the fast path may decode now."""
        return min(len(self.committed) + self.settings.lookahead, self.request.max_tokens)

    def _adapt(self, commit: Commit, sent: int) -> None:
        if commit.accepted == sent or commit.timings.queue_s > self.settings.commit_deadline_s:
            self.target = min(self.settings.max_window, 2 * self.target + 1)
        else:
            self.target = max(self.settings.min_window, self.target // 2)


def case(args: tuple[type[Session], str, int, int, float, float]) -> dict[str, Any]:
    """One load under one set of rules."""
    make, service, slots, clients, rate, seconds = args
    figures = Simulation(rate, slots, clients, SERVICES[service], make=make).run(seconds, warm=10.0)
    rules = "before" if make is Before else "now"
    return {"rules": rules, "service": service, "slots": slots, "clients": clients, "rate": rate, **figures}


def main() -> None:
    """Runs every load under both rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="simulated time, 1: 10 s with 256 requests")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    cases = [
        (make, service, slots, slots * times, rate, args.scale * min(60, 2560 / slots))
        for service in SERVICES
        for slots in SLOTS
        for times in (1, 2)
        for rate in RATES
        for make in (Before, Session)
    ]
    figures, rows = {}, []
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(case, cases):
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    for before, now in zip(rows[::2], rows[1::2], strict=True):
        rate = now["rate"]
        name = f"{now['service']}_{now['slots']}_{now['clients']}_{rate:g}"
        target = {0.04: 1.15, 0.01: 1.0}.get(rate, 0.99) if now["service"] == "near" else None
        gain = now["committed_tok_s"] / before["committed_tok_s"]
        figures[f"gain_{name}"] = Figure(gain, "x", target, "higher")
        if rate:
            figures[f"lost_per_rollback_{name}"] = Figure(now["lost_per_rollback"], "tokens")
    print(report("session-sim", figures, {"args": arguments(args), "cases": rows}))


if __name__ == "__main__":
    main()
