"""The list of checks, and how one is judged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.battery.api import Answer, Api, Broken, NotOffered

Run = Callable[[Api], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Check:
    """One reported failure. `run` returns what it saw, or raises Broken or NotOffered."""

    name: str
    rule: str
    reports: str
    run: Run


CHECKS: dict[str, Check] = {}


def check(rule: str, reports: str) -> Callable[[Run], Run]:
    """Adds a function to the battery, under its own name."""

    def add(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        CHECKS[name] = Check(name, rule, reports, run)
        return run

    return add


def same(expected: Answer, others: Iterable[Answer], where: str) -> int:
    """Raises Broken unless all are `expected`. Returns how many were compared."""
    answers = list(others)
    wrong = [answer for answer in answers if answer != expected]
    if wrong:
        raise Broken(f"{where}: {len(wrong)} of {len(answers)} differ; {expected.difference(wrong[0])}")
    if not expected.text or not expected.logprobs:
        raise NotOffered("the answer has no text or no log-probabilities, so nothing was compared")
    return len(answers)


async def judge(item: Check, api: Api, limit_s: float) -> dict[str, Any]:
    """One verdict: pass, fail or not offered, with the reason; or not run, if there was none in time."""
    began = time.monotonic()
    try:
        verdict, detail = "pass", await asyncio.wait_for(item.run(api), limit_s)
    except NotOffered as refusal:
        verdict, detail = "not offered", str(refusal)
    except Broken as fault:
        verdict, detail = "fail", str(fault)
    except TimeoutError:
        verdict, detail = "not run", f"no verdict within {limit_s:.0f} s"
    except httpx.HTTPError as fault:
        verdict, detail = "fail", f"the connection failed: {fault!r}"
    seconds = round(time.monotonic() - began, 1)
    return {
        "verdict": verdict,
        "detail": detail,
        "seconds": seconds,
        "rule": item.rule,
        "reports": item.reports,
    }
