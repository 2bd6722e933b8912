"""Replies as text: JSON and server-sent events. Large ones are written in a thread: all streams of an ingress
share its event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

LARGE = 2000
"""From how many values on a reply is written in a thread; each takes about 10 microseconds there."""
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What many readers of lines take for the end of one, and JSON leaves as it is; JSON escapes the others."""

DONE = "data: [DONE]\n\n"
"""The event that ends every stream."""
HEARTBEAT = ": still working\n\n"
"""A comment: clients skip it, and what watches the connection sees that it is alive."""


def event(json_text: str) -> str:
    """The event for one JSON value, on one line whatever its reader takes for the end of a line."""
    if not json_text.isascii():
        for char, escape in _LINE_ENDS.items():
            json_text = json_text.replace(char, escape)
    return f"data: {json_text}\n\n"


def dump(value: Any) -> str:
    """json.dumps(value, ensure_ascii=False) by the library's encoder in Python: the one in C holds the
    interpreter until it returns, so a thread alone would not help."""
    text = io.StringIO()  # joining a million pieces at the end would hold it for 20 ms too
    json.dump(value, text, ensure_ascii=False)
    return text.getvalue()


class ReplyWriter:
    """Writes what is large one at a time: threads share the interpreter with the loop, and each would take
    its turns from the streams."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def write(self, size: int, make: Callable[[], Any]) -> str:
        """The JSON of what `make` returns, which has about `size` values."""
        if size < LARGE:
            return json.dumps(make(), ensure_ascii=False)
        async with self._free:
            return await asyncio.to_thread(lambda: dump(make()))
