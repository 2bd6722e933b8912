"""ASGI pieces that notice a client who has left, and bodies that are too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments import errors

MAX_BODY_BYTES = 8 << 20
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(http: Request, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it when the client closes the connection first (then raises ClientGone).

    The request's body must have been read before.
    """
    return await _unless_disconnected(http.receive, work)


async def _unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
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


class EventStream(Response):
    """Server-sent events from a generator, which is closed as soon as the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends head and events; returns quietly when the connection breaks."""
        try:
            await _unless_disconnected(receive, self._send_all(send))
        except (ClientGone, OSError):
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class BodyLimit:
    """Refuses request bodies over MAX_BODY_BYTES, announced or not (HTTP 413)."""

    def __init__(self, app: ASGIApp, answers: errors.Errors) -> None:
        self._app, self._answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything else through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            await self._answers.from_exception(errors.BodyTooLarge(_TOO_LONG))(scope, receive, send)
            return
        await self._app(scope, _counted(receive), send)


_TOO_LONG = f"At most {MAX_BODY_BYTES} bytes of body are read."


def _counted(receive: Receive) -> Callable[[], Awaitable[Message]]:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LONG)  # what FastAPI lets through while it reads a body
        return message

    return counted
