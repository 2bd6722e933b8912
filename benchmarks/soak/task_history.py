"""How much memory Ray's store (gcs_server) takes for its history of tasks, by the bound of that history.

    python -m benchmarks.soak.task_history [--calls 200000] [--kept 100000 10000 1000]

For each bound a cluster of its own, as `llm42 serve` starts one, and an actor that is called again and again.
Writes results/cpu-task-history.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import family
from benchmarks.lib.report import RESULTS, Figure, arguments, report

SWITCH = "RAY_task_events_max_num_task_in_gcs"
AT_A_TIME = 250
LOOK_EVERY = 10_000
SETTLE_S = 3.0
"""By then workers, which report each second, have told of their calls."""


class Looked:
    """An actor that does nothing."""

    async def call(self) -> None:
        """Returns at once."""


def store_mib() -> float:
    """Resident memory of this process' gcs_server."""
    for pid in family(os.getpid()):
        here = Path(f"/proc/{pid}")
        try:
            if b"gcs_server" in (here / "cmdline").read_bytes():
                return int((here / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        except OSError:  # it has just ended
            continue
    raise RuntimeError("there is no gcs_server")


def side(calls: int) -> list[tuple[int, float]]:
    """(calls, MiB) of one cluster, whose bound the environment says."""
    from llm42_serve.launch import prepare_environment

    prepare_environment()
    import ray

    from llm42_serve import ray_node

    with ray_node.no_dashboard() as port:
        ray.init(
            address="local", include_dashboard=False, dashboard_host="127.0.0.1", dashboard_port=port,
            log_to_driver=False, logging_level=logging.ERROR, object_store_memory=256 << 20,
            _node_ip_address="127.0.0.1", num_cpus=1,
        )  # fmt: skip
    actor: Any = ray.remote(Looked).options(max_concurrency=100).remote()
    ray.get(actor.call.remote())
    time.sleep(SETTLE_S)
    rows = [(0, round(store_mib(), 1))]
    for done in range(AT_A_TIME, calls + 1, AT_A_TIME):
        ray.get([actor.call.remote() for _ in range(AT_A_TIME)])
        time.sleep(0.05)
        if done % LOOK_EVERY == 0:
            time.sleep(SETTLE_S)
            rows.append((done, round(store_mib(), 1)))
    ray.shutdown()
    return rows


def main() -> None:
    """Runs all sides and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--kept", type=int, nargs="+", default=[100_000, 10_000, 1000])
    parser.add_argument("--side", action="store_true", help="one cluster, of this process' environment")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.calls)))
        return
    figures, raw = dict[str, Figure](), dict[str, Any]()
    for kept in args.kept:
        command = [sys.executable, "-m", "benchmarks.soak.task_history", "--side", "--calls", str(args.calls)]
        environment = os.environ | {SWITCH: str(kept)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows = json.loads(done.stdout.splitlines()[-1])
        raw[str(kept)] = rows
        figures[f"growth_mib_{kept}"] = Figure(round(rows[-1][1] - rows[0][1], 1), "MiB", TARGETS.get(kept))
        late = [mib for calls, mib in rows if calls >= args.calls / 2]
        figures[f"late_growth_mib_{kept}"] = Figure(round(late[-1] - late[0], 1), "MiB", 32)
    print(report("cpu-task-history", figures, {"rows": raw, "arguments": arguments(args)}, args.out))


TARGETS = {10_000: 64.0}
"""Predicted: with it the store is flat after some 50 MiB. Late: in the second half of the calls."""

if __name__ == "__main__":
    main()
