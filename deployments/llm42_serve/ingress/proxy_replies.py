"""What stands before Serve's HTTP proxy, in its process: its own replies get the service's error shape.

Serve calls `middlewares`: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it (launch.py; the chart's pods).
"""

from __future__ import annotations

import json
import re
import uuid

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm42.api.errors import RETRY_AFTER_S, error_object
from llm42.api.reply_writer import DONE, event
from llm42_serve.ingress.lingering import Lingering

CONTROL_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""With them any client could switch off what Serve does for all: they are for a proxy before it."""
DECODED_HEADERS = (b"x-request-id", b"traceparent", b"multiplexed-model-id", b"session-id")
"""Ends of the names of headers that Serve reads as UTF-8: other bytes, on which it fails, do not pass."""
SERVES_OWN_PATHS = "/-/"
_MESSAGES = {
    404: (503, "The application is still starting: send the request again later.", "service_unavailable"),
    408: (408, "There was no answer within the request timeout.", "request_timeout"),
    429: (429, "Too many requests wait for an ingress replica: send the request again later.", "overloaded"),
    503: (503, "No ingress replica can answer now: send the request again later.", "service_unavailable"),
}
"""Serve's status -> ours: its 404 says that no application is deployed, since ours takes all paths."""
_OWN_WORDS = {
    404: re.compile(rb"Path '.*' not found\. Ping http://\.\.\./-/routes for available routes\.", re.DOTALL),
    408: re.compile(rb"Request \S+ timed out( after \S+s)?\."),
    429: re.compile(rb"Request dropped due to backpressure \(.*\)\."),
    500: re.compile(rb"Internal Server Error"),
    503: re.compile(
        rb"Request dropped due to backpressure \(.*\)\.|.* is unavailable because it failed to deploy\."
    ),
}
"""What Serve itself says in plain text; another application of the cluster says something else."""
_LOST = "The answer was broken off; send the request again."
_BROKEN = (500, "The server failed to answer; its log has the cause.", "internal_error")


def middlewares() -> list[Middleware]:
    """What Serve puts around its proxy, the outermost last."""
    return [Middleware(ProxyReplies), Middleware(Lingering)]


class ProxyReplies:
    """Drops headers that only Serve itself may act on, and turns its own plain-text replies, and answers that
    it breaks off, into error objects and error events."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything but HTTP, and Serve's own paths, through."""
        if scope["type"] != "http" or scope["path"].startswith(SERVES_OWN_PATHS):
            await self._app(scope, receive, send)
            return
        kept = [header for header in scope["headers"] if _passes(*header)]
        reply = _Reply(scope, receive, send)
        await self._app({**scope, "headers": kept}, receive, reply.take)
        await reply.end()


def _passes(name: bytes, value: bytes) -> bool:
    name = name.lower()
    if name.replace(b"_", b"-").endswith(DECODED_HEADERS):
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
    return name not in CONTROL_HEADERS


class _Reply:
    """One reply on its way out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._id = Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex
        self._begun = self._replaced = self._events = self._ended = False
        self._held: Message | None = None
        """The start of an error in plain text: its body says whose it is."""

    async def take(self, message: Message) -> None:
        """A message of Serve's: passed on, or replaced."""
        if message["type"] == "http.response.start":
            self._begun = True
            headers = Headers(raw=message["headers"])
            kind = headers.get("content-type", "").lower()
            self._events = kind.startswith("text/event-stream")
            # an exception in a replica has no content type; an application's framework gives its errors one
            own = not kind or (kind.startswith("text/plain") and message["status"] != 500)
            if own and message["status"] in _OWN_WORDS:
                self._held, self._id = message, headers.get("x-request-id", self._id)
                return
        elif message["type"] == "http.response.body":
            self._ended = self._ended or not message.get("more_body", False)
            await self._release(message)
        if not self._replaced:
            await self._send(message)

    async def _release(self, body: Message) -> None:
        """What was held back, or ours instead. Serve's own replies have one body, and it is whole."""
        start, self._held = self._held, None
        if start is None:
            return
        status = start["status"]
        if not body.get("more_body", False) and _OWN_WORDS[status].fullmatch(body.get("body", b"")):
            self._replaced = True
            await self._error(*_MESSAGES.get(status, _BROKEN))
        else:
            await self._send(start)

    async def end(self) -> None:
        """Serve has said all. A client that has left hears no more."""
        if not self._begun or self._held is not None:
            await self._error(*_BROKEN)
        elif self._events and not self._ended:
            error = event(json.dumps(error_object(_LOST, 503, None, "service_unavailable")))
            body = (error + DONE).encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _error(self, status: int, message: str, code: str) -> None:
        body = json.dumps(error_object(message, status, None, code))
        headers = {"x-request-id": self._id}
        if status in RETRY_AFTER_S:
            headers["retry-after"] = str(RETRY_AFTER_S[status])
        reply = Response(body, status, headers, media_type="application/json")
        await reply(self._scope, self._receive, self._send)
