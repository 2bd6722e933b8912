"""Every error leaves in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from llm42.api.json_bodies import InvalidBody
from llm42.api.reply_writer import event as event_of
from llm42.errors import LLM42Error, RequestRejected
from llm42.telemetry.logs import event
from llm42.telemetry.metrics import REJECTS, Metrics
from llm42.validation import complaint

log = logging.getLogger(__name__)
MAX_PATH_CHARS = 200
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 100
RETRY_AFTER_S = {429: 1, 503: 5}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_encoding",
}
"""Of errors that say nothing else."""


class ModelNotFound(RequestRejected):
    """The request names a model that is not served (HTTP 404)."""

    code, status = "model_not_found", 404

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"The model '{name}' is not served here; this server has '{served}'.", "model")


class BodyTooLarge(RequestRejected):
    """The body is longer than the server reads (HTTP 413)."""

    code, status = "body_too_large", 413


class Unauthorized(RequestRejected):
    """No valid API key was presented (HTTP 401)."""

    code, status = "invalid_api_key", 401


class Forbidden(RequestRejected):
    """The API key does not allow what was asked (HTTP 403)."""

    code, status = "not_allowed", 403


class ServiceUnavailable(LLM42Error):
    """No fast-path replica answers (HTTP 503 with Retry-After)."""

    code, status = "service_unavailable", 503


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for anything that is not ours."""
    return error.status if isinstance(error, LLM42Error) else 500


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON value of an error; what a request held is quoted in part only. code: None: the status' own."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if param is not None:
        param = param[:MAX_PARAM_CHARS]
    own = _CODES.get(status, LLM42Error.code if status >= 500 else RequestRejected.code)
    message = message[:MAX_MESSAGE_CHARS]
    return {"error": {"message": message, "type": kind, "param": param, "code": code or own}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, JSON value) of an exception; internals of unexpected ones stay in the log."""
    status = status_of(error)
    if isinstance(error, LLM42Error):
        return status, error_object(str(error), status, getattr(error, "param", None), error.code)
    return status, error_object(
        "The server failed to answer; its log has the cause.", 500, None, "internal_error"
    )


class ErrorReply(Response):
    """An error as it is sent, with its line in the log: where it is sent, the request is known."""

    def __init__(self, status: int, body: dict[str, Any], headers: dict[str, str], reason: str) -> None:
        """reason: what the log says, which holds nothing of a prompt."""
        # ASCII, because the message may quote a lone surrogate that the request held
        super().__init__(json.dumps(body), status, headers, media_type="application/json")
        self._code, self._reason = body["error"]["code"], reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Logs and sends."""
        event(
            log,
            "refused" if self.status_code < 500 else "failed",
            request_id=scope.get("state", {}).get("request_id"),
            status=self.status_code,
            code=self._code,
            reason=self._reason,
            method=scope["method"],
            path=scope["path"][:MAX_PATH_CHARS],
        )
        await super().__call__(scope, receive, send)


class Errors:
    """Errors as responses, counted by their code."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def respond(
        self,
        status: int,
        body: dict[str, Any],
        reason: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """The error as a response, with Retry-After where waiting helps. reason: for the log; the message.
        headers: further ones."""
        self._metrics.inc(REJECTS, reason=body["error"]["code"])
        retry = RETRY_AFTER_S.get(status)
        headers = dict(headers or {}) | ({"Retry-After": str(retry)} if retry else {})
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return ErrorReply(status, body, headers, body["error"]["message"] if reason is None else reason)

    def from_exception(self, error: Exception) -> Response:
        """The response of an exception: our typed errors, and 500 for the rest."""
        status, body = describe(error)
        # what a chat template or a parser says of its input may quote it
        quotes = isinstance(error, RequestRejected) and error.__cause__ is not None
        return self.respond(status, body, str(error).partition(":")[0] if quotes else None)

    def as_event(self, error: Exception) -> str:
        """The event that ends a stream which has already begun; counted like the others."""
        body = describe(error)[1]
        self._metrics.inc(REJECTS, reason=body["error"]["code"])
        return event_of(json.dumps(body))

    async def on_validation_error(self, request: Request, error: Exception) -> Response:
        """FastAPI's 422 becomes a 400 that names the field, or says why the body is no JSON object."""
        assert isinstance(error, RequestValidationError)
        found = error.errors()
        if found[0]["type"] == "json_invalid":
            text = f"The body is not valid JSON: {found[0]['ctx']['error']} at position {found[0]['loc'][1]}."
            return self.respond(400, error_object(text, 400, None, "invalid_json"))
        told = complaint(found)
        if told.loc == ("body",) and told.kind in _NO_OBJECT:
            return self.respond(400, _no_object(told.kind, request))
        return self.respond(400, error_object(told.text, 400, told.param, "invalid_value"))

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        """Unknown paths, wrong methods, unreadable bodies."""
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, LLM42Error):  # a body that was read in a thread (json_bodies.py)
            return self.from_exception(error.__cause__)
        if isinstance(error.__cause__, InvalidBody):
            inside = [{**each, "loc": ("body", *each["loc"])} for each in error.__cause__.found]
            return await self.on_validation_error(request, RequestValidationError(inside))
        status, text, code = error.status_code, str(error.detail), None
        if status == 400 and error.__cause__ is not None:
            text, code = _unreadable(error.__cause__), "invalid_json"
        if status == 404:
            text = f"There is no {request.url.path[:MAX_PATH_CHARS]} here; /openapi.json lists what there is."
        return self.respond(status, error_object(text, status, None, code), headers=error.headers)

    async def on_error(self, _: Request, error: Exception) -> Response:
        """What a handler has let through."""
        return self.from_exception(error)


_NO_OBJECT = frozenset({"missing", "model_attributes_type", "model_type", "dict_type"})
"""What pydantic says of a body that is no JSON object."""


def _no_object(kind: str, request: Request) -> dict[str, Any]:
    """The error of a body that is empty, is another JSON value, or was not read as JSON."""
    content_type = request.headers.get("content-type", "")
    if kind == "missing":
        return error_object("The body is empty; a JSON object is needed.", 400, None, "invalid_json")
    if content_type and "json" not in content_type.lower():
        text = f"The body was not read: its Content-Type must be application/json, not '{content_type}'."
        return error_object(text, 400, None, "invalid_value")
    return error_object("The body must be a JSON object.", 400, None, "invalid_value")


def _unreadable(cause: BaseException) -> str:
    """Why a body could not be decoded; FastAPI itself names JSON's syntax errors only."""
    if isinstance(cause, UnicodeDecodeError):
        return f"The body is not valid UTF-8: {cause.reason} at byte {cause.start}."
    if isinstance(cause, RecursionError):
        return "The body is nested too deeply."
    if isinstance(cause, ValueError) and "digits" in str(cause):
        return "A number in the body has too many digits."
    return "The body could not be read."
