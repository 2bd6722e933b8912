"""What stands before the routes, as ASGI: request ids, paths, methods, encodings, pages that may read the
answers, bodies that are too long; and noticing a client who has left.

Nothing that a request meets before its key says more of the server than its documentation does.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm42.api import errors
from llm42.telemetry.logs import bound

REQUEST_ID = "X-Request-ID"
MAX_REQUEST_ID = 256
METHODS = ("GET", "POST")
"""What the routes are written for; HEAD comes with GET, and OPTIONS with every path."""
EXPOSED = ("X-Request-ID", "X-LLM42-Request", "X-LLM42-Replica", "X-LLM42-Verifier", "Retry-After")
"""Headers of answers that a page's script may read."""
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it when the client closes the connection first (then raises ClientGone).

    receive: the connection's; the request's body must have been read before.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


class HttpOnly:
    """ASGI: passes everything but HTTP through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's, or `http` where a request has come."""
        await (self.http if scope["type"] == "http" else self._app)(scope, receive, send)

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or lets the application."""
        raise NotImplementedError


class BodyLimit(HttpOnly):
    """Refuses request bodies that are too long, announced or not (HTTP 413), and those that do not come in
    time (HTTP 408)."""

    def __init__(
        self, app: ASGIApp, answers: errors.Errors, timeout_s: float, most: tuple[Mapping[str, int], int]
    ) -> None:
        """most: bytes by path, and those of all other paths."""
        super().__init__(app)
        self._answers, self._timeout_s, self._most = answers, timeout_s, most

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything else through."""
        most = self._most[0].get(get_route_path(scope), self._most[1])
        announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > most):
            await self._answers.from_exception(errors.BodyTooLarge(_too_long(most)))(scope, receive, send)
            return
        await self._app(scope, _counted(receive, self._timeout_s, most), send)


class RequestIds(HttpOnly):
    """Gives every answer an X-Request-ID: the client's own, if it is fit for a header, else the handler's,
    else a new one. `request_id` of the request's state is ours in any case, and a handler may set it;
    lines of the log have the client's as `client_request_id`."""

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every request."""
        given = Headers(scope=scope).get(REQUEST_ID, "")
        logged = "".join(c if c.isascii() and c.isprintable() else "?" for c in given[:MAX_REQUEST_ID])
        if not (given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID):
            given = ""
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = given or headers.get(REQUEST_ID) or state["request_id"]
            await send(message)

        with bound(client_request_id=logged):
            await self._app(scope, receive, with_id)


def _too_long(most: int) -> str:
    return f"The body is too long: at most {most} bytes are read here, by the model's context. Send less."


def _counted(receive: Receive, timeout_s: float, most: int) -> Callable[[], Awaitable[Message]]:
    """`receive` with both bounds, which end with the body: what comes later is the client leaving."""
    seen, ended = 0, False
    deadline = time.monotonic() + timeout_s

    async def counted() -> Message:
        nonlocal seen, ended
        try:
            left = None if ended else max(0.0, deadline - time.monotonic())
            message = await asyncio.wait_for(receive(), left)
        except TimeoutError as error:
            raise HTTPException(
                408, f"The body did not arrive within {timeout_s:g} s: send the request again."
            ) from error
        ended = ended or not message.get("more_body", False)
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, _too_long(most))  # what FastAPI lets through while it reads a body
        return message

    return counted


class Front(HttpOnly):
    """ASGI: takes a path with or without `server.root_path` and slashes too many, answers HEAD where GET is
    answered and OPTIONS everywhere, and refuses other methods (405) and compressed bodies (415)."""

    def __init__(
        self, app: ASGIApp, answers: errors.Errors, routes: Sequence[BaseRoute], root_path: str = ""
    ) -> None:
        """routes: of the application; read at each request."""
        super().__init__(app)
        self._answers, self._routes = answers, routes
        self._root = list(filter(None, root_path.split("/")))

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, refuses, or passes on."""
        scope = {**scope, "path": self._own_path(scope)}
        method = scope["method"]
        if method == "HEAD" and self._takes(scope, "GET"):
            await self._app({**scope, "method": "GET"}, receive, _without_body(send))
            return
        refusal = None if self._takes(scope, method) else self._other_method(scope)
        refusal = refusal or self._encoded(scope)
        await (refusal or self._app)(scope, receive, send)

    def _own_path(self, scope: Scope) -> str:
        """Without `server.root_path`, unless the path with it is one of the API: under /v1 only /v1/... may
        be published. What the server itself has put in front (a route prefix) stays there."""
        path: str = scope["path"]
        own = get_route_path(scope)
        front = path[: len(path) - len(own)]
        parts = list(filter(None, own.split("/")))
        whole = front + "/" + "/".join(parts)
        if not self._root or parts[: len(self._root)] != self._root or self._known({**scope, "path": whole}):
            return whole
        return front + "/" + "/".join(parts[len(self._root) :])

    def _known(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] != Match.NONE for route in self._routes)

    def _takes(self, scope: Scope, method: str) -> bool:
        asked = {**scope, "method": method}
        return any(route.matches(asked)[0] == Match.FULL for route in self._routes)

    def _other_method(self, scope: Scope) -> Response | None:
        """The answer to a method that the path does not take; None: there is no such path."""
        taken = [method for method in METHODS if self._takes(scope, method)]
        if not taken:
            return None
        allowed = ", ".join([*taken, *(["HEAD"] if "GET" in taken else []), "OPTIONS"])
        if scope["method"] == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        text = f"{scope['method'][:20]} is not allowed here; {scope['path'][:200]} takes {allowed}."
        return self._answers.respond(405, errors.error_object(text, 405), headers={"Allow": allowed})

    def _encoded(self, scope: Scope) -> Response | None:
        encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return None
        text = f"Content-Encoding: '{encoding[:50]}' is not read here: send the body uncompressed."
        body = errors.error_object(text, 415, "Content-Encoding")
        return self._answers.respond(415, body, headers={"Accept-Encoding": "identity"})


def _without_body(send: Send) -> Send:
    async def bodiless(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return bodiless


class Cors(CORSMiddleware):
    """Lets scripts of the pages in `server.cors_origins` use the API; a preflight, which cannot carry a key,
    is answered before one is asked for."""

    def __init__(self, app: ASGIApp, answers: errors.Errors, origins: Sequence[str]) -> None:
        everything: dict[str, Any] = {"allow_methods": [*METHODS, "HEAD", "OPTIONS"], "allow_headers": ["*"]}
        super().__init__(app, allow_origins=origins, expose_headers=EXPOSED, **everything)
        self._answers = answers

    def preflight_response(self, request_headers: Headers) -> Response:
        """The library's; a refusal in the shape of all errors."""
        reply = super().preflight_response(request_headers)
        if reply.status_code < 400:
            return reply
        text = f"{bytes(reply.body).decode()}: see server.cors_origins."
        headers = {"Vary": reply.headers["vary"]} if "vary" in reply.headers else {}
        return self._answers.respond(400, errors.error_object(text, 400, "Origin"), headers=headers)
