"""Counting that is the same with and without Ray: a request's stream, and a verifier."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from llm42.config import Settings
from llm42.errors import LLM42Error
from llm42.protocol import Delta, Request, RequestStats
from llm42.telemetry import metrics as m
from llm42.telemetry.logs import event
from llm42.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from llm42.verifier.jobs import VerifierStats
    from llm42.verifier.scheduler import Verifier

log = logging.getLogger(__name__)


def mode_of(request: Request) -> str:
    """The class of a request, as metrics and logs name it."""
    return "deterministic" if request.deterministic else "best_effort"


def way_of(stats: RequestStats) -> str:
    """How the tokens of a request came about that a verifier took part in: one of metrics.WAYS, or "both"
    where a failover or a setting has changed it."""
    verify, direct = m.WAYS
    if not stats.direct_tokens:
        return verify
    return direct if stats.direct_tokens >= stats.verified_tokens else "both"


class Observed:
    """A request's stream of deltas as its client sees it: counts, times, one line in the log, one span."""

    def __init__(
        self,
        request: Request,
        metrics: m.Metrics,
        tracer: Tracer | None = None,
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        """decode: makes the text of a prompt, for the log; None: prompts are not logged."""
        self._metrics, self._mode, self._decode = metrics, mode_of(request), decode
        self._span = (tracer or Tracer()).start("request", request.trace, mode=self._mode)
        self._arrived = self._last = time.monotonic()
        self._tokens, self._outcome, self._fields = 0, "aborted", dict[str, Any]()
        self.request = self._span.carry(request)
        """What to send on: the request as part of the span."""

    async def run(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The same deltas. Whatever ends the stream is counted once."""
        self._metrics.inc(m.PROMPT_TOKENS, len(self.request.prompt), mode=self._mode)
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._note(delta)
                    yield delta
        except LLM42Error as error:
            self._outcome = error.code
            raise
        except Exception:
            self._outcome = "internal_error"
            raise
        finally:
            self._end()

    def _note(self, delta: Delta) -> None:
        if delta.token_ids:
            now = time.monotonic()
            # the gaps of a whole reply are of our making, and nobody sees them
            if not self._tokens or self.request.stream:
                metric = m.COMMIT_GAP if self._tokens else m.FIRST_TOKEN
                self._metrics.observe(metric, now - self._last, mode=self._mode)
            self._last, self._tokens = now, self._tokens + len(delta.token_ids)
            self._metrics.inc(m.OUTPUT_TOKENS, len(delta.token_ids), mode=self._mode)
        if delta.fingerprint:
            self._fields["fingerprint"] = delta.fingerprint
        if delta.stats is not None:
            names = ("windows", "rollbacks", "verified_tokens", "direct_tokens")
            self._fields |= {name: getattr(delta.stats, name) for name in names}
            if self.request.deterministic or delta.stats.direct_tokens:
                self._fields["way"] = way_of(delta.stats)
        if delta.finish_reason is not None:
            self._outcome = "finished"

    def _end(self) -> None:
        seconds = time.monotonic() - self._arrived
        self._metrics.inc(m.REQUESTS, mode=self._mode, outcome=self._outcome)
        if self._outcome == "finished":
            self._metrics.observe(m.REQUEST_SECONDS, seconds, mode=self._mode)
        fields = {
            "request_id": self.request.request_id,
            "mode": self._mode,
            "outcome": self._outcome,
            "prompt_tokens": len(self.request.prompt),
            "output_tokens": self._tokens,
            **self._fields,
        }
        self._span.end(**fields)
        if self.request.trace:
            fields["trace"] = self.request.trace
        if self._decode is not None:
            fields["prompt"] = self._decode(self.request.prompt)
        event(log, "request", **fields, seconds=round(seconds, 4))


_COUNTERS: tuple[tuple[m.Metric, str], ...] = (
    (m.VERIFIER_ROWS, "rows"),
    (m.VERIFIER_PADDING, "padding_rows"),
    (m.VERIFIER_CACHED, "cached_rows"),
    (m.VERIFIER_WINDOWS, "windows"),
    (m.VERIFIER_FAILURES, "failures"),
    (m.VERIFIER_PREEMPTIONS, "preemptions"),
    (m.CACHE_HITS, "cache_hits"),
    (m.CACHE_EVICTIONS, "evictions"),
)
_GAUGES: tuple[tuple[m.Metric, str], ...] = (
    (m.VERIFIER_WAITING, "waiting"),
    (m.VERIFIER_ACTIVE, "active"),
    (m.VERIFIER_DIRECT, "following"),
    (m.VERIFIER_KV_HELD, "kv_held_blocks"),
    (m.VERIFIER_KV_CACHED, "kv_cached_blocks"),
    (m.VERIFIER_KV_TOTAL, "kv_blocks"),
)


class VerifierReport:
    """Brings a verifier's own counters to the metrics; `report` is to be called every second or so."""

    def __init__(self, verifier: Verifier, settings: Settings, metrics: m.Metrics) -> None:
        self._verifier, self._metrics = verifier, metrics
        cpu = settings.model.device == "cpu"
        self._devices = float(settings.verifier.threads) if cpu else settings.verifier.gpus
        self._step_devices = self._devices if cpu else 1.0
        self._before: VerifierStats | None = None
        verifier.on_step = partial(metrics.observe, m.STEP_SECONDS)

    def report(self) -> None:
        """Adds what has happened since the last call; sets what is now."""
        now, metrics = self._verifier.stats(), self._metrics
        for metric, name in _COUNTERS:
            metrics.inc(metric, getattr(now, name) - getattr(self._before, name, 0))
        for way, name in zip(m.WAYS, ("verified", "decoded"), strict=True):
            metrics.inc(m.VERIFIER_TOKENS, getattr(now, name) - getattr(self._before, name, 0), way=way)
        busy = now.step_s - getattr(self._before, "step_s", 0.0)
        metrics.inc(m.VERIFIER_BUSY, busy)
        metrics.inc(m.VERIFIER_DEVICE_SECONDS, busy * self._step_devices)
        for metric, name in _GAUGES:
            metrics.set(metric, getattr(now, name))
        metrics.set(m.VERIFIER_DEVICES, self._devices)
        metrics.set(m.FINGERPRINT_INFO, 1.0, fingerprint=self._verifier.fingerprint)
        self._before = copy(now)  # the verifier goes on counting in the same object
