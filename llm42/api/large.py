"""Replies of many log-probabilities: bounded, and written without keeping the event loop, which all streams
of an ingress share, from its work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from llm42.api.plan import Plan
from llm42.errors import RequestRejected

MAX_ENTRIES = 1 << 20
"""Log-probabilities, alternatives included, that one reply may hold: some seconds of one CPU core, and some
hundred megabytes while it is written."""
LARGE = 2000
"""From how many values on a reply is written in a thread; each takes about 4 microseconds."""
SLICE = 64
"""Elements of a list that are encoded in one go."""

_encode = json.JSONEncoder(ensure_ascii=False).encode
_T = TypeVar("_T")


def require_renderable(plan: Plan) -> None:
    """Refuses a request whose reply could hold more than MAX_ENTRIES log-probabilities: alternatives + 1 for
    each token of a prompt that has them, and of an output unless it is streamed, where they leave as they
    come. Raises RequestRejected.
    """
    shown = 0 if plan.num_logprobs is None else plan.num_logprobs + 1
    own = 0 if plan.prompt_logprobs is None else plan.prompt_logprobs + 1
    echoed = shown if plan.echoes is not None else 0
    written = plan.prompts if plan.chat else [r.prompt for r in plan.requests]
    prompts = sum(len(p) for p in written) * (own + echoed)
    outputs = 0 if plan.stream else sum(r.max_tokens for r in plan.requests) * shown
    if prompts + outputs > MAX_ENTRIES:
        raise RequestRejected(
            f"The reply could hold {prompts + outputs} log-probabilities, of all tokens and alternatives; the"
            f" limit is {MAX_ENTRIES}. Ask for fewer alternatives, prompts or choices, for a smaller"
            " max_tokens, or for a stream.",
            "prompt_logprobs" if own and prompts > outputs else "logprobs",
        )


class OffLoop:
    """Does what takes long in a thread, one thing at a time: threads share the interpreter with the loop, and
    each would take its turns from the streams."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """The result of `work`, which handles `size` values."""
        if size < LARGE:
            return work()
        async with self._free:
            return await asyncio.to_thread(work)


def dump(value: Any, depth: int = 0, name: str = "") -> str:
    """json.dumps(value, ensure_ascii=False) of a reply or a chunk, by many short calls of the encoder: it
    holds the interpreter until it returns, so a thread alone would not help."""
    if isinstance(value, dict) and depth < 4:
        members = (f"{_encode(key)}: {dump(member, depth + 1, key)}" for key, member in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list) and name == "choices":
        return "[" + ", ".join(dump(choice, depth + 1) for choice in value) + "]"
    if isinstance(value, list) and len(value) > SLICE:
        slices = (value[at : at + SLICE] for at in range(0, len(value), SLICE))
        return "[" + ", ".join(_encode(part)[1:-1] for part in slices) + "]"
    return _encode(value)
