"""The first look at a request, before its key: path, method, encoding; and which pages may read the answers.

Nothing here says more of the server than its documentation does, so it needs no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm42.api import errors
from llm42.api.asgi import HttpOnly

METHODS = ("GET", "POST")
"""What the routes are written for; HEAD comes with GET, and OPTIONS with every path."""
EXPOSED = ("X-Request-ID", "X-LLM42-Request", "X-LLM42-Replica", "X-LLM42-Verifier", "Retry-After")
"""Headers of answers that a page's script may read."""


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
        text = f"{scope['method'][:20]} is not answered here; {scope['path'][:200]} takes {allowed}."
        return self._answers.respond(405, errors.error_object(text, 405), headers={"Allow": allowed})

    def _encoded(self, scope: Scope) -> Response | None:
        encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return None
        text = f"Content-Encoding: '{encoding[:50]}' is not read here; send the body as it is."
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
