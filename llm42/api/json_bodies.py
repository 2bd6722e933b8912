"""Request bodies as objects, without keeping the event loop, which all of an ingress's streams share, busy.

A small body is parsed where it arrives. A larger one is parsed and validated in a thread, one at a time; keys
take turns, and bodies of the usual lengths do not wait for huge ones. A
thread alone does not help: the C parser and pydantic hold the interpreter until they return, a list of empty
lists for seconds. So what looks like many values is read by the standard library's parser in Python, which
gives way every few milliseconds and stops where there are more parts or values than any request has; and what
pydantic would look at one by one is counted before.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from llm42.api.requests import MAX_PROMPTS
from llm42.config import Settings
from llm42.errors import RequestRejected

LARGE_BYTES = 32 << 10
"""From here on a body is read in a thread."""
LONG_BYTES = 256 << 10
"""From here on it waits in a queue of its own: a few may take a second or more each."""
MAX_BYTES = 8 << 20
"""Longest body of any request, in bytes; audits may need it."""
SPARE_BYTES, BYTES_PER_ID, BYTES_PER_CHARACTER = 64 << 10, 8, 6
"""For all but the prompts; of a token id with its comma and space; of a character that is escaped."""
MAX_FIELDS = 256
"""Members of the body itself."""
MAX_PARTS = 1 << 16
"""Objects, members of objects and lists in a body. A list counts twice: Python's garbage collector looks at
each of them, for as long as there is the body, and nothing else runs meanwhile."""
MAX_AUDIT_PARTS = 1 << 18
"""The same of an audit, whose records hold whole answers."""
MAX_IDS = 1 << 19
"""Token ids in a body, unless one prompt may have more."""
QUICK_NS = 10_000_000
"""The C parser may take about this long for a body in one go."""
_IDS = re.compile(r'"(prompt|tokens)"\s*:\s*\[$')
Scan = Callable[[str, int], tuple[Any, int]]


def most_bytes(settings: Settings, longest_token: int) -> int:
    """The longest body that is read of a generation request. longest_token: in characters.

    Room for one prompt of any text that fits the context, and for as many prompts as there may be as token
    ids (or as text of usual tokens); never more than MAX_BYTES.
    """
    context = settings.model.max_model_len
    ids, text = MAX_PROMPTS * context * BYTES_PER_ID, context * longest_token * BYTES_PER_CHARACTER
    return min(MAX_BYTES, SPARE_BYTES + max(ids, text))


class InvalidBody(ValueError):
    """What pydantic says of a body, without the body."""

    def __init__(self, found: Sequence[Any]) -> None:
        super().__init__(found)
        self.found = found


class Turns:
    """A lock that goes from key to key: who sends much waits for himself."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By key; the next one's first."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Holds the lock; among the same key's, first come, first served."""
        await self._enter(key)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, key: str) -> None:
        if not self._busy:
            self._busy = True
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it had been given to us
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            first = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind the others
            if not first.done():
                first.set_result(None)
                return
        self._busy = False


class BodyReader:
    """One per application: a large body waits for the one before it, a long one for long ones only."""

    def __init__(self, settings: Settings) -> None:
        context = settings.model.max_model_len
        self._ids = max(context, min(MAX_PROMPTS * context, MAX_IDS))
        self._large, self._long = Turns(), Turns()

    async def read(
        self, raw: bytes, kind: type[BaseModel], parts: int = MAX_PARTS, key: str = ""
    ) -> BaseModel:
        """The validated body. key: whose turn it is to be. Raises what json.loads does, InvalidBody and
        RequestRejected."""
        async with (self._long if len(raw) >= LONG_BYTES else self._large).turn(key):
            work = asyncio.ensure_future(asyncio.to_thread(self._read, raw, kind, parts))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # nobody ends a thread: the next one waits for it all the same
                raise

    def _read(self, raw: bytes, kind: type[BaseModel], parts: int) -> BaseModel:
        # the ids of an audit's many answers are bounded by its bytes alone
        value = load(raw, parts, self._ids + parts if parts <= MAX_PARTS else MAX_BYTES)
        try:
            if isinstance(value, dict):
                self._require_few(value)
            return kind.model_validate(value)
        except ValidationError as error:
            refusal: Exception = InvalidBody(error.errors(include_url=False, include_input=False))
        except RequestRejected as error:
            refusal = error.with_traceback(None)
        del value  # as in `load`
        raise refusal

    def _require_few(self, body: dict[str, Any]) -> None:
        if len(body) > MAX_FIELDS:
            raise RequestRejected(f"The body has {len(body)} fields; at most {MAX_FIELDS} are read.")
        for name in ("prompt", "tokens"):
            given = body.get(name)
            if isinstance(given, list):
                ids = len(given) + sum(
                    len(part) for part in given[: MAX_PROMPTS + 1] if isinstance(part, list)
                )
                if ids > self._ids:
                    text = f"{name}: {ids} token ids are more than one request may hold here, {self._ids}."
                    raise RequestRejected(text, name, "context_length_exceeded")


def text_of(raw: bytes) -> str:
    """A body's text: UTF-8, as JSON between systems is; the library would guess other encodings. Raises
    UnicodeDecodeError."""
    return raw.decode("utf-8-sig", "surrogatepass")


def load(raw: bytes, parts: int = MAX_PARTS, values: int = MAX_IDS) -> Any:
    """json.loads(raw), in short turns; at most `parts` objects, lists and members, and `values` elements of
    lists. Raises what json.loads does, and RequestRejected."""
    text = text_of(raw)
    # what stands in strings counts too: that only chooses the slower way
    lists, members, commas = raw.count(b"[") + raw.count(b"{"), raw.count(b":"), raw.count(b",")
    if 250 * lists + 150 * members + 50 * commas < QUICK_NS and 2 * lists + members <= parts:
        return json.loads(text)
    try:
        return _Reader(parts, values).decode(text)
    except Exception as error:
        # without the frames that hold what was read so far: the garbage collector alone would find that again
        raise error.with_traceback(None) from None


class _Reader(json.JSONDecoder):
    """The standard library's decoder without its C parser, which counts what it makes while it makes it."""

    def __init__(self, parts: int, values: int) -> None:
        super().__init__()
        self._most, self._made, self._most_values, self._values = parts, 0, values, 0
        self._depth, self._list = 0, ""
        """Of lists; what stands before the outermost one."""
        self.parse_object, self.parse_array = self._object, self._array
        self.scan_once = py_make_scanner(self)

    def _array(self, at: tuple[str, int], scan_once: Scan) -> tuple[list[Any], int]:
        self._count(2)
        if not self._depth:
            self._list = at[0][max(0, at[1] - 40) : at[1]]

        def element(text: str, position: int) -> tuple[Any, int]:
            self._values += 1
            if self._values > self._most_values:
                raise self._too_many_values()
            return scan_once(text, position)

        self._depth += 1
        made: tuple[list[Any], int] = JSONArray(at, element)
        self._depth -= 1
        return made

    def _object(self, at: tuple[str, int], strict: bool, scan_once: Scan, *args: Any) -> tuple[Any, int]:
        self._count(1)

        def member(text: str, position: int) -> tuple[Any, int]:
            self._count(1)
            return scan_once(text, position)

        made: tuple[dict[str, Any], int] = JSONObject(at, strict, member, *args)
        return made

    def _count(self, parts: int) -> None:
        self._made += parts
        if self._made > self._most:
            text = f"The body has more than {self._most} objects, members of objects and lists (these twice)."
            raise RequestRejected(text, code="body_too_complex")

    def _too_many_values(self) -> RequestRejected:
        found = _IDS.search(self._list)
        if found is None:
            text = f"The lists of the body have more than {self._most_values} elements."
            return RequestRejected(text, code="body_too_complex")
        text = f"{found[1]}: more than {self._most_values} token ids are more than one request may hold here."
        return RequestRejected(text, found[1], "context_length_exceeded")


class _BodyRequest(Request):
    """Its JSON is the validated body where that is large: FastAPI takes it as it is."""

    reader: BodyReader
    kind: type[BaseModel]
    parts: int

    async def json(self) -> Any:
        """Raises as `BodyReader.read`."""
        raw = await self.body()
        if len(raw) < LARGE_BYTES:
            return json.loads(text_of(raw))
        policy = getattr(self.state, "policy", None)
        return await self.reader.read(raw, self.kind, self.parts, policy.name if policy else "")


def body_route(reader: BodyReader, parts: int = MAX_PARTS) -> type[APIRoute]:
    """The class of routes whose handlers take a `body`."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner, kind = super().get_route_handler(), get_type_hints(self.endpoint).get("body")
            if kind is None:
                return inner

            async def handler(request: Request) -> Response:
                asked = _BodyRequest(request.scope, request.receive)
                asked.reader, asked.kind, asked.parts = reader, kind, parts
                return await inner(asked)

            return handler

    return BodyRoute
