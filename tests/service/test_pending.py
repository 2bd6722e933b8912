"""Which actors Ray has found no place for: asked of a real one, since it says so in no public way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from llm42_serve.launch import Service
from llm42_serve.verifiers.names import is_pending
from tests.service.served import on_the_tiny_model_only
from tests.support import until

pytestmark = pytest.mark.service


class Nobody:
    """An actor."""

    def there(self) -> bool:
        """It is."""
        return True


@on_the_tiny_model_only
async def test_an_actor_is_pending_while_there_is_no_place_for_it(service: Service) -> None:
    """The control has one. One that has been killed waits for nothing."""
    options: dict[str, Any] = {"num_cpus": 0.0}
    placed = ray.remote(Nobody).options(**options).remote()
    waiting = ray.remote(Nobody).options(resources={"nowhere": 1}, **options).remote()
    assert await placed.there.remote()
    assert not await asyncio.to_thread(is_pending, placed)
    await until(lambda: is_pending(waiting))
    ray.kill(waiting)
    await until(lambda: not is_pending(waiting))
    ray.kill(placed)
