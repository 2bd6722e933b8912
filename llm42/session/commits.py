"""Commits of one request that follow each other, as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llm42.protocol import Commit, VerifyTimings


def joined(commits: Iterable[Commit]) -> list[Commit]:
    """The commits, each with those behind it that begin where it ends and have candidates no more."""
    found: list[list[Commit]] = []
    for commit in commits:
        last = found[-1][-1] if found else None
        if last is not None and _follows(last, commit):
            found[-1].append(commit)
        else:
            found.append([commit])
    return [_one(run) if len(run) > 1 else run[0] for run in found]


def _follows(before: Commit, after: Commit) -> bool:
    same = (before.request_id, before.fingerprint) == (after.request_id, after.fingerprint)
    return same and after.base == before.end and not after.accepted


def _one(run: list[Commit]) -> Commit:
    """A run of commits as one. Times and rows are added up; what was waited and cached is the first one's."""
    first, rest = run[0], run[1:]
    compute_s, rows = sum(c.timings.compute_s for c in run), sum(c.timings.rows for c in run)
    return replace(
        first,
        logprobs=tuple(x for c in run for x in c.logprobs),
        decoded=(*first.decoded, *(t for c in rest for t in (c.next_token, *c.decoded))),
        timings=VerifyTimings(first.timings.queue_s, compute_s, rows, first.timings.cached_rows),
    )
