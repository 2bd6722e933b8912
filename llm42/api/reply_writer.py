"""The JSON of replies. Large ones are written in a thread: all streams of an ingress share its event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

LARGE = 2000
"""From how many values on a reply is written in a thread; each takes about 10 microseconds there."""


def dump(value: Any) -> str:
    """json.dumps(value, ensure_ascii=False) by the library's encoder in Python: the one in C holds the
    interpreter until it returns, so a thread alone would not help."""
    text = io.StringIO()
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
