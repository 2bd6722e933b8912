"""Commits of one request that follow each other, as one."""

from __future__ import annotations

from collections.abc import Iterable

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
    same = before.request_id == after.request_id and before.fingerprint == after.fingerprint
    return same and after.base == before.base + len(before.logprobs) and not after.accepted


def _one(run: list[Commit]) -> Commit:
    """A run of commits as one. Times and rows are added up; what was waited and cached is the first one's."""
    first = run[0]
    logprobs, decoded = list(first.logprobs), list(first.decoded)
    compute_s, rows = first.timings.compute_s, first.timings.rows
    for commit in run[1:]:  # once for every token of every request: plain loops are the fastest
        logprobs += commit.logprobs
        decoded.append(commit.next_token)
        decoded += commit.decoded
        compute_s += commit.timings.compute_s
        rows += commit.timings.rows
    timings = VerifyTimings(first.timings.queue_s, compute_s, rows, first.timings.cached_rows)
    begin = first.request_id, first.base, first.accepted, first.next_token
    return Commit(*begin, tuple(logprobs), first.fingerprint, timings, tuple(decoded))
