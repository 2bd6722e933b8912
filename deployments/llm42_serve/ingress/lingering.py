"""Answers to requests that have not been read to their end: whoever still sends gets to read them.

A server that closes a connection while bytes of it are unread resets it. A client that sends first and reads
afterwards, as Python's urllib does, then sees the reset and never the answer: a body that is too long would
be told so to nobody. So what is left of the body is read and dropped before the answer ends, up to a bound.
It stands in Serve's proxy, which has the client's connection: ingresses are done with such a request by then.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_BYTES = 64 << 20
LINGER_S = 10.0
SILENCE_S = 2.0
"""So much is read, for so long in all, and so long where nothing comes; then the connection may be reset."""
_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Lingering:
    """ASGI, as the outermost layer: the end of an answer waits for the end of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes what has no body through."""
        if scope["type"] == "http" and _announces_body(Headers(scope=scope)):
            exchange = _Exchange(receive, send)
            receive, send = exchange.receive, exchange.send
        await self._app(scope, receive, send)


def _announces_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


class _Exchange:
    """A request and its answer, on one connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._read = self._answered = False
        """Whether the body is read, or its client gone; whether the whole answer is on its way."""

    async def receive(self) -> Message:
        """For the application; once it has answered, the rest is not its own."""
        return {"type": "http.disconnect"} if self._answered else await self._next()

    async def send(self, message: Message) -> None:
        """The answer as it comes. Its last message is held back while the client sends."""
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not self._read:
            self._answered = True
            await self._send({**message, "more_body": True})
            await self._drop_rest()
            message = _END
        await self._send(message)

    async def _drop_rest(self) -> None:
        left = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while left > 0 and not self._read:
                    async with asyncio.timeout(SILENCE_S):
                        left -= len((await self._next()).get("body", b""))

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._read = True
        return message
