"""The HTTP surface as a plain FastAPI application over a `Backend`; it knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from llm42 import __version__
from llm42.api import errors
from llm42.api.asgi import BodyLimit, ClientGone, Cors, Front, RequestIds, until_disconnect
from llm42.api.audit_routes import audit_routes
from llm42.api.backend import Backend
from llm42.api.deltas import choices
from llm42.api.docs_page import HEADERS, page
from llm42.api.gateway_metrics import gateway_routes
from llm42.api.json_bodies import MAX_BYTES, BodyReader, body_route, most_bytes
from llm42.api.keys import KeyGate, KeyPolicy
from llm42.api.logprobs import require_few
from llm42.api.plan import plan_request
from llm42.api.render import Renderer
from llm42.api.reply_writer import ReplyWriter
from llm42.api.requests import ChatBody, CompletionBody, GenerationBody
from llm42.api.streams import EventStream, Pieces, begin, end, events_of
from llm42.api.text_routes import text_routes
from llm42.config import Settings
from llm42.errors import LLM42Error
from llm42.receipt import Keyring
from llm42.telemetry.metrics import Metrics
from llm42.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def create_app(
    settings: Settings, tokenizer: Tokenizer, backend: Backend, metrics: Metrics | None = None
) -> FastAPI:
    """The application; every reply and error is in OpenAI's shape, and every error status is counted."""
    app = FastAPI(
        title="LLM-42",
        version=__version__,
        docs_url=None,  # the library's page loads its scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # Front takes them as they are
        strict_content_type=False,
    )
    answers, reader = errors.Errors(metrics or Metrics()), BodyReader(settings)
    app.router.route_class = body_route(reader)
    app.add_exception_handler(RequestValidationError, answers.on_validation_error)
    app.add_exception_handler(HTTPException, answers.on_http_exception)
    app.add_exception_handler(LLM42Error, answers.on_error)
    app.add_exception_handler(Exception, answers.on_error)
    keyring = Keyring.load(settings.audit)
    service = _Service(settings, tokenizer, backend, answers, keyring)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        return await service.answer(body, http)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        return await service.answer(body, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return service.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != settings.model.name:
            return answers.from_exception(errors.ModelNotFound(name, settings.model.name))
        return JSONResponse(service.models()["data"][0])

    @app.get("/health")
    async def health() -> Response:
        return await service.health()

    app.include_router(audit_routes(settings, tokenizer, backend, answers, keyring, reader))

    app.include_router(gateway_routes(settings.model.name, backend))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page(app.openapi()), headers=HEADERS)

    app.include_router(text_routes(settings, tokenizer, reader))
    most = {"/v1/audit": MAX_BYTES}, most_bytes(settings, tokenizer.longest_token)
    app.add_middleware(BodyLimit, answers=answers, timeout_s=settings.server.body_timeout_s, most=most)
    app.add_middleware(KeyGate, settings=settings, answers=answers)
    app.add_middleware(Front, answers=answers, routes=app.routes, root_path=settings.server.root_path)
    if settings.server.cors_origins:
        app.add_middleware(Cors, answers=answers, origins=settings.server.cors_origins)
    app.add_middleware(RequestIds)
    return app


class _Service:
    """The handlers' logic."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        backend: Backend,
        answers: errors.Errors,
        keyring: Keyring,
    ) -> None:
        self._settings, self._tokenizer, self._backend = settings, tokenizer, backend
        self._answers, self._keyring, self._writer = answers, keyring, ReplyWriter()
        self._started = int(time.time())

    def models(self) -> dict[str, Any]:
        """OpenAI's list of models; here always one."""
        entry = {
            "id": self._settings.model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "llm42",
            "max_model_len": self._settings.model.max_model_len,
        }
        return {"object": "list", "data": [entry]}

    async def health(self) -> Response:
        """200 while the fast path serves; `deterministic` says whether verified answers are to be had too."""
        status = await self._backend.status()
        ready = status.serving and status.verifiers_ready > 0 and not status.skew
        word = "ok" if ready else "best_effort_only" if status.serving else "unavailable"
        body = {"status": word, "deterministic": ready, "version": __version__, **asdict(status)}
        return JSONResponse(body, 200 if status.serving else 503)

    async def answer(self, body: GenerationBody, http: HttpRequest) -> Response:
        """One generation request, whole or streamed. Errors before the first token have an HTTP status, in
        a stream if they come before its first heartbeat."""
        try:
            # Templates and tokenisers take milliseconds per long prompt: other streams must not wait.
            policy: KeyPolicy = http.state.policy
            wanted = policy.wants_determinism(body, http.headers)
            made = await asyncio.to_thread(plan_request, body, self._settings, self._tokenizer, wanted)
            http.state.request_id = made.id
            require_few(made)
            if made.deterministic:
                policy.require_share(len(made.requests))
            trace = http.headers.get("traceparent", "")
            asked = [policy.salted(replace(r, trace=trace)) for r in made.requests]
            held = policy.held(len(made.requests)) if made.deterministic else None
            pieces = choices(self._backend.generate, asked, len(made.prompts), held)
            renderer = Renderer(made, self._settings.model.name, self._tokenizer, self._keyring)
            if made.stream:
                patience_s = self._settings.server.heartbeat_s
                first = await begin(http, pieces, patience_s)
                known = first.result() if first.done() else None
                events = events_of(made, renderer, first, pieces, self._writer, self._answers)
                close = partial(end, first, pieces)
                return EventStream(events, renderer.headers(known), close, patience_s)
            text = await until_disconnect(http.receive, _whole(renderer, pieces, self._writer))
            return Response(text, headers=renderer.headers(), media_type="application/json")
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; the access log does
        except Exception as error:
            if errors.status_of(error) == 500:
                log.exception("a request failed")
            return self._answers.from_exception(error)


async def _whole(renderer: Renderer, pieces: Pieces, writer: ReplyWriter) -> str:
    async with aclosing(pieces):
        async for index, delta in pieces:
            renderer.add(index, delta)
    return await writer.write(renderer.size(), renderer.reply)
