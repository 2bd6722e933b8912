"""The supervisor's view of one verifier: its actor, what it said last and when, and whether it has hung."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from llm42.config import WatchSettings
from llm42.telemetry.logs import event
from llm42_serve.verifiers.actor import VerifierStatus

log = logging.getLogger(__name__)
MISSES_ALLOWED = 3


@dataclass(slots=True)
class Watched:
    """The supervisor's view of one verifier."""

    name: str
    watch: WatchSettings
    handle: Any = None
    status: VerifierStatus | None = None
    asked: float = 0.0
    """When the call was made that `status` answers."""
    answered: float = 0.0
    """When the present actor was created or has answered last."""
    certified: bool = False
    """Whether its last answer was that it is ready."""
    tried: bool = False
    """Whether it has been asked at all, with or without an answer."""
    missed: int = 0
    condemned: int = 0
    not_before: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    """Counters of the last look, to tell what has happened since."""
    mixed: str = ""
    """How its manifest differs from the pool's, once that has been found out."""
    wanted: bool = False
    pid: int = 0
    """The process that has answered last for the present actor: Ray starts another when it has died."""
    node: str = ""
    """Ray's id of the node that it was on when it said so last."""
    leave_by: float | None = None
    """Its node is being drained: until then it waits for its successor. It stands when the node is no longer
    among those that are drained, for then it has mostly died, and the successor is there."""
    ending: bool = False
    """It is no longer published, and is about to be ended."""

    def adopt(self, handle: Any) -> None:
        """The actor of this name from now on; nothing is known of it yet."""
        self.handle, self.answered = handle, time.monotonic()
        self.certified, self.missed, self.mixed, self.seen, self.node = False, 0, "", {}, ""
        self.leave_by, self.pid = None, 0

    def record_answer(self, status: VerifierStatus, asked: float) -> bool:
        """An answer to a call that was made at `asked`. Returns whether the process that answered before has
        died: Ray has started another one for the actor."""
        if status.node != self.node:  # Ray has started it again, elsewhere
            self.leave_by = None
        self.status, self.asked, self.answered = status, asked, time.monotonic()
        self.certified, self.missed, self.node = status.state == "ready", 0, status.node
        before, self.pid = self.pid, status.pid
        if died := before not in (0, status.pid):
            log.warning("%s (process %d) has died; Ray has started it again", self.name, before)
        return died

    def record_miss(self, error: Exception) -> None:
        """A status call failed, although the actor is not known to be dead."""
        self.missed += 1
        # a timeout may be a busy process: not a reason to turn requests away at once
        if not isinstance(error, TimeoutError) or self.missed >= MISSES_ALLOWED:
            log.warning("%s does not answer, %d times now: %r", self.name, self.missed, error)
            self.status = None
        if isinstance(error, RayActorError):
            self.certified = False  # Ray may be starting its process again

    @property
    def hung(self) -> bool:
        """Whether the actor has been silent for so long that it will not answer any more. It must be killed:
        get_if_exists would give the same one again."""
        limit_s = self.watch.verifier_s if self.certified else self.watch.verifier_start_s
        return self.handle is not None and time.monotonic() - self.answered > limit_s

    @property
    def actor_id(self) -> str:
        """Identity of the present actor; empty while there is none."""
        return self.handle._actor_id.hex() if self.handle is not None else ""


def log_change(watched: Watched, status: VerifierStatus) -> None:
    """A line when a verifier's state is another than before, or is known again."""
    if watched.status is None or watched.status.state != status.state:
        facts = {name: getattr(status, name) for name in ("fingerprint", "detail", "pid", "node")}
        present = {name: value for name, value in facts.items() if value}
        event(log, f"verifier is {status.state}", verifier=watched.name, **present)
