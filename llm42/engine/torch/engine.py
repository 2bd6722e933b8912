"""The embedded fast path: continuous batching over paged KV, chunked prefill, streaming, abort, rollback.

`step()` is the whole loop: take commands, schedule, run, sample, report. It is written in the same shape
as the verifier's; the difference is that here shapes follow the load.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm42.cache import BlockPool, KVCache
from llm42.config import EngineSettings
from llm42.engine.base import SAME_ID, EngineLoad, EngineOutput, Sink, require_known_ids, require_room
from llm42.engine.torch.batch import BatchRunner, Rows
from llm42.engine.torch.running import Running
from llm42.errors import Overloaded
from llm42.host.device import device_lost
from llm42.host.threads import set_threads
from llm42.models.weights import LoadedModel
from llm42.protocol import FinishReason, Request, TokenLogprob
from llm42.sampling import draw, token_logprob
from llm42.step_times import StepTimes
from llm42_kernels.cpu import cpu_operators
from llm42_kernels.cuda import cuda_operators
from llm42_kernels.operators import Operators

log = logging.getLogger(__name__)


class TorchEngine:
    """Implements llm42.engine.base.Engine on the project's own decoder."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, ops: Operators | None = None) -> None:
        self.model, self.settings = model, settings
        config, blocks = model.config, -(-settings.kv_tokens // settings.block_size) + 1
        kv_shape = (config.num_layers, blocks, settings.block_size, config.num_kv_heads, config.head_dim)
        self._kv = KVCache(*kv_shape, dtype=model.dtype, device=model.device)
        self._pool = BlockPool(blocks, settings.block_size)
        self._zero_block = self._pool.acquire(1)  # stays zero: padding of block tables
        assert self._zero_block == [0]
        usual = cuda_operators if model.device.startswith("cuda") else cpu_operators
        self._runner = BatchRunner(model, ops or usual(), self._kv)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._requests: dict[str, Running] = {}
        self._running: list[Running] = []
        self._waiting: list[Running] = []
        self._preemptions = self._steps = 0
        self.times = StepTimes()
        self._thread: threading.Thread | None = None
        self._closed = False

    # ---- any thread

    def start(self) -> TorchEngine:
        """Starts the loop's thread."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the loop; requests still running get an error output."""
        self._closed = True
        self._commands.put(lambda: None)  # wakes the loop
        if self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the loop's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def check(self, request: Request) -> None:
        """Raises RequestRejected when it can never fit, Overloaded when the engine is gone."""
        if self._closed:
            raise Overloaded("the engine is not running")
        room = (self._pool.num_blocks - 1) * self.settings.block_size
        require_room(request, self.model.weights.cos_sin.shape[0], room)
        require_known_ids(request, self.model.config.vocab_size)

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        """Starts a request. Raises RequestRejected and Overloaded as `check` does."""
        self.check(request)
        tokens = [*request.prompt, *request.output]
        self._commands.put(lambda: self._enter(Running(request, sink, limit, tokens)))
        if self._closed:  # asked after the put: either the loop's end sees the request, or this does
            raise Overloaded("the replica's engine is not running: send the request again")

    def extend(self, request_id: str, limit: int) -> None:
        """Renews the lookahead bound."""
        self._commands.put(lambda: self._extend(request_id, limit))

    def rollback(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        """Cuts the request to exactly `output` and goes on from there."""
        self._commands.put(lambda: self._roll_back(request_id, output, epoch, limit))

    def abort(self, request_id: str) -> None:
        """Ends the request and frees its KV."""
        self._commands.put(lambda: self._leave(request_id))

    def load(self) -> EngineLoad:
        """The present load."""
        pool, size = self._pool, self.settings.block_size
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=(pool.held - 1) * size,
            kv_total=(pool.num_blocks - 1) * size,
            preemptions=self._preemptions,
            steps=self._steps,
        )

    # ---- commands, engine thread

    def _enter(self, running: Running) -> None:
        request_id = running.request.request_id
        if (other := self._requests.get(request_id)) is not None:
            self._leave(request_id)
            for each in (other, running):
                self._report(each, error=SAME_ID)
            return
        self._requests[request_id] = running
        try:
            self._wait(running, last=True)
        except Exception as error:
            self._fail(running, error)

    def _wait(self, running: Running, last: bool) -> None:
        """Queues by priority; among equals at the end, or in front after a preemption."""
        bisect = bisect_right if last else bisect_left
        at = bisect(self._waiting, running.request.priority, key=lambda r: r.request.priority)
        self._waiting.insert(at, running)

    def _extend(self, request_id: str, limit: int) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.limit = limit

    def _roll_back(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        running = self._requests.get(request_id)
        if running is None:
            return
        tokens = [*running.request.prompt, *output]
        pairs = enumerate(zip(running.tokens, tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(tokens))
        running.tokens, running.epoch, running.limit, running.parked = tokens, epoch, limit, False
        # the last token's row is always computed: its logits give the next candidate
        self._cut(running, min(running.computed, same, len(tokens) - 1))

    def _cut(self, running: Running, length: int) -> None:
        """Keeps the KV of the first `length` tokens. A published block may be read by others and never
        changes: a cut inside one is moved to its start."""
        size = self.settings.block_size
        if length % size and self._pool.is_published(running.blocks[length // size]):
            length -= length % size
        keep = -(-length // size)
        self._pool.release(running.blocks[keep:])
        del running.blocks[keep:], running.keys[length // size :]
        if length % size:
            # NaN after a refused candidate would reach the kept rows through masked slots
            self._kv.clear_tail(running.blocks[-1], length % size)
        running.computed = length

    def _leave(self, request_id: str) -> None:
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._free(running)
            for group in (self._running, self._waiting):
                if running in group:
                    group.remove(running)

    def _free(self, running: Running) -> None:
        """Gives the blocks back; what was completely written stays findable as a prefix."""
        if running.blocks:  # else the request may not have been read yet, and be at fault
            salt = running.request.cache_salt
            self._pool.publish_prefix(running.tokens, running.blocks, running.keys, running.computed, salt)
            self._pool.release(running.blocks)
        running.blocks, running.keys, running.computed = [], [], 0

    # ---- the loop

    def _loop(self) -> None:
        set_threads(self.settings.thread_count)
        try:
            while not self._closed:
                if not self.step() and not self._closed:  # the step may have taken in what wakes it
                    self._commands.get()()
        except Exception:
            log.exception("the engine's loop failed")
        finally:
            self._closed = True
            self._receive()  # requests still queued must hear of it; an abort that is queued is not an error
            for running in list(self._requests.values()):
                self._report(running, error="the engine stopped")

    def step(self) -> bool:
        """One fast step; False when there is nothing to do."""
        self._receive()
        decode, prefill = self._schedule()
        if not decode and not prefill:
            return False
        chunks = [(r, self._chunk(r, n)) for r, n in (*((r, 1) for r in decode), *prefill)]
        try:
            found = self._compute(chunks, len(decode))
        except Exception as error:
            self._compute_each(chunks, error)
        else:
            for (running, chunk), logits in zip(chunks, found, strict=True):
                self._take(running, chunk, logits)
        return True

    def _compute(self, chunks: Sequence[tuple[Running, Rows]], decode: int) -> list[torch.Tensor]:
        """One step of the runner; the first `decode` chunks are of one row."""
        self._steps += 1
        rows, began = [chunk for _, chunk in chunks], time.monotonic()
        self.times.worked.begin()
        found = self._runner.step(rows[:decode], rows[decode:])
        self.times.worked.end()
        self.times.add(decode, sum(len(r.tokens) for r in rows[decode:]), time.monotonic() - began)
        return found

    def _take(self, running: Running, chunk: Rows, logits: torch.Tensor) -> None:
        """What one chunk's logits come to. A request at which this fails ends, and the others go on."""
        running.computed += len(chunk.tokens)
        try:
            if running.scoring:
                self._score(running, chunk, logits)
            if running.computed == len(running.tokens):
                self._sample(running, logits[-1])
        except Exception as error:
            self._fail(running, error)

    def _compute_each(self, chunks: Sequence[tuple[Running, Rows]], error: Exception) -> None:
        """A step that failed, each request alone: what is wrong with one must not end its companions."""
        log.warning("a step failed; its requests are computed one by one", exc_info=error)
        for running, chunk in chunks:
            try:
                (logits,) = self._compute([(running, chunk)], int(len(chunk.tokens) == 1))
            except Exception as failure:
                self._fail(running, failure)
            else:
                self._take(running, chunk, logits)
        if device_lost(self.model.device):
            raise RuntimeError("the device is lost") from error

    def _fail(self, running: Running, error: Exception) -> None:
        log.error("request %s cannot be computed", running.request.request_id, exc_info=error)
        self._report(running, error=f"{type(error).__name__}: {error}")
        self._leave(running.request.request_id)

    def _receive(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _schedule(self) -> tuple[list[Running], list[tuple[Running, int]]]:
        """Decode rows of everyone who may go on, then prompt chunks up to the budget, oldest first."""
        while self._waiting and len(self._running) < self.settings.max_batch:
            first = self._waiting[0]
            try:
                if not self._admit(first):
                    break
            except Exception as error:  # what is wrong with one must not end its companions
                self._fail(first, error)
                continue
            self._running.append(self._waiting.pop(0))
        decode: list[Running] = []
        prefill: list[tuple[Running, int]] = []
        budget = self.settings.prefill_chunk
        for running in list(self._running):
            if running not in self._running or not running.runnable:
                continue  # preempted meanwhile, or held
            pending = len(running.tokens) - running.computed
            count = 1 if pending == 1 else min(pending, budget)
            if count == 0 or not self._reserve(running, running.computed + count):
                continue
            if pending == 1:
                decode.append(running)
            else:
                prefill.append((running, count))
                budget -= count
        alive = [id(r) for r in self._running]  # a later reservation may have preempted an earlier entry
        return [r for r in decode if id(r) in alive], [(r, n) for r, n in prefill if id(r) in alive]

    def _admit(self, running: Running) -> bool:
        """Looks up the prompt's cached prefix; a request enters when its known tokens fit."""
        # what comes from the cache has no logits: a prompt that is scored is computed as a whole
        known = [] if running.scoring else running.tokens[:-1]
        blocks, keys = self._pool.match(known, running.request.cache_salt)
        missing = -(-(len(running.tokens) + 1) // self.settings.block_size) - len(blocks)
        if missing > self._pool.available:
            self._pool.release(blocks)
            return False
        running.blocks, running.keys = blocks, keys
        running.computed = len(blocks) * self.settings.block_size
        if running.cached is None:
            running.cached = min(running.computed, len(running.request.prompt))
        return True

    def _reserve(self, running: Running, length: int) -> bool:
        """Blocks for `length` tokens, preempting the youngest others if needed."""
        missing = -(-length // self.settings.block_size) - len(running.blocks)
        while missing > self._pool.available:
            # the least urgent, and among equals the youngest
            victim = max(reversed(self._running), key=lambda r: r.request.priority)
            if victim is running:
                return False  # it waits for the others to end
            self._preempt(victim)
        if missing > 0:
            fresh = self._pool.acquire(missing)
            self._kv.fill(fresh, 0.0)  # an earlier owner's NaN would reach the new one through masked slots
            running.blocks += fresh
        return True

    def _preempt(self, victim: Running) -> None:
        """Frees a request's KV; it is recomputed when its turn comes again."""
        self._preemptions += 1
        self._free(victim)
        self._running.remove(victim)
        self._wait(victim, last=False)

    def _chunk(self, running: Running, count: int) -> Rows:
        start = running.computed
        return Rows(running.tokens[start : start + count], start, running.blocks, running.scoring)

    def _score(self, running: Running, chunk: Rows, logits: torch.Tensor) -> None:
        """Adds what a chunk says about the prompt's tokens; rows computed again after a preemption are
        skipped."""
        prompt, count = running.request.prompt, running.request.prompt_logprobs or 0
        for position, row in enumerate(logits, chunk.start + 1):
            if len(running.scores) + 1 == position < len(prompt):
                running.scores.append(token_logprob(row, prompt[position], count))

    def _sample(self, running: Running, logits: torch.Tensor) -> None:
        request = running.request
        token = draw(logits, request.sampling, running.tokens, len(request.prompt))
        if token is None:
            if not request.deterministic:
                self._report(running, error="the model's logits hold NaN for this request")
                self._leave(request.request_id)
                return
            token = 0  # any proposal will do: the verifier decides, and reports NaN itself
        lp = None
        if request.num_logprobs is not None and not request.deterministic:
            lp = token_logprob(logits, token, request.num_logprobs)
        running.tokens.append(token)
        ended = token in request.stop_token_ids
        if request.deterministic:
            running.parked = ended
            self._report(running, token)
            return
        full = running.output_len >= request.max_tokens
        finish = FinishReason.STOP if ended else FinishReason.LENGTH if full else None
        self._report(running, token, () if lp is None else (lp,), finish)
        if finish is not None:
            self._leave(request.request_id)

    def _report(
        self,
        running: Running,
        token: int | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        tokens = () if token is None else (token,)
        start = running.output_len - len(tokens)
        request = running.request
        first: dict[str, Any] = {}
        if tokens and not running.first_reported:
            running.first_reported, first = True, {"cached_tokens": running.cached}
            if request.prompt_logprobs is not None and not request.deterministic:
                first["prompt_logprobs"] = tuple(running.scores)
        output = EngineOutput(
            request.request_id, running.epoch, start, tokens, logprobs, finish, error, **first
        )
        running.sink(output)
