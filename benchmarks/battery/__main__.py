"""Failures that users of inference servers reported, tried on any OpenAI endpoint.

    python -m benchmarks.battery --base-url http://127.0.0.1:8000/v1 --model NAME --name plain-vllm
    python -m benchmarks.battery ... --name llm42 --extra '{"deterministic": true}'

Each check says pass, fail, or not offered (with the reason); benchmarks/results/battery-NAME.json keeps it.
`--keep FILE --only restart` writes some answers of a fresh server; `--expect FILE`, after a restart, compares
the new one's first answers with them, then runs the rest.
Then `python -m benchmarks.battery.table` writes docs/battery.md. The exit status is 1 if a check failed.
A server that is dead, at the beginning or after a failure, ends the run: that is no verdict. Nor is a check
that takes longer than --limit-s, which is left out of the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.battery import beside, cache, seeds, surface
from benchmarks.battery.api import Api, Broken, NotOffered
from benchmarks.battery.registry import CHECKS, Check, judge
from benchmarks.battery.surface import restart_check
from benchmarks.lib.report import Figure, report

SUBJECTS = (beside, cache, seeds, surface)  # importing them fills CHECKS


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.battery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", required=True, help="with /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True, help="of the result: battery-NAME.json")
    parser.add_argument("--system", help="what was run, in words, for the table; default: the name")
    parser.add_argument("--extra", default="{}", help="JSON: fields that ask for determinism")
    parser.add_argument("--only", nargs="*", help="names of checks")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--load", type=int, default=6, help="requests beside")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one check")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--expect", type=Path)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    return parser.parse_args()


def in_order(after_a_restart: bool) -> dict[str, Check]:
    """All checks by name. A restarted server is compared before anything else is in its cache."""
    return dict(sorted(CHECKS.items(), key=lambda item: not (after_a_restart and item[0] == "restart")))


async def answers(api: Api) -> None:
    """A server that is dead breaks no rule, and has no result. Raises SystemExit."""
    try:
        await api.ask("Hello", max_tokens=1)
    except (Broken, NotOffered, httpx.HTTPError) as fault:
        raise SystemExit(f"no result: the server does not answer an ordinary request: {fault!r}") from fault


async def run(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All verdicts by name; one check after the other, since each wants to know what else is running.

    What has a verdict is written at once, so that a long run that is stopped leaves what it found.
    """
    verdicts: dict[str, dict[str, Any]] = {}
    base = args.base_url.rstrip("/") + "/"
    timeout = httpx.Timeout(args.limit_s, connect=30.0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=timeout, limits=limits, trust_env=False) as client:
        api = Api(client, args.model, json.loads(args.extra), args.tokens, args.load)
        await answers(api)
        for name, item in in_order(after_a_restart=bool(args.expect)).items():
            if args.only and name not in args.only:
                continue
            verdict = await judge(item, api, args.limit_s)
            print(f"{name}: {verdict['verdict']}: {verdict['detail']}", flush=True)
            if verdict["verdict"] == "fail":
                await answers(api)
            if verdict["verdict"] != "not run" and not (args.keep and name == "restart"):
                verdicts[name] = verdict  # the half of a check before the restart is no verdict
                write(args, verdicts)
    return verdicts


def write(args: argparse.Namespace, verdicts: dict[str, dict[str, Any]]) -> None:
    """The result of what was run so far."""
    counts = Counter(verdict["verdict"] for verdict in verdicts.values())
    figures = {
        "passed": Figure(float(counts["pass"]), "checks", None, "higher"),
        "failed": Figure(float(counts["fail"]), "checks", None, "lower"),
    }
    raw = {"system": args.system or args.name, "extra": json.loads(args.extra), "tokens": args.tokens}
    raw |= {"load": args.load, "checks": verdicts}
    report(f"battery-{args.name}", figures, raw, args.out)


def main() -> int:
    """Runs and prints; 1 if a check failed."""
    args = parse()
    restart_check(args.keep, args.expect)
    verdicts = asyncio.run(run(args))
    return int(any(verdict["verdict"] == "fail" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
