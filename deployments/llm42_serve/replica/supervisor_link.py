"""A replica's line to the supervisor, which is created when there is none and killed when it has hung."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from llm42.config import Settings
from llm42_serve.verifiers.actor import node_id
from llm42_serve.verifiers.membership import Membership
from llm42_serve.verifiers.names import DETACHED, supervisor_name
from llm42_serve.verifiers.supervisor import Supervisor

log = logging.getLogger(__name__)
TIMEOUT_S = 3.0


class SupervisorLink:
    """One per replica; belongs to its event loop."""

    def __init__(self, settings: Settings, model_identity: str) -> None:
        self._settings, self._identity = settings, model_identity
        self.handle: Any = None
        self._known = False
        """Whether the present actor has answered before."""
        self._last_seen = 0.0
        """When it was created or has answered last."""

    async def membership(self) -> Membership | None:
        """Who is there; None when the supervisor does not say so. Raises what its creation raises."""
        if self.handle is None:
            create = get_or_create_supervisor
            self.handle = await asyncio.to_thread(create, self._settings, self._identity)
            self._known, self._last_seen = False, time.monotonic()
        handle = self.handle
        try:
            async with asyncio.timeout(TIMEOUT_S):  # wait_for may swallow the end of the watch
                found: Membership = await handle.membership.remote(node_id())
        except TimeoutError:
            await self._unanswered(handle)
        except ActorDiedError:
            self._drop(handle)
        except RayActorError as error:
            log.warning("the supervisor does not answer: %s", type(error).__name__)
        except RayError as error:  # it never came to be
            log.warning("the supervisor could not be started: %s: %s", type(error).__name__, error)
            self._drop(handle)
        else:
            self._known, self._last_seen = True, time.monotonic()
            return found
        return None

    async def condemn(self, name: str, actor_id: str, reason: str) -> bool:
        """Asks for the removal of a verifier; whether it is gone, as far as the supervisor knows. Never
        raises: the caller repeats it until it is."""
        if self.handle is None:
            return False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return bool(await self.handle.condemn.remote(name, actor_id, reason))
        except (RayError, TimeoutError) as error:
            log.warning("the supervisor has not confirmed that %s is condemned: %r", name, error)
            return False

    async def _unanswered(self, handle: Any) -> None:
        """One that has hung is killed and created anew: get_if_exists would give the same actor again."""
        silent_s, watch = time.monotonic() - self._last_seen, self._settings.watch
        allowed_s = watch.supervisor_s if self._known else watch.supervisor_start_s
        if self.handle is handle and silent_s > allowed_s:
            log.error("the supervisor has not answered for %.0f s: it is killed and created again", silent_s)
            self._drop(handle)
            await asyncio.to_thread(ray.kill, handle, no_restart=True)

    def _drop(self, handle: Any) -> None:
        if self.handle is handle:  # else another look has replaced it meanwhile
            self.handle = None


def get_or_create_supervisor(settings: Settings, model_identity: str) -> Any:
    """The supervisor's handle. Blocks like get_or_create_verifier."""
    name = supervisor_name(settings, model_identity)
    actor = ray.remote(Supervisor).options(name=name, num_cpus=0.05, **DETACHED)
    return actor.remote(settings.model_dump(mode="json"), model_identity)
