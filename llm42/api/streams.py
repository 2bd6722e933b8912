"""Streamed answers: when they begin, what they send, and a sign of life while there is nothing to send."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llm42.api.asgi import ClientGone, until_disconnect
from llm42.api.errors import Errors, status_of
from llm42.api.plan import HttpRequestPlan
from llm42.api.render import Renderer
from llm42.api.reply_writer import DONE, HEARTBEAT, ReplyWriter, event
from llm42.protocol import Delta

log = logging.getLogger(__name__)
Piece = tuple[int, Delta]
Pieces = AsyncGenerator[Piece, None]
First = asyncio.Task[Piece | None]


async def begin(http: HttpRequest, pieces: Pieces, patience_s: float) -> First:
    """The first piece, as a task that may still run when `patience_s` (0: no limit) has passed: from then on
    the answer is a stream. Until then an error is raised here, and gets an HTTP status."""
    first: First = asyncio.ensure_future(anext(pieces, None))
    try:
        await until_disconnect(http.receive, asyncio.wait([first], timeout=patience_s or None))
        if first.done():
            first.result()
    except BaseException:
        await end(first, pieces)
        raise
    return first


async def end(first: First, pieces: Pieces) -> None:
    """Ends the pieces, wherever they are: still at the first one too."""
    first.cancel()
    await asyncio.wait([first])
    await pieces.aclose()


async def events_of(
    made: HttpRequestPlan,
    renderer: Renderer,
    first: First,
    pieces: Pieces,
    writer: ReplyWriter,
    answers: Errors,
) -> AsyncGenerator[str, None]:
    """Server-sent events: chunks, then usage if asked for, or one error event; `[DONE]` always comes last."""
    try:
        item = await first
        while item is not None:
            index, delta = item
            if renderer.add(index, delta):
                yield event(await writer.write(renderer.size(index), partial(renderer.chunk, index)))
            item = await anext(pieces, None)
        if made.include_usage:
            yield event(await writer.write(0, renderer.usage_chunk))
    except Exception as error:
        if status_of(error) == 500:
            log.exception("a stream failed")
        yield answers.as_event(error)
    yield DONE


class EventStream(Response):
    """Server-sent events from a generator. Where it has nothing for `heartbeat_s` (0: never mind), a comment
    is sent between two events: what the events are does not change with it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
        heartbeat_s: float,
    ) -> None:
        """close: what is to be ended with the stream, also when the client has gone before it began."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._close, self._heartbeat_s = events, close, heartbeat_s
        self._sending, self._sent = asyncio.Lock(), time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends head and events; returns quietly when the connection breaks."""
        beating = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._heartbeat_s:
                beating = asyncio.ensure_future(self._beat(send))
            await until_disconnect(receive, self._send_all(send))
        except (ClientGone, OSError):
            return
        finally:
            if beating is not None:
                beating.cancel()
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        async for text in self._events:
            await self._put(send, text)
        async with self._sending:  # no comment after the end
            self._sent = float("inf")
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, text: str) -> None:
        async with self._sending:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            self._sent = time.monotonic()

    async def _beat(self, send: Send) -> None:
        with suppress(OSError):  # the client has gone, which is noticed where the events are sent
            while (left := self._sent + self._heartbeat_s - time.monotonic()) < float("inf"):
                if left > 0 or self._sending.locked():  # a client that does not read needs no more
                    await asyncio.sleep(left if left > 0 else self._heartbeat_s)
                else:
                    await self._put(send, HEARTBEAT)
