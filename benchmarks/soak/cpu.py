"""A soak of the whole service on one machine: mixed load that comes and goes, and processes that are killed.

    python -m benchmarks.soak.cpu [--minutes 60] [--clients 8] [--kill-every 150]

The default model, two processes of each role. Every `kill-every` seconds the youngest ingress, replica or
verifier, or the supervisor, gets a SIGKILL: the older one of each role lives through the whole run, so that
what it holds at the end can be compared with what it held after the first tenth. For both, the load pauses
until nothing is under way. Writes results/cpu-soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import free_port
from benchmarks.lib.report import RESULTS, Figure, arguments, report
from benchmarks.soak.traffic import KINDS, Clients, Tally, question
from benchmarks.soak.watch import Held, gauges, growth, processes, summary
from llm42.config import Settings
from llm42.local.assembly import Local, output_of
from llm42.protocol import Request, SamplingParams
from llm42_serve.launch import Service

VICTIMS = ("verifier", "replica", "ingress", "supervisor")
IDS = 500
"""Token ids of prompts; every model has as many."""
EXPECTED = {
    "stream": {"finished"}, "whole": {"finished"}, "best_effort": {"finished"}, "audit": {"confirmed"},
    "leave": {"left", "finished before"}, "refused": {"400", "404"},
}  # fmt: skip
"""What may become of a request when nobody is killed."""


def settings_of(port: int, metrics_port: int, model: str | None) -> Settings:
    """Two of everything, one thread each."""
    tree: dict[str, Any] = {
        "engine": {"threads": 1, "kv_tokens": 16384},
        "verifier": {"kv_tokens": 16384, "audit_share": 0.02},
        "server": {
            "port": port, "ingress_replicas": 2, "fastpath_replicas": 2, "verifiers": 2,
            "failover_s": 300.0, "drain_s": 60.0,
        },
        "telemetry": {"metrics_port": metrics_port},
    }  # fmt: skip
    if model:
        tree["model"] = {"path": model, "name": "soaked", "max_model_len": 768}
    return Settings.load(tree)


async def oracle(settings: Settings) -> dict[int, str]:
    """The answers that there must be: by one verifier in one process, without a fast path's help."""
    one = settings.model_copy(update={"session": settings.session.model_copy(update={"mode": "direct"})})
    found = {}
    with Local(one) as local:
        for number in range(KINDS):
            q = question(number, IDS)
            sampling = SamplingParams(temperature=q["temperature"], top_p=q["top_p"], seed=q["seed"])
            request = Request(
                f"oracle{number}", tuple(q["prompt"]), q["max_tokens"], sampling, deterministic=True,
                num_logprobs=q["logprobs"],
            )  # fmt: skip
            output = await output_of(local.generate(request))
            found[number] = json.dumps([output.tokens, output.logprobs])
    return found


class Soak:
    """One run against a service that has started."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        self._service, self._args = service, args
        self.tally = Tally()
        self.kills: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._began = time.monotonic()

    async def run(self) -> tuple[dict[str, list[Held]], dict[str, list[Held]], dict[str, Any]]:
        """What the processes held after the first tenth and at the end; sums of the gauges likewise."""
        whole = self._args.minutes * 60
        await self._load(whole / 10, kills=False)
        quiet, before = await self._idle(), processes(os.getpid())
        await self._load(whole * 9 / 10, kills=True)
        quiet_after, after = await self._idle(), processes(os.getpid())
        return before, after, {"before": quiet, "after": quiet_after}

    async def _load(self, seconds: float, kills: bool) -> None:
        clients = Clients(self._service.url, self._service.settings.model.name, IDS, self.tally)
        work = asyncio.create_task(clients.run(self._args.clients))
        until, last = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < until:
            await asyncio.sleep(15)
            await self._sample()
            if kills and time.monotonic() - last > self._args.kill_every:
                self._kill()
                last = time.monotonic()
        clients.stop()
        await work

    async def _sample(self) -> None:
        """A line of the raw part, and of the screen."""
        found = processes(os.getpid())
        at = round(time.monotonic() - self._began)
        memory = {role: round(sum(h.pss_mib for h in them)) for role, them in found.items()}
        sample: dict[str, Any] = {"at_s": at, "processes": summary(found)}
        with suppress(OSError, ValueError):  # the page, or a series, may be gone for a moment
            sample["gauges"] = await asyncio.to_thread(gauges, self._service.metrics_url)
        self.samples.append(sample)
        print(at, memory, sum(self.tally.outcomes.values()), "requests", flush=True)

    def _kill(self) -> None:
        role = VICTIMS[len(self.kills) % len(VICTIMS)]
        them = processes(os.getpid()).get(role, [])
        if len(them) == 1 and role != "supervisor":
            print("nobody killed: one", role, "only", flush=True)
            return
        if them:
            os.kill(them[-1].pid, signal.SIGKILL)
            self.kills.append({"at_s": round(time.monotonic() - self._began), "role": role})
            print("killed a", role, flush=True)

    async def _idle(self) -> dict[str, float]:
        """Waits until nothing is under way and every role is whole, then the gauges."""
        deadline = time.monotonic() + 600
        while True:
            found = {}
            try:
                health = await asyncio.to_thread(self._service.health)
                found = await asyncio.to_thread(gauges, self._service.metrics_url)
                roles = {role: len(them) for role, them in processes(os.getpid()).items()}
                whole = all(roles.get(r) == 2 for r in ("ingress", "replica", "verifier"))
                if whole and health["deterministic"] and found["held"] == found["kv"] == 0:
                    break
            except (OSError, ValueError) as error:
                found = {"error": -1.0}
                print(error, flush=True)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(5)
        # a process tells its gauges every second, Ray's agent of its node every few
        await asyncio.sleep(15)
        return found | await asyncio.to_thread(gauges, self._service.metrics_url)


def figures_of(
    soak: Soak, before: Any, after: Any, quiet: dict[str, Any], right: dict[int, str]
) -> dict[str, Figure]:
    """The run's figures, with what was predicted as targets."""
    odd = sum(
        count
        for outcome, count in soak.tally.outcomes.items()
        if outcome.split(": ")[1] not in EXPECTED[outcome.split(": ")[0]]
    )
    compared = sum(sum(found.values()) for found in soak.tally.answers.values())
    serving = ("ingress", "replica", "verifier", "proxy")
    memory, files, threads = (growth(before, after, of) for of in ("pss_mib", "descriptors", "threads"))

    def most(of: dict[str, float], among: tuple[str, ...]) -> float:
        return max((value for role, value in of.items() if role in among), default=0.0)

    return {
        "wrong_answers": Figure(soak.tally.wrong(right), "answers", 0),
        "compared_answers": Figure(compared, "answers", None, "higher"),
        "kills": Figure(len(soak.kills), "processes", None, "higher"),
        "not_as_expected": Figure(odd, "requests", None),
        "requests": Figure(sum(soak.tally.outcomes.values()), "requests", None, "higher"),
        "memory_growth_mib": Figure(most(memory, serving), "MiB", 64),
        "control_plane_growth_mib": Figure(most(memory, ("controller", "gcs", "raylet")), "MiB", 128),
        "descriptor_growth": Figure(most(files, tuple(files)), "descriptors", 16),
        "thread_growth": Figure(most(threads, tuple(threads)), "threads", 8),
        "task_growth": Figure(quiet["after"]["tasks"] - quiet["before"]["tasks"], "tasks", 8),
        "kv_held_at_end": Figure(quiet["after"]["kv"], "tokens and blocks", 0),
        "requests_held_at_most": Figure(
            max((s["gauges"]["held"] for s in soak.samples if "gauges" in s), default=0.0), "requests", None
        ),
        "requests_held_at_end": Figure(quiet["after"]["held"], "requests", 0),
        "process_growth": Figure(
            sum(map(len, after.values())) - sum(map(len, before.values())), "processes", 0
        ),
    }


def main() -> None:
    """Runs it and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=150.0)
    parser.add_argument("--model", default="", help="a directory or file; empty: the default model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    settings = settings_of(free_port(), free_port(), args.model or None)
    right = asyncio.run(oracle(settings))
    with Service(settings, lambda text: print(text, flush=True)) as service:
        service.wait_deterministic()
        soak = Soak(service, args)
        before, after, quiet = asyncio.run(soak.run())
    figures = figures_of(soak, before, after, quiet, right)
    raw = {
        "outcomes": dict(sorted(soak.tally.outcomes.items())),
        "different_answers": soak.tally.different(),
        "tokens": soak.tally.tokens,
        "failovers": soak.tally.failovers,
        "kills": soak.kills,
        "idle": quiet,
        "growth": {of: growth(before, after, of) for of in ("pss_mib", "descriptors", "threads")},
        "samples": soak.samples[:: max(1, len(soak.samples) // 60)],
        "load_average": os.getloadavg(),
        "arguments": arguments(args),
    }
    print(report("cpu-soak", figures, raw, args.out))


if __name__ == "__main__":
    main()
