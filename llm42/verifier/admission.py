"""Which windows are admitted to the steps, and in which order: whole or not at all, so that there is no
deadlock among half-prefilled prompts."""

from __future__ import annotations

import time
from collections import deque

from llm42.errors import VerifierUnavailable
from llm42.verifier.front import Front
from llm42.verifier.jobs import Job
from llm42.verifier.prefixes import HeldKV


class Admission(Front):
    """From the queues into `_active`; on the step thread."""

    def _admit(self) -> None:
        """Windows first, then who has begun already, then who is new, then likewise who gives way to all of
        these: whole requests only, in order, so that there is no deadlock among half-prefilled prompts."""
        queues = self._followers.resuming, self._followers.fresh
        if self._admitted(self._waiting):
            all(self._admitted(jobs, yielding) for yielding in (False, True) for jobs in queues)

    def _admitted(self, jobs: deque[Job], yielding: bool = False) -> bool:
        """Whether there was room for all of them; unless `yielding`, for those who do not give way, which are
        the first. Who waits for a prefix keeps its place and lets others
        pass: nobody behind it can make it wait again, since who needs the same block waits too."""
        at = 0
        while at < len(jobs):
            job = jobs[at]
            if job.yields and not yielding:
                break
            if job.released or job.future.cancelled():
                del jobs[at]
                # not cancelled: a late release of an earlier try must not end a live request
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(VerifierUnavailable("released while its window was waiting"))
                continue
            if self._awaits_prefix(job):
                at += 1
                continue
            sequence = self._room_for(job)
            if sequence is None and job.patient:
                at += 1
                continue
            if sequence is None:
                return False
            del jobs[at]
            if not job.future.set_running_or_notify_cancel():  # cancelled just now
                self._store.discard(sequence)
                continue
            job.sequence, job.started = sequence, time.monotonic()
            job.next = job.issued = job.cached = sequence.computed
            self._active.append(job)
        return True

    def _awaits_prefix(self, job: Job) -> bool:
        """Whether what it would compute next is being computed already, by a job that is active. A cold one
        computes everything itself."""
        if job.awaited is None or not self._store.is_awaited(job.awaited):
            job.awaited = None if job.cold else self._store.awaited(job.window, job.keys)
        return job.awaited is not None

    def _room_for(self, job: Job) -> HeldKV | None:
        """The KV for a job, or None: it waits. A window of verify mode need not wait for those that decode
        on: the youngest of them give way. An audit has time."""
        if job.follower is not None:
            return self._room_for_follower(job)
        while (sequence := self._store.admit(job.window, job.cold, keys=job.keys)) is None:
            windows = sum(len(j.sequence.blocks) for j in self._active if j.sequence and not j.follower)
            if job.patient or not self._store.fits_beside(job.window, windows):
                return None
            if self._followers.preempt_youngest() is None:
                return None
        return sequence

    def _room_for_follower(self, job: Job) -> HeldKV | None:
        """Some of it is left to those that run. Best effort gives way to others, and to none of its own."""
        followers = self._followers
        while True:
            sequence = self._store.admit(job.window, spare=followers.spare, keys=job.keys)
            if sequence is not None or job.yields or not followers.makes_way(job.window):
                return sequence
