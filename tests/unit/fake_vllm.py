"""A small AsyncLLM for the adapter's tests: continuous batching with priorities, step by step, no model.

It keeps to what vLLM does where the adapter can notice: requests wait by (priority, arrival); a step gives
every running request one token; outputs that nobody has taken yet become one; those of aborted requests are
dropped; an abort ends the stream with a final output; with `lag` a token is handed over that many steps after
it was decoded, as under asynchronous scheduling. The token after a sequence is a function of that sequence,
so a wrong prefix shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from llm42.config import Settings
from llm42.engine.vllm.connection import Connection
from llm42.engine.vllm.engine import VllmEngine
from llm42.protocol import Request, SamplingParams
from tests.support import PATIENCE_S, Client

VOCAB = 1000


class Dead(Exception):
    """The engine process is gone."""


def next_token(tokens: Sequence[int]) -> int:
    """The token after a sequence; depends on all of it."""
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token + 7) % 999983
    return value % VOCAB


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """`count` tokens after a sequence."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


class Outbox:
    """One place for an output: tokens that are not taken in time are handed over together."""

    def __init__(self) -> None:
        self.pending: Any = None
        self.ready = asyncio.Event()

    def put(self, output: Any) -> None:
        if self.pending is not None and not isinstance(output, Exception):
            tokens = [*self.pending.outputs[0].token_ids, *output.outputs[0].token_ids]
            output = output_of(tokens, output.outputs[0].finish_reason)
        self.pending = output
        self.ready.set()

    async def get(self) -> Any:
        while self.pending is None:
            await self.ready.wait()
        output, self.pending = self.pending, None
        self.ready.clear()
        return output


@dataclass
class Job:
    """A request in the fake."""

    id: str
    tokens: list[int]
    params: SimpleNamespace
    priority: int
    number: int
    outbox: Outbox = field(default_factory=Outbox)
    made: int = 0
    late: list[Any] = field(default_factory=list)


def output_of(tokens: list[int], finish: str | None = None, logprobs: Any = None) -> SimpleNamespace:
    completion = SimpleNamespace(token_ids=tokens, finish_reason=finish, logprobs=logprobs)
    return SimpleNamespace(outputs=[completion], finished=finish is not None)


class FakeLLM:
    """Stands where AsyncLLM stands in a Connection. Used in the engine's loop only, but for `errored`."""

    def __init__(self, max_num_seqs: int = 4, lag: int = 0) -> None:
        self.max_num_seqs, self.lag = max_num_seqs, lag
        self.errored = False
        self.jobs: dict[str, Job] = {}
        self.running: list[Job] = []
        self.added: list[Job] = []
        self.log: list[tuple[str, str]] = []
        self.refuse: Callable[[str], bool] = lambda _id: False
        self.refusal: Exception = ValueError("refused")
        self.steps = 0
        self.closed = False

    async def generate(
        self, prompt: list[int], params: SimpleNamespace, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        if self.errored:
            raise Dead("dead")
        if self.refuse(request_id):
            raise self.refusal
        job = Job(request_id, list(prompt), params, priority, len(self.added))
        assert request_id not in self.jobs, "an id was used twice"
        self.jobs[request_id] = job
        self.added.append(job)
        self.log.append(("add", request_id))
        try:
            while True:
                output = await job.outbox.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort(request_id)
            raise

    async def abort(self, request_id: str) -> None:
        job = self.jobs.pop(request_id, None)
        if job is not None:
            self.log.append(("abort", request_id))
            if job in self.running:
                self.running.remove(job)
            job.outbox.put(output_of([], "abort"))

    def shutdown(self) -> None:
        self.closed = True

    def die(self) -> None:
        self.errored = True
        for job in self.jobs.values():
            job.outbox.put(Dead("dead"))
        self.jobs.clear()
        self.running.clear()

    def step(self) -> None:
        """One step of the whole batch."""
        self.steps += 1
        waiting = sorted(
            (j for j in self.jobs.values() if j not in self.running), key=lambda j: (j.priority, j.number)
        )
        self.running += waiting[: self.max_num_seqs - len(self.running)]
        for job in list(self.running):
            token = next_token(job.tokens)
            job.tokens.append(token)
            job.made += 1
            stop = token in job.params.stop_token_ids
            finish = "stop" if stop else "length" if job.made >= job.params.max_tokens else None
            job.late.append(output_of([token], finish))
            if finish is not None:
                self.running.remove(job)
        for job in list(self.jobs.values()):
            ended = bool(job.late) and job.late[-1].finished
            while job.late and (ended or len(job.late) > self.lag):
                job.outbox.put(job.late.pop(0))
            if ended:
                del self.jobs[job.id]


class Scene:
    """An engine over a fake, stepped from the test's thread."""

    def __init__(
        self, llm: FakeLLM | None = None, engine: type[VllmEngine] = VllmEngine, **settings: Any
    ) -> None:
        self.llm = llm or FakeLLM()
        tree = {"engine": {"kind": "vllm", **settings}, "model": {"max_model_len": 4096}}
        self.engine = engine(Settings.load(tree), self._connect).start()
        self.clients: dict[str, Client] = {}

    def _connect(self, _settings: Settings) -> Connection:
        return Connection(self.llm, SimpleNamespace, list, Dead, VOCAB, kv_tokens=8192)

    def do(self, action: Callable[[], None] = lambda: None) -> None:
        """Runs an action in the loop, with all that was asked before it and all that follows from it."""

        async def act() -> None:
            action()
            for _ in range(30):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(act(), self.engine._loop).result(PATIENCE_S)

    def steps(self, count: int) -> None:
        """Steps of the fake, each with what follows from it."""
        self.do()
        for _ in range(count):
            self.do(self.llm.step)

    def submit(self, request: Request, limit: int | None = None) -> Client:
        client = self.clients[request.request_id] = Client()
        self.engine.submit(request, client, request.max_tokens if limit is None else limit)
        self.do()
        return client

    def roll_back(self, name: str, output: Sequence[int], limit: int) -> None:
        client = self.clients[name]
        client.epoch, client.tokens = client.epoch + 1, list(output)
        self.engine.rollback(name, output, client.epoch, limit)
        self.do()

    def extend(self, name: str, limit: int) -> None:
        self.engine.extend(name, limit)
        self.do()

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.do()

    @property
    def idle(self) -> bool:
        """Whether neither side holds anything."""
        mine = self.engine._streams or self.engine._tasks
        return not (mine or self.llm.jobs or self.llm.running)

    def close(self) -> None:
        self.engine.close()


def request_of(name: str, deterministic: bool = True, max_tokens: int = 400, **more: Any) -> Request:
    """A request with a prompt of its own."""
    prompt = tuple((sum(name.encode()) + i) % VOCAB for i in range(10))
    sampling = more.pop("sampling", SamplingParams())
    return Request(name, prompt, max_tokens, sampling, deterministic, **more)


Make = Callable[..., Scene]
"""The fixture `make` of tests/unit/conftest.py."""
