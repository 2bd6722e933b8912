"""What stands between a generator and its verifier, and what takes its answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from llm42.protocol import Commit, Failure, Request, RequestStats, TokenLogprob, Window
from llm42.session.driver import Generator
from llm42.step_times import VerifierLoad
from llm42.verifier.scheduler import Verifier
from tests.support.oracle import Answer


class Wrapped:
    """A verifier whose answers a test changes, loses or delays: it overrides `verify`."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    @property
    def kv_tokens(self) -> int | None:
        """The verifier's own."""
        return self.verifier.kv_tokens

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Awaits the verifier's own answers."""
        return await self.verifier.verify(windows)

    def progressed_s(self, request_id: str) -> float:
        """It vouches for nothing: an answer that does not come is lost."""
        return math.inf

    def stop(self, request_id: str) -> None:
        """The verifier's own."""
        self.verifier.stop(request_id)

    @property
    def worked_s(self) -> float:
        """The verifier's own."""
        return self.verifier.worked_s

    def beside(self, worked_s: Callable[[], float]) -> None:
        """The verifier's own."""
        self.verifier.beside(worked_s)

    def load(self, request: Request | None) -> VerifierLoad | None:
        """The verifier's own."""
        return self.verifier.load(request)

    def release(self, request_id: str) -> None:
        """Drops what is held for a request."""
        self.verifier.release(request_id)


def verified(verifier: Verifier, *windows: Window) -> list[Commit | Failure]:
    """Waits for the answers of a verifier whose thread runs."""
    return [future.result() for future in [verifier.submit(window) for window in windows]]


class AcceptsEverything(Wrapped):
    """A broken verifier, which lets every candidate through."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        made = []
        for window, commit in zip(windows, await super().verify(windows), strict=True):
            assert isinstance(commit, Commit)
            count = len(window.candidates)
            lps = (commit.logprobs * (count + 1))[: count + 1]
            made.append(replace(commit, accepted=count, logprobs=lps))
        return list(made)


async def collect(generator: Generator, request: Request) -> Answer:
    """One whole output through the driver."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    text, finish, stats = "", None, RequestStats()
    async for delta in generator.generate(request):
        tokens += delta.token_ids
        logprobs += delta.logprobs
        text += delta.text
        finish, stats = delta.finish_reason, delta.stats or stats
    return Answer(tuple(tokens), tuple(logprobs), text, finish, stats)


def together(generator: Generator, requests: Sequence[Request]) -> list[Answer]:
    """All requests at once."""

    async def all_of_them() -> list[Answer]:
        return list(await asyncio.gather(*(collect(generator, r) for r in requests)))

    return asyncio.run(all_of_them())
