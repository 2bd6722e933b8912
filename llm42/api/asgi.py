"""ASGI pieces that notice a client who has left, and bodies that are too long."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm42.api import errors
from llm42.telemetry.logs import bound

REQUEST_ID = "X-Request-ID"
MAX_REQUEST_ID = 256
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
    return f"At most {most} bytes of body are read here (by the model's context)."


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
            raise HTTPException(408, f"The body was not there after {timeout_s:g} s.") from error
        ended = ended or not message.get("more_body", False)
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, _too_long(most))  # what FastAPI lets through while it reads a body
        return message

    return counted
