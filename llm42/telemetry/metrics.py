"""Every metric, defined once (name, kind, help, unit, labels, buckets), and the interface that emits them.

Code that counts takes a `Metrics` and names a definition of this file: `metrics.inc(ROLLBACKS)`. Inside Ray
the sink is deployments/llm42_serve/ray_metrics.py, which puts `ray_` before each name; else it
drops everything. Counters get the suffix `_total` from the sink.

No label is unbounded: each has a fixed list of values, whatever else comes becoming "other", or is bounded by
how many processes there are, which its definition says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

OTHER = "other"


class Kind(StrEnum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Which kind of process emits a metric."""

    INGRESS = "ingress"
    REPLICA = "replica"
    VERIFIER = "verifier"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Label:
    """A label with all its values; where they are not known beforehand, `bound` says what limits them."""

    name: str
    values: tuple[str, ...] = ()
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition. `unit` is that of the value; `buckets` are upper bounds, all above 0."""

    name: str
    kind: Kind
    scope: Scope
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels: those that every series of the scope has, then its own."""
        return tuple(label.name for label in (*COMMON[self.scope], *self.labels))

    def clean(self, given: dict[str, str]) -> dict[str, str]:
        """The labels with values outside a fixed list replaced. Raises ValueError when names differ from the
        definition's."""
        if given.keys() != {label.name for label in self.labels}:
            wanted = [label.name for label in self.labels]
            raise ValueError(f"{self.name} has the labels {wanted}, not {sorted(given)}")
        return {
            label.name: given[label.name] if not label.values or given[label.name] in label.values else OTHER
            for label in self.labels
        }

    def combinations(self) -> Iterator[dict[str, str]]:
        """Every set of values that its own labels can take; nothing when one has no fixed list."""
        for values in itertools.product(*(label.values for label in self.labels)):
            yield dict(zip((label.name for label in self.labels), values, strict=True))


MODEL = Label("model", bound="one for each model that is served")
VERIFIER = Label("verifier", bound="server.max_verifiers, for each set of model and verifier settings")
COMMON: dict[Scope, tuple[Label, ...]] = {
    Scope.INGRESS: (MODEL,),
    Scope.REPLICA: (MODEL,),
    Scope.VERIFIER: (MODEL, VERIFIER),
    Scope.SUPERVISOR: (MODEL,),
}
"""Labels that the sink sets once. Inside Serve, `application`, `deployment` and `replica` come on top."""

MODES = ("deterministic", "best_effort")
CODES = (
    "overloaded",
    "verifier_unavailable",
    "version_skew",
    "service_unavailable",
    "verification_failed",
    "non_finite_logits",
    "engine_error",
    "engine_unavailable",
    "context_length_exceeded",
    "invalid_request_error",
    "invalid_window",
    "invalid_api_key",
    "not_allowed",
    "invalid_value",
    "invalid_json",
    "model_not_found",
    "body_too_large",
    "body_too_complex",
    "body_timeout",
    "internal_error",
    OTHER,
)
"""Codes of errors, as clients see them."""
MODE = Label("mode", MODES)
"""What was asked for."""
WAYS = ("verify", "direct")
WAY = Label("way", WAYS)
"""How a committed token came about: as a candidate that was verified, or the verifier's own token behind such
candidates; or decoded by the verifier itself."""
OUTCOME = Label("outcome", ("finished", "aborted", *CODES))
REASON = Label("reason", CODES)
STATE = Label("state", ("starting", "ready", "failed", "mixed", "unreachable"))
FINGERPRINT = Label("fingerprint", bound="one for each verifier process")

_LATENCY = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
    7200.0,
)  # fmt: skip
"""Far beyond what the settings let a thing wait (session.verify_timeout_s times verify_attempts is 240 s): a
quantile in the last bucket is no more than its lower end."""
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""A step of two minutes is ended."""
_TOKENS = (0.5, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 255.0, 511.0, 1023.0, 2047.0)
"""The first holds windows without an accepted candidate, the others the target lengths of windows."""

CATALOGUE: list[Metric] = []


def _define(
    scope: Scope, kind: Kind, name: str, unit: str, help: str, *labels: Label, buckets: tuple[float, ...] = ()
) -> Metric:
    metric = Metric(f"llm42_{name}", kind, scope, unit, help, labels, buckets)
    CATALOGUE.append(metric)
    return metric


_I, _R, _V, _S = Scope.INGRESS, Scope.REPLICA, Scope.VERIFIER, Scope.SUPERVISOR
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

# Requests, as clients see them. One request of the API is several when it asks for several choices.
REQUESTS = _define(_I, _C, "requests", "requests", "Requests that ended, by outcome", MODE, OUTCOME)
REJECTS = _define(_I, _C, "rejects", "requests", "HTTP requests answered with an error", REASON)
FAILOVERS = _define(_I, _C, "failovers", "requests", "Streams that another replica went on with", MODE)
REPLICAS_WANTED = _define(
    _I, _G, "replicas_wanted", "replicas", "Fast-path replicas there should be; where they scale, at least"
)
PROMPT_TOKENS = _define(_I, _C, "prompt_tokens", "tokens", "Prompt tokens of requests", MODE)
OUTPUT_TOKENS = _define(_I, _C, "output_tokens", "tokens", "Output tokens sent to clients", MODE)
FIRST_TOKEN = _define(
    _I, _H, "first_token_seconds", "seconds",
    "Arrival to first output token; the first committed one when deterministic", MODE, buckets=_LATENCY,
)  # fmt: skip
COMMIT_GAP = _define(
    _I, _H, "commit_gap_seconds", "seconds",
    "Time between two pieces of a stream; between two commits when deterministic", MODE, buckets=_LATENCY,
)  # fmt: skip
REQUEST_SECONDS = _define(
    _I, _H, "request_seconds", "seconds", "Arrival to end of requests that finished", MODE, buckets=_LATENCY
)

INGRESS_TASKS = _define(_I, _G, "ingress_tasks", "tasks", "Tasks of the process's event loop")

# Decode-verify-rollback sessions.
CANDIDATE_TOKENS = _define(_R, _C, "candidate_tokens", "tokens", "Candidates that the fast path proposed")
COMMITTED_TOKENS = _define(_R, _C, "committed_tokens", "tokens", "Tokens committed by a verifier", WAY)
ROLLED_BACK_TOKENS = _define(_R, _C, "rolled_back_tokens", "tokens", "Candidates that were thrown away")
ROLLBACKS = _define(_R, _C, "rollbacks", "rollbacks", "Times the fast path was cut back to what is committed")
WINDOWS = _define(_R, _C, "windows", "windows", "Windows that a verifier has answered with a commit")
WINDOW_TOKENS = _define(
    _R, _H, "window_length_tokens", "tokens", "Candidates in a window", buckets=_TOKENS
)  # fmt: skip
ACCEPTED_TOKENS = _define(
    _R, _H, "accepted_length_tokens", "tokens", "Candidates of a window that were accepted", buckets=_TOKENS
)
VERIFY_SECONDS = _define(
    _R, _H, "verify_seconds", "seconds", "Window sent to commit received, retries included", buckets=_LATENCY
)
VERIFY_QUEUE_SECONDS = _define(
    _R, _H, "verify_queue_seconds", "seconds", "Time a window waited in its verifier", buckets=_LATENCY
)
WAY_CHANGES = _define(
    _R, _C, "way_changes", "requests", "Requests in progress that went over to this way", WAY
)
WAY_EXPECTED = _define(
    _R, _G, "way_expected_tokens_per_second", "tokens/s",
    "What the deterministic requests would get together in each way, by the model of session.mode auto", WAY,
)  # fmt: skip
MOVED_TOKENS = _define(
    _R, _C, "moved_tokens", "tokens", "Best-effort tokens that a verifier decoded beside its own"
)
VERIFY_RETRIES = _define(_R, _C, "verify_retries", "calls", "Verify calls that had to be repeated")
AUDITS = _define(_R, _C, "audits", "windows", "Windows computed a second time to compare the bits")
AUDIT_MISMATCHES = _define(_R, _C, "audit_mismatches", "windows", "Audited windows with another answer")

# State of a fast-path replica.
RUNNING = _define(_R, _G, "requests_running", "requests", "Requests that have a place", MODE)
QUEUED = _define(_R, _G, "requests_queued", "requests", "Requests that wait to be admitted", MODE)
QUEUE_SECONDS = _define(
    _R, _H, "queue_seconds", "seconds", "Time a request waited for a place", MODE, buckets=_LATENCY
)
ADMITTED_LIMIT = _define(
    _R, _G, "deterministic_limit", "requests", "Deterministic requests that a replica admits at once"
)
WAITING = _define(_R, _G, "fastpath_waiting", "requests", "Admitted requests that wait for the engine")
PREEMPTIONS = _define(_R, _C, "preemptions", "requests", "Requests whose KV the engine took back for others")
REPLICA_TASKS = _define(_R, _G, "replica_tasks", "tasks", "Tasks of the process's event loop")
KV_USED = _define(_R, _G, "fastpath_kv_used_tokens", "tokens", "KV cache in use by live requests")
KV_TOTAL = _define(_R, _G, "fastpath_kv_total_tokens", "tokens", "KV cache of the replica")
VERIFIERS_READY = _define(
    _R, _G, "verifiers_ready", "verifiers", "Certified verifiers that the replica can reach"
)
FASTPATH_DEVICES = _define(
    _R, _G, "fastpath_devices", "devices", "GPUs the replica holds; without one, CPU threads"
)

# A verifier.
VERIFIER_ROWS = _define(_V, _C, "verifier_rows", "rows", "Rows of steps that held a token")
VERIFIER_PADDING = _define(_V, _C, "verifier_padding_rows", "rows", "Rows of steps that were padding")
VERIFIER_CACHED = _define(_V, _C, "verifier_cached_rows", "rows", "Rows found in the verifier's KV cache")
VERIFIER_TOKENS = _define(
    _V, _C, "verifier_tokens", "tokens", "Tokens that the verifier has committed, without audits and scores",
    WAY,
)  # fmt: skip
VERIFIER_WINDOWS = _define(_V, _C, "verifier_windows", "windows", "Windows answered, audits included")
VERIFIER_FAILURES = _define(_V, _C, "verifier_failures", "windows", "Windows that could not be answered")
VERIFIER_BUSY = _define(_V, _C, "verifier_busy_seconds", "seconds", "Time the verifier spent in steps")
VERIFIER_DEVICE_SECONDS = _define(
    _V, _C, "verifier_device_seconds", "seconds", "The same, times the step's GPUs; without one, its threads"
)
STEP_SECONDS = _define(_V, _H, "verifier_step_seconds", "seconds", "Time of one step", buckets=_STEP)
CACHE_HITS = _define(_V, _C, "verifier_cache_hits", "blocks", "KV blocks found by their content")
CACHE_EVICTIONS = _define(_V, _C, "verifier_cache_evictions", "blocks", "Cached KV blocks given to others")
VERIFIER_WAITING = _define(_V, _G, "verifier_waiting", "windows", "Windows that wait to be admitted")
VERIFIER_ACTIVE = _define(_V, _G, "verifier_active", "windows", "Windows that are being computed")
VERIFIER_DIRECT = _define(
    _V, _G, "verifier_direct_requests", "requests", "Requests that take a row of each step: decoded directly"
)
VERIFIER_PREEMPTIONS = _define(
    _V, _C, "verifier_preemptions", "requests",
    "Directly decoded requests whose KV was taken back for others; it is computed again",
)  # fmt: skip
VERIFIER_KV_HELD = _define(_V, _G, "verifier_kv_held_blocks", "blocks", "KV blocks of live requests")
VERIFIER_KV_CACHED = _define(_V, _G, "verifier_kv_cached_blocks", "blocks", "KV blocks kept for reuse")
VERIFIER_KV_TOTAL = _define(_V, _G, "verifier_kv_total_blocks", "blocks", "KV blocks of the verifier")
VERIFIER_TASKS = _define(_V, _G, "verifier_tasks", "tasks", "Tasks of the process's event loop")
VERIFIER_DEVICES = _define(
    _V, _G, "verifier_devices", "devices", "GPUs the verifier holds; without one, CPU threads"
)
FINGERPRINT_INFO = _define(
    _V, _G, "fingerprint_info", "1", "Always 1; the fingerprint is in the label", FINGERPRINT
)

# The supervisor of the verifiers.
VERIFIERS = _define(_S, _G, "verifiers", "verifiers", "Verifiers by state", STATE)
VERIFIERS_WANTED = _define(_S, _G, "verifiers_wanted", "verifiers", "Verifiers there should be")
VERIFIER_DEATHS = _define(_S, _C, "verifier_deaths", "verifiers", "Verifiers that died and were created anew")
CONDEMNED = _define(_S, _C, "verifiers_condemned", "verifiers", "Verifiers removed after an audit")


class Metrics:
    """A sink; this one drops all. Labels are keyword arguments and must be exactly the definition's."""

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds `value` >= 0 to a counter."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
