"""`llm42 top`: the dashboard's figures in a terminal, from the metrics page of a service.

A page holds counters since the start; what happened in between is the difference of two pages.
"""

from __future__ import annotations

import math
import time
import urllib.error
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.table import Table

from llm42.errors import LLM42Error
from llm42.host.direct import open_url
from llm42.telemetry.metrics import MODES, WAYS

WINDOW_S = 30.0
"""Rates are over the last so many seconds."""
_TIMEOUT_S = 5.0


class NoMetrics(LLM42Error):
    """There is no metrics page at the address, or it has none of this project's metrics."""

    code = "no_metrics"


@dataclass(frozen=True, slots=True)
class Page:
    """All samples of this project on a metrics page; names without Ray's prefix."""

    taken: float
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, taken: float) -> Page:
        """Reads the text format of Prometheus."""
        page = cls(taken)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("ray_")
                if name.startswith("llm42_"):
                    page.samples.setdefault(name, []).append((sample.labels, sample.value))
        return page

    @classmethod
    def fetch(cls, url: str) -> Page:
        """Reads a page now. Raises NoMetrics."""
        try:
            with open_url(url, _TIMEOUT_S) as reply:
                page = cls.parse(reply.read().decode(), time.monotonic())
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise NoMetrics(
                f"No metrics at {url} ({reason}). `llm42 serve` prints the address of its metrics page."
            ) from error
        if not page.samples:
            raise NoMetrics(f"{url} has no metrics of LLM-42: check the URL (`llm42 serve` prints it).")
        return page

    def total(self, name: str, **where: str) -> float:
        """The sum of a metric's series with these labels; 0 when there are none."""
        found = self.samples.get(f"llm42_{name}", [])
        return sum(v for labels, v in found if where.items() <= labels.items())

    def values(self, name: str, label: str) -> list[str]:
        """Every value of a label, in order."""
        found = self.samples.get(f"llm42_{name}", [])
        return sorted({labels[label] for labels, _ in found if label in labels})


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two pages, or since the start."""

    now: Page
    before: Page | None = None

    def count(self, name: str, **where: str) -> float:
        """Increase of a counter."""
        earlier = self.before.total(f"{name}_total", **where) if self.before else 0.0
        return max(0.0, self.now.total(f"{name}_total", **where) - earlier)

    def rate(self, name: str, **where: str) -> str:
        """Increase per second; since the start there is no rate, so it is the increase."""
        if self.before is None:
            return f"{self.count(name, **where):,.0f}"
        return f"{self.count(name, **where) / max(1e-9, self.now.taken - self.before.taken):,.1f}/s"

    def share(self, name: str, *of: str, **where: str) -> str:
        """A counter's part of the sum of others, in percent."""
        whole = sum(self.count(x, **where) for x in of)
        return f"{self.count(name, **where) / whole:.2%}" if whole else "-"

    def quantile(self, q: float, name: str, **where: str) -> str:
        """A quantile of a histogram of seconds, interpolated within its bucket as Prometheus does."""
        steps = sorted((float(le), le) for le in self.now.values(f"{name}_bucket", "le"))
        below = [(bound, self._bucket(name, le, where)) for bound, le in steps]
        if not below or below[-1][1] <= 0:
            return "-"
        rank, lower, under = q * below[-1][1], 0.0, 0.0
        for bound, count in below:
            if count >= rank:
                width = 0.0 if math.isinf(bound) else bound - lower
                return f"{lower + width * (rank - under) / (count - under):.3f} s"
            lower, under = bound, count
        return "-"

    def _bucket(self, name: str, le: str, where: dict[str, str]) -> float:
        earlier = self.before.total(f"{name}_bucket", le=le, **where) if self.before else 0.0
        return self.now.total(f"{name}_bucket", le=le, **where) - earlier


Section = tuple[str, list[tuple[str, str]]]


def sections(seen: Interval) -> Iterator[Section]:
    """(title, [(label, value)]) of everything that is shown."""
    yield "Determinism", _determinism(seen)
    yield "Latency (p50, p99)", _latency(seen)
    yield "Verifiers", _verifiers(seen)
    yield "Requests", _requests(seen)


def _rollback_rate(seen: Interval, **where: str) -> str:
    """For each verified token: what is decoded directly was proposed by nobody."""
    tokens = "committed_tokens"
    verified = seen.count(tokens, **where) - seen.count(tokens, way="direct", **where)
    return f"{seen.count('rollbacks', **where) / verified:.2%}" if verified else "-"


def _determinism(seen: Interval) -> list[tuple[str, str]]:
    rows = [("rollback rate", _rollback_rate(seen))]
    replicas = seen.now.values("committed_tokens_total", "replica")
    for replica in replicas if len(replicas) > 1 else []:
        rows.append((f"  replica {replica}", _rollback_rate(seen, replica=replica)))
    return [
        *rows,
        ("rollbacks", seen.rate("rollbacks")),
        ("tokens committed", seen.rate("committed_tokens")),
        ("  decoded directly", seen.rate("committed_tokens", way="direct")),
        *_ways(seen),
        ("tokens rolled back", seen.rate("rolled_back_tokens")),
        ("candidates wasted", seen.share("rolled_back_tokens", "candidate_tokens")),
        ("windows", seen.rate("windows")),
        ("audited windows", f"{seen.now.total('audits_total'):,.0f}"),
        ("audit mismatches", f"{seen.now.total('audit_mismatches_total'):,.0f}"),
        ("fingerprint", ", ".join(seen.now.values("fingerprint_info", "fingerprint")) or "-"),
    ]


def _ways(seen: Interval) -> list[tuple[str, str]]:
    """What session.mode auto expects of each way; empty where it does not say."""
    name, rows = "way_expected_tokens_per_second", list[tuple[str, str]]()
    for way in WAYS:
        if expected := seen.now.total(name, way=way):
            rows.append((f"  expected, all {way}", f"{expected:,.1f}/s"))
    for label, count in (("changes of way", "way_changes"), ("best effort moved", "moved_tokens")):
        if seen.now.total(f"{count}_total"):
            rows.append((label, seen.rate(count)))
    return rows


def _latency(seen: Interval) -> list[tuple[str, str]]:
    def both(name: str, **where: str) -> str:
        return f"{seen.quantile(0.5, name, **where)}, {seen.quantile(0.99, name, **where)}"

    rows = []
    for mode in MODES:
        short = mode.replace("_", "-")
        rows.append((f"first token, {short}", both("first_token_seconds", mode=mode)))
        rows.append((f"gap, {short}", both("commit_gap_seconds", mode=mode)))
        rows.append((f"request, {short}", both("request_seconds", mode=mode)))
    return [*rows, ("verify call", both("verify_seconds")), ("verify queue", both("verify_queue_seconds"))]


def _verifiers(seen: Interval) -> list[tuple[str, str]]:
    now = seen.now
    states = [(s, now.total("verifiers", state=s)) for s in now.values("verifiers", "state")]
    rows = [("state", ", ".join(f"{n:.0f} {s}" for s, n in states if n) or "-")]
    if seen.before is not None:
        passed = now.taken - seen.before.taken
        for name in now.values("verifier_busy_seconds_total", "verifier"):
            busy = seen.count("verifier_busy_seconds", verifier=name) / max(1e-9, passed)
            rows.append((f"busy, {name}", f"{busy:.0%}"))
    padding, cached = "verifier_padding_rows", "verifier_cached_rows"
    return [
        *rows,
        ("windows waiting", f"{now.total('verifier_waiting'):,.0f}"),
        ("decoded directly", f"{now.total('verifier_direct_requests'):,.0f}"),
        ("preempted", seen.rate("verifier_preemptions")),
        ("step time (p50)", seen.quantile(0.5, "verifier_step_seconds")),
        ("padding", seen.share(padding, "verifier_rows", padding)),
        ("rows from the cache", seen.share(cached, "verifier_rows", cached)),
        ("evicted blocks", seen.rate("verifier_cache_evictions")),
    ]


def _requests(seen: Interval) -> list[tuple[str, str]]:
    now, rows = seen.now, []
    for mode in MODES:
        running, queued = now.total("requests_running", mode=mode), now.total("requests_queued", mode=mode)
        rows.append((mode.replace("_", "-"), f"{running:.0f} running, {queued:.0f} queued"))
        rows.append(("  output tokens", seen.rate("output_tokens", mode=mode)))
    for outcome in now.values("requests_total", "outcome"):
        if number := seen.count("requests", outcome=outcome):
            rows.append((outcome, f"{number:,.0f}"))
    for reason in now.values("rejects_total", "reason"):
        if number := seen.count("rejects", reason=reason):
            rows.append((f"error reply: {reason}", f"{number:,.0f}"))
    for name in ("failovers", "verify_retries", "preemptions"):
        rows.append((name.replace("_", " "), f"{seen.count(name):,.0f}"))
    return rows


def view(seen: Interval) -> Columns:
    """Everything, as tables side by side."""
    tables = []
    for title, rows in sections(seen):
        table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
        table.add_column(style="dim")
        table.add_column(justify="right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return Columns(tables)


def run_top(url: str, once: bool, every_s: float) -> None:
    """Shows the page until Ctrl-C, or once. Raises NoMetrics when the first look fails."""
    console, pages = Console(), deque([Page.fetch(url)])
    if once:
        console.print(f"{url}, since the start")
        console.print(view(Interval(pages[0])))
        return
    with Live(view(Interval(pages[0])), console=console, screen=console.is_terminal) as live:
        while True:
            time.sleep(every_s)
            try:
                pages.append(Page.fetch(url))
            except NoMetrics as error:
                live.update(str(error))
                continue
            while len(pages) > 2 and pages[-1].taken - pages[1].taken > WINDOW_S:
                pages.popleft()
            live.update(view(Interval(pages[-1], pages[0])))
