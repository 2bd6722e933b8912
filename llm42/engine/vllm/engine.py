"""The fast path on vLLM's AsyncLLM, through its public API alone.

vLLM has no rollback, no pause and no way to change a running request, so each request here is a *stream* that
is carried by one vLLM request after another (its *attempts*, each with an id of its own):

- rollback: the attempt is aborted and prompt + committed tokens are submitted anew, before all that wait at
  the same priority; vLLM's prefix cache holds all full blocks, so little is computed twice.
- lookahead: an attempt may run to the request's end, and is aborted once the stream has reached its bound; so
  a bound that moves in time (`extend` after each commit) costs no submission at all, and a stream that waits
  for its verifier takes neither a place in the batch nor KV. `extend` then submits prompt + candidates.
- Tokens that vLLM decoded beyond the bound before the abort reached it are kept, not shown, until the bound
  moves.

One thread runs the event loop that AsyncLLM lives in; streams are touched there only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from llm42.config import Settings
from llm42.engine.base import SAME_ID, EngineLoad, Sink, require_room
from llm42.engine.vllm.connection import Connection, connect
from llm42.engine.vllm.sampling import arguments_of, finish_of, reason_of, token_logprobs
from llm42.engine.vllm.stream import Attempt, Stream
from llm42.errors import Overloaded
from llm42.protocol import FinishReason, Request, TokenLogprob
from llm42.step_times import StepTimes

log = logging.getLogger(__name__)
STOPPED = "the engine stopped"
LOOKS = 8
"""How often engine.vllm.stall_s is looked whether vLLM still answers."""


class _Stopping(Exception):
    """vLLM has ended a request that nobody here asked to end: it does so with all of them when it stops."""


class VllmEngine:
    """Implements llm42.engine.base.Engine."""

    def __init__(self, settings: Settings, connect: Callable[[Settings], Connection] = connect) -> None:
        """connect: makes the connection to vLLM, inside the engine's event loop; tests pass their own."""
        self.settings = settings.engine
        self._all_settings, self._connect = settings, connect
        self._connection: Connection | None = None
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()  # ids are never used twice: an abort may still be on its way
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._answers = 0
        """How often vLLM has answered."""
        self._closed = self._gone = False
        self._thread: threading.Thread | None = None

    # ---- any thread

    def start(self) -> VllmEngine:
        """Starts vLLM and waits until it is ready (minutes for a large model). Raises EngineUnavailable."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="vllm", daemon=True)
        self._thread.start()
        ready.result()
        return self

    def close(self) -> None:
        """Ends vLLM; requests still running get an error output."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._end.set)
        if self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether vLLM runs and takes requests."""
        gone = self._closed or self._gone
        return not gone and self._connection is not None and not self._connection.errored

    def check(self, request: Request) -> None:
        """Raises RequestRejected when vLLM can never run it, Overloaded when the engine is gone."""
        connection = self._connection
        if connection is None or not self.alive:
            raise Overloaded("the replica's engine is not running: send the request again")
        require_room(request, self._all_settings.model.max_model_len)
        connection.check(request)

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        """Starts a request. Raises RequestRejected and Overloaded as `check` does."""
        self.check(request)
        stream = Stream(request, sink, limit, count=len(request.output), output=[*request.output])
        if not self._post(lambda: self._enter(stream)):
            raise Overloaded("the replica's engine is not running: send the request again")

    def extend(self, request_id: str, limit: int) -> None:
        """Renews the lookahead bound."""
        self._post(lambda: self._extend(request_id, limit))

    def rollback(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        """Cuts the request to exactly `output` and goes on from there."""
        self._post(lambda: self._roll_back(request_id, output, epoch, limit))

    def abort(self, request_id: str) -> None:
        """Ends the request and frees what vLLM holds for it."""
        self._post(lambda: self._leave(request_id))

    @property
    def times(self) -> StepTimes:
        """As vLLM tells of its steps; nothing before `start`."""
        return StepTimes() if self._connection is None else self._connection.stats.times

    @property
    def facts(self) -> dict[str, Any]:
        """What runs (vLLM's version, model runner, sizes); empty before `start`."""
        return {} if self._connection is None else dict(self._connection.facts)

    def load(self) -> EngineLoad:
        """The present load: requests as this side knows them, KV from vLLM's statistics of its last step."""
        if self._connection is None:
            return EngineLoad(0, 0, 0, 0)
        stats, capacity = self._connection.stats, self._connection.kv_tokens
        active = len(self._tasks)
        running = min(stats.running, active)
        return EngineLoad(
            running=running,
            waiting=active - running,
            kv_used=round(stats.kv_usage * capacity),
            kv_total=capacity,
            preemptions=stats.preemptions,
            steps=stats.steps,
        )

    def _post(self, command: Callable[[], None]) -> bool:
        """Runs a command in the loop; False when the engine is closed."""
        with self._lock:
            if self._closed:
                return False
            self._loop.call_soon_threadsafe(command)
            return True

    # ---- the loop's thread

    def _run(self, ready: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(ready))
        finally:
            self._loop.close()

    async def _serve(self, ready: Future[None]) -> None:
        try:
            # not awaited: AsyncLLM starts its own tasks in the loop that is running now
            self._connection = connection = self._connect(self._all_settings)
        except BaseException as error:
            with self._lock:
                self._closed = True
            ready.set_exception(error)
            return
        connection.stats.asked = lambda: bool(self._tasks)
        ready.set_result(None)
        watch = self._loop.create_task(self._watch(self.settings.vllm.stall_s))
        await self._end.wait()
        watch.cancel()
        self._fail_all(STOPPED)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connection.close()
        await asyncio.sleep(0)  # lets vLLM's cancelled tasks end before the loop is closed

    async def _watch(self, limit_s: float) -> None:
        """A vLLM that hangs is as good as dead: its requests can go on elsewhere. Time is counted in looks,
        so that a process which was stopped itself does not blame vLLM."""
        quiet, seen = 0, -1
        while not self._gone:
            await asyncio.sleep(limit_s / LOOKS)
            quiet = quiet + 1 if self._tasks and self._answers == seen else 0
            seen = self._answers
            if quiet >= LOOKS:
                self._lose(f"vLLM has not answered for {limit_s:g} s (engine.vllm.stall_s)")

    def _enter(self, stream: Stream) -> None:
        if self._gone:
            stream.report(error=STOPPED)
        elif (other := self._streams.get(stream.request.request_id)) is not None:
            self._stop(other)
            for each in (other, stream):
                self._fail(each, SAME_ID)
        else:
            self._streams[stream.request.request_id] = stream
            self._proceed(stream)

    def _extend(self, request_id: str, limit: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.limit = limit
            stream.release()
            self._proceed(stream)

    def _roll_back(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._stop(stream)
        stream.restart(output, epoch, limit)
        self._proceed(stream)

    def _leave(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._stop(stream)

    def _stop(self, stream: Stream) -> None:
        """Cancels the attempt; its task tells vLLM. Never called from within that task."""
        if stream.attempt is not None and stream.attempt.task is not None:
            stream.attempt.task.cancel()
        stream.attempt = None

    def _proceed(self, stream: Stream) -> None:
        """Submits what is known of the stream, unless it is running already or has to wait."""
        if stream.attempt is not None or stream.full:
            return
        # two steps of vLLM's priority for one of ours: a resubmission comes before its equals, and before
        # nobody else
        priority = 2 * stream.request.priority - (stream.attempts > 0)
        stream.attempt = attempt = Attempt(f"{stream.request.request_id}#{next(self._numbers)}", priority)
        stream.attempts += 1
        attempt.task = task = self._loop.create_task(self._carry(stream, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks and self._connection is not None:
            self._connection.stats.rest()

    async def _carry(self, stream: Stream, attempt: Attempt) -> None:
        """One attempt from submission to its end."""
        assert self._connection is not None
        connection, request, over = self._connection, stream.request, False
        agree = self.settings.vllm.sampled_agreement
        arguments = arguments_of(request, stream.count, agree, connection.seeds)
        # an id without a row cannot come, and vLLM may die of it
        known = [i for i in arguments["stop_token_ids"] if 0 <= i < connection.vocab_size]
        arguments["stop_token_ids"] = known
        tokens = [*request.prompt, *stream.output]
        how = arguments, attempt.priority, request.cache_salt
        try:
            async with aclosing(connection.generate(attempt.id, tokens, *how)) as outputs:
                async for output in outputs:
                    over, self._answers = output.finished, self._answers + 1
                    if stream.attempt is not attempt or not self._take(stream, output):
                        break
        except (connection.dead, _Stopping) as error:
            over = True
            self._lose(f"vLLM's engine process is gone: {error}")
        except Exception as error:
            log.exception("request %s failed in vLLM", attempt.id)
            if stream.attempt is attempt:
                # all that vLLM may refuse was checked, but for the schema, which it reads first of all
                text, mine = reason_of(error)
                schema = mine and request.json_schema is not None and not stream.first_taken
                self._fail(stream, text, "response_format" if schema else None)
        finally:
            if not over:  # a request cancelled on its way in is known to its generator no more
                await connection.abort(attempt.id)

    def _take(self, stream: Stream, output: Any) -> bool:
        """vLLM's new tokens (a RequestOutput); False when the attempt must end here."""
        new = output.outputs[0]
        tokens, finish = new.token_ids, finish_of(new.finish_reason)
        if finish is FinishReason.ABORT:  # not at our word: `attempt` would be another one
            raise _Stopping("it ends its requests")
        if not stream.first_taken:
            stream.take_first(output)
        if not stream.request.deterministic:
            logprobs: tuple[TokenLogprob, ...] = ()
            if new.logprobs is not None:
                logprobs = token_logprobs(tokens, new.logprobs, stream.request.num_logprobs)
            stream.report(tokens, logprobs, finish)
            if finish is not None:
                self._streams.pop(stream.request.request_id, None)
            return True
        stream.surplus += tokens
        stream.release()
        if finish is None and not stream.full:
            return True
        stream.attempt = None
        self._proceed(stream)
        return False

    def _fail(self, stream: Stream, error: str, param: str | None = None) -> None:
        self._streams.pop(stream.request.request_id, None)
        stream.report(error=error, param=param)

    def _lose(self, error: str) -> None:
        """vLLM is gone, or as good as that."""
        self._gone = True
        log.error("%s", error)
        self._fail_all(error)

    def _fail_all(self, error: str) -> None:
        for stream in list(self._streams.values()):
            self._stop(stream)
            self._fail(stream, error)
