"""How the rows of a step are shared out: windows first, then one for each request that is decoded, then
prompts."""

from __future__ import annotations

from collections.abc import Sequence

from llm42.verifier.jobs import Job


def decode_limit(active: Sequence[Job], size: int) -> int:
    """How many of a step's `size` rows requests that are decoded may take: what windows and a quarter for
    prompts leave, but a quarter at least."""
    short, long = _by_length(active, size)
    left = size - sum(job.left for job in short) - (_quarter(size) if long else 0)
    return max(_quarter(size), left)


def plan_rows(active: Sequence[Job], size: int, decodes: int) -> list[tuple[Job, int]]:
    """Rows per job, at most `size` with those of `decodes`: windows first, but a quarter is kept for the
    oldest prompt."""
    budget, plan, used = size - decodes, list[tuple[Job, int]](), 0
    short, long = _by_length(active, size)
    for jobs, limit in ((short, budget - (_quarter(size) if long else 0)), (long, budget)):
        for job in jobs:
            if used >= limit:
                break
            count = min(job.left, limit - used)
            plan.append((job, count))
            used += count
    return plan


def _quarter(size: int) -> int:
    return max(size // 4, min(1, size - 1))


def _by_length(active: Sequence[Job], size: int) -> tuple[list[Job], list[Job]]:
    """Jobs that have rows to compute: windows, and prompts. What a request needs before it is decoded here is
    a prompt, but for a few rows."""
    short, long = list[Job](), list[Job]()
    for job in active:
        if job.left > 0:
            most = size // 2 if job.follower is None else size // 16
            (short if job.left <= most else long).append(job)
    return short, long
