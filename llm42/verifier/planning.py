"""How the rows of a step are shared out: windows first, then one for each request that is decoded, then
prompts, then audits; none of them is ever without a share."""

from __future__ import annotations

from collections.abc import Sequence

from llm42.verifier.jobs import Job


def decode_limit(active: Sequence[Job], size: int) -> int:
    """How many of a step's `size` rows requests that are decoded may take: what windows and a quarter for
    prompts and audits leave, but a quarter at least."""
    windows, prompts, audits = _by_length(active, size)
    left = size - sum(job.left for job in windows) - (_part(size, 4) if prompts or audits else 0)
    return max(_part(size, 4), left)


def plan_rows(active: Sequence[Job], size: int, decodes: int) -> list[tuple[Job, int]]:
    """Rows per job, at most `size` with those of `decodes`: windows first, but a quarter is kept for the
    oldest prompt; prompts before audits, for whom nobody waits, but an eighth is kept for the oldest."""
    budget, plan, used = size - decodes, list[tuple[Job, int]](), 0
    windows, prompts, audits = _by_length(active, size)
    for jobs, limit in (
        (windows, budget - (_part(size, 4) if prompts or audits else 0)),
        (prompts, budget - (_part(size, 8) if audits else 0)),
        (audits, budget),
    ):
        for job in jobs:
            if used >= limit:
                break
            count = min(job.left, limit - used)
            plan.append((job, count))
            used += count
    return plan


def _part(size: int, of: int) -> int:
    return max(size // of, min(1, size - 1))


def _by_length(active: Sequence[Job], size: int) -> tuple[list[Job], list[Job], list[Job]]:
    """Jobs that have rows to compute: windows, prompts, and audits that are as long. What a request needs
    before it is decoded here is a prompt, but for a few rows."""
    windows, prompts, audits = list[Job](), list[Job](), list[Job]()
    for job in active:
        if job.left > 0:
            most = size // 2 if job.follower is None else size // 16
            (windows if job.left <= most else audits if job.cold else prompts).append(job)
    return windows, prompts, audits
