"""Where answers come from, as the HTTP application sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from llm42.protocol import across_releases
from llm42.session.interfaces import Answers


@across_releases
@dataclass(frozen=True, slots=True)
class Status:
    """What a fast-path replica knows: its own engine, and the verifiers it can reach."""

    serving: bool
    replica: str = ""
    served: int = 0
    """Requests that this replica has finished."""
    verifiers_ready: int = 0
    verifiers: int = 0
    fingerprint: str | None = None
    detail: str = ""
    running: int = 0
    waiting: int = 0
    queued: int = 0
    """Requests that wait to be admitted."""
    node: str = ""
    """Ray's id of the node it runs on."""
    kv_used: int = 0
    kv_total: int = 0
    verifier_states: tuple[str, ...] = field(default=())
    rollbacks_expected: str = ""
    """What is known of the rollbacks beside this engine; "" where nothing is to be said."""
    skew: bool = False
    """Deterministic requests are refused: `detail` says in what the parts of the service differ."""


class Backend(Answers, Protocol):
    """Where answers come from, and how that is doing."""

    async def status(self, near: bool = False) -> Status:
        """Answers within a second or two, whatever is going on. near: of a replica on this machine, where
        there is one; `running` and the KV are then those of all that it has under way."""
