"""What becomes of the verifiers, for the terminal of who started the service: Ray's words about a process
that has died say neither whose it was nor that it is being replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from llm42.checkpoint.load import sampled_identity
from llm42.config import Settings
from llm42_serve.verifiers.membership import MemberInfo
from llm42_serve.verifiers.names import get_actor, supervisor_name

log = logging.getLogger(__name__)
TIMEOUT_S = 2.0
MEANWHILE = (
    "Deterministic requests under way go on with another verifier, or wait for it; new ones get a 503 while"
    " there is none."
)
Members = Callable[[], Sequence[MemberInfo]]


class VerifierNews:
    """Looks at the verifiers now and then, and logs what has changed since."""

    def __init__(self, members: Members) -> None:
        """members: who is there; raises RayError, TimeoutError or ValueError where that is not known."""
        self._members = members
        self._pids: dict[str, int] = {}
        """The process of each verifier that was ready, by name."""
        self._missing: set[str] = set()
        """Those that are not, since it was told."""

    def look(self) -> None:
        """One look; it never raises for want of an answer: the supervisor itself may be being replaced."""
        try:
            found = {info.name: info.status for info in self._members()}
        except (RayError, TimeoutError, ValueError) as error:
            log.debug("it is not known who is there: %r", error)
            return
        self._pids = {name: pid for name, pid in self._pids.items() if name in found}  # or it was given up
        self._missing &= found.keys()
        for name, status in found.items():
            ready = status is not None and status.state == "ready"
            pid = status.pid if status is not None else 0
            if name in self._pids and name not in self._missing and (not ready or pid != self._pids[name]):
                self._lost(name)
            if ready and (name in self._missing or name not in self._pids):
                self._ready(name, pid)

    def _lost(self, name: str) -> None:
        self._missing.add(name)
        pid = self._pids[name]
        gone = "does not answer" if _runs(pid) else "has died"
        log.warning("%s (process %d) %s; its successor is being started. %s", name, pid, gone, MEANWHILE)

    def _ready(self, name: str, pid: int) -> None:
        if name in self._missing:
            log.warning("%s is ready again (process %d)", name, pid)
        else:
            log.info("%s is ready (process %d)", name, pid)
        self._pids[name] = pid
        self._missing.discard(name)


def members_of(settings: Settings) -> Members:
    """Asks the supervisor of a service in the cluster that this process belongs to."""
    name = supervisor_name(settings, sampled_identity(settings.model.path))

    def members() -> Sequence[MemberInfo]:
        found: Any = ray.get(get_actor(name).members.remote(), timeout=TIMEOUT_S)
        return list(found)

    return members


def _runs(pid: int) -> bool:
    """Whether there is such a process on this machine, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
