"""The ingress deployment: the HTTP application over fast-path replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.errors import ServiceUnavailable
from deployments.http_app import Status, create_app
from llm42.config import Settings
from llm42.protocol import Delta, LLM42Error, Overloaded, Request
from llm42.tokenizer import Tokenizer

STATUS_TIMEOUT_S = 2.0
ADMISSION_TRIES = 4
ADMISSION_PAUSE_S = 0.05


class RayBackend:
    """Generates through a deployment handle."""

    def __init__(self, fastpath: DeploymentHandle, tokenizer: str) -> None:
        """tokenizer: the identity of the one that encodes the prompts."""
        self._tokenizer = tokenizer
        self._generate = fastpath.options(method_name="generate", stream=True)
        self._status = fastpath.options(method_name="status")

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The output of one request. Losing the replica is one clear error (ServiceUnavailable).

        A replica that is full says so before any token; the request is then offered again, because Serve
        routes by queue lengths that may be out of date, and another replica may have room.
        """
        sent = False
        for attempt in range(ADMISSION_TRIES):
            try:
                async with aclosing(self._try(request)) as deltas:
                    async for delta in deltas:
                        sent = True
                        yield delta
                return
            except Overloaded:
                # never again from the start once tokens have left: a stream takes nothing back
                if sent or attempt + 1 == ADMISSION_TRIES:
                    raise
                await asyncio.sleep(ADMISSION_PAUSE_S)

    async def _try(self, request: Request) -> AsyncGenerator[Delta, None]:
        stream = self._generate.remote(request, self._tokenizer)
        ended = False
        try:
            async for item in stream:
                if isinstance(item, LLM42Error):
                    ended = True
                    raise item
                yield item
            ended = True
        except BackPressureError as error:
            raise Overloaded("Too many requests wait for a fast-path replica.") from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise ServiceUnavailable("The replica of this request is gone; send it again.") from error
        except RayTaskError as error:
            if isinstance(error.cause, LLM42Error):
                raise error.cause from error
            raise
        finally:
            if not ended:
                stream.cancel()

    async def status(self) -> Status:
        """One replica's view; `serving` is false when none answers in time."""
        try:
            status: Status = await asyncio.wait_for(self._status.remote(), STATUS_TIMEOUT_S)
            return status
        except Exception as error:
            detail = f"No fast-path replica answers ({type(error).__name__}); it may still be starting."
            return Status(serving=False, detail=detail)


class Ingress:
    """Holds no model; it tokenises, validates and renders. Any number of replicas."""

    def __init__(self, settings: dict[str, Any], fastpath: DeploymentHandle) -> None:
        self._settings = Settings.load(settings)
        self._tokenizer = Tokenizer.load(self._settings.model.path)
        self._backend = RayBackend(fastpath, self._tokenizer.identity)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once the constructor has run."""
        return create_app(self._settings, self._tokenizer, self._backend)
