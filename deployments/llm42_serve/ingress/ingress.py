"""The ingress deployment: the HTTP application over fast-path replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from llm42.api.app import create_app
from llm42.api.backend import Status
from llm42.checkpoint.description import check_model
from llm42.config import ServerSettings, Settings
from llm42.errors import LLM42Error, Overloaded, VerifierUnavailable
from llm42.fingerprint.request import request_facts
from llm42.fingerprint.skew import Facts
from llm42.host.garbage import keep_what_is_there
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.telemetry.logs import configure
from llm42.telemetry.metrics import FAILOVERS, INGRESS_TASKS, REPLICAS_WANTED, Metrics, Scope
from llm42.telemetry.request_metrics import Observed, mode_of
from llm42.telemetry.tracing import Tracer, make_tracer
from llm42_serve.ingress.failover import Failover, ReplicaLost
from llm42_serve.ingress.router import NEAR
from llm42_serve.ray_metrics import RayMetrics

STATUS_TIMEOUT_S = 2.0
REPORT_S = 1.0


class RayBackend:
    """Generates through a deployment handle."""

    def __init__(
        self,
        fastpath: DeploymentHandle,
        facts: Facts,
        server: ServerSettings,
        metrics: Metrics,
        tracer: Tracer | None = None,
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        """facts: of this process, which makes the requests (llm42/fingerprint/request.py). decode: where
        prompts are logged."""
        self._facts, self._server, self._metrics = facts, server, metrics
        self._tracer, self._decode = tracer, decode
        self._generate = fastpath.options(method_name="generate", stream=True)
        self._status = fastpath.options(method_name="status")
        self._near_status = fastpath.options(method_name=NEAR)
        self._fingerprint = fastpath.options(method_name="fingerprint")
        self._verify_cold = fastpath.options(method_name="verify_cold")

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The output of one request, over as many replicas as it takes (failover.py)."""
        observed = Observed(request, self._metrics, self._tracer, self._decode)
        asked = observed.request
        lost = partial(self._metrics.inc, FAILOVERS, mode=mode_of(request))
        attempts = Failover(asked, self._server, lost).run(lambda r: self._try(r, again=r is not asked))
        return observed.run(attempts)

    @asynccontextmanager
    async def _try(self, request: Request, again: bool) -> AsyncIterator[AsyncIterator[Delta | LLM42Error]]:
        """One replica's answer, as it comes. Ray's errors become ours."""
        stream = self._generate.remote(request, self._facts, again)
        ended = False
        try:
            yield stream
            ended = True  # the replica ends by itself now, and counts it
        except BackPressureError as error:
            raise Overloaded(
                "Too many requests wait for a fast-path replica: send the request again later."
            ) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise ReplicaLost("The replica of this request is gone; send it again.") from error
        except RayTaskError as error:  # before ours: Ray's may be of both kinds
            if isinstance(error.cause, LLM42Error):
                raise error.cause from error
            raise
        except LLM42Error:
            ended = True
            raise
        finally:
            if not ended:
                stream.cancel()

    async def fingerprint(self, agreed: bool = False) -> tuple[str, dict[str, Any]]:
        """By way of a replica, which knows the verifiers."""
        facts = self._facts if agreed else None
        found: tuple[str, dict[str, Any]] = await self._ask(self._fingerprint, facts)
        return found

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """By way of a replica too."""
        found: list[Commit | Failure] = await self._ask(self._verify_cold, list(windows), self._facts)
        return found

    async def _ask(self, method: DeploymentHandle, *args: Any) -> Any:
        """One call; its typed error is raised."""
        try:
            answer = await method.remote(*args)
        except BackPressureError as error:
            raise Overloaded(
                "Too many requests wait for a fast-path replica: send the request again later."
            ) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise VerifierUnavailable("The replica of this call is gone; repeat it.") from error
        if isinstance(answer, LLM42Error):
            raise answer
        return answer

    async def status(self, near: bool = False) -> Status:
        """One replica's view; `serving` is false when none answers in time."""
        try:
            asked = self._near_status.remote() if near else self._status.remote(self._facts)
            status: Status = await asyncio.wait_for(asked, STATUS_TIMEOUT_S)
            return status
        except Exception as error:
            detail = f"No fast-path replica answers ({type(error).__name__}); it may still be starting."
            return Status(serving=False, detail=detail)


class Ingress:
    """Holds no model; it tokenises, validates and renders. Any number of replicas."""

    def __init__(self, settings: dict[str, Any], fastpath: DeploymentHandle) -> None:
        self._settings = Settings.load(settings)
        self._tokenizer = check_model(self._settings.model)
        telemetry = self._settings.telemetry
        configure(telemetry, "ingress")
        self._metrics = RayMetrics(Scope.INGRESS, in_replica=True, model=self._settings.model.name)
        self._reporter = asyncio.get_running_loop().create_task(self._report())
        self._backend = RayBackend(
            fastpath,
            request_facts(self._settings, self._tokenizer),
            self._settings.server,
            self._metrics,
            make_tracer(telemetry, "ingress"),
            self._tokenizer.decode if telemetry.log_prompts else None,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once the constructor has run."""
        app = create_app(self._settings, self._tokenizer, self._backend, self._metrics)
        keep_what_is_there()
        return app

    async def _report(self) -> None:
        while True:  # Ray forgets a gauge that is not set again
            self._metrics.set(INGRESS_TASKS, len(asyncio.all_tasks()))
            self._metrics.set(REPLICAS_WANTED, self._settings.server.fastpath_replicas)
            await asyncio.sleep(REPORT_S)
