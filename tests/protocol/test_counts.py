"""The metrics against what the requests themselves report."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from llm42.cli.top import Interval, Page
from llm42.protocol import RequestStats
from llm42.session.driver import Generator
from llm42.telemetry import metrics as m
from llm42.telemetry.request_metrics import Observed, VerifierReport
from tests.metrics_page import PrometheusMetrics
from tests.support import Lab, bare, request_of


def page_of(metrics: PrometheusMetrics) -> Page:
    """What a scrape shows."""
    return Page.parse(generate_latest(metrics.registry).decode(), 0.0)


async def test_counters_are_the_sums_of_the_replies(lab: Lab) -> None:
    metrics = PrometheusMetrics("tiny")
    engine, verifier = lab.engine(corrupt_share=0.2), lab.verifier().start()
    report = VerifierReport(verifier, lab.settings, metrics)
    settings = lab.settings.model_copy(update={"engine": bare(engine).settings})
    generator = Generator(engine, lab.tokenizer, settings, verifier, metrics)

    async def one(index: int, deterministic: bool) -> RequestStats | None:
        request = replace(request_of(f"r{index}", index), deterministic=deterministic)
        stats = None
        async for delta in Observed(request, metrics).run(generator.generate(request)):
            stats = delta.stats or stats
        return stats

    stats = await asyncio.gather(*(one(i, True) for i in range(6)))
    await asyncio.gather(*(one(i + 6, False) for i in range(2)))
    report.report()
    page = page_of(metrics)
    for field, metric in (
        ("rollbacks", m.ROLLBACKS),
        ("rolled_back_tokens", m.ROLLED_BACK_TOKENS),
        ("verified_tokens", m.COMMITTED_TOKENS),
        ("candidate_tokens", m.CANDIDATE_TOKENS),
        ("windows", m.WINDOWS),
    ):
        reported = sum(getattr(s, field) for s in stats)
        assert page.total(f"{metric.name.removeprefix('llm42_')}_total") == reported > 0, field
    windows = page.total("windows_total")
    for histogram in (
        "window_length_tokens",
        "accepted_length_tokens",
        "verify_seconds",
        "verify_queue_seconds",
    ):
        assert page.total(f"{histogram}_count") == windows
    seen = verifier.stats()
    assert page.total("verifier_rows_total") == seen.rows > 0
    assert page.total("verifier_padding_rows_total") == seen.padding_rows
    committed = page.total("committed_tokens_total", way="verify")
    assert committed == page.total("committed_tokens_total"), "nothing was decoded directly"
    # a last window may have more than the output may
    assert committed <= page.total("verifier_tokens_total", way="verify") == seen.verified
    assert page.total("verifier_tokens_total", way="direct") == 0
    assert page.total("verifier_step_seconds_count") == seen.steps
    assert page.total("verifier_busy_seconds_total") == pytest.approx(seen.step_s)
    assert page.values("fingerprint_info", "fingerprint") == ["tiny"]
    requests = Interval(page)
    assert requests.count("requests", mode="deterministic", outcome="finished") == 6
    assert requests.count("requests", mode="best_effort", outcome="finished") == 2
    assert page.total("first_token_seconds_count") == page.total("request_seconds_count") == 8


async def test_what_is_decoded_directly_is_counted_apart(lab: Lab) -> None:
    """By the session and by the verifier, and who was preempted."""
    metrics, verifier = PrometheusMetrics("tiny"), lab.verifier(160)
    report = VerifierReport(verifier.start(), lab.settings, metrics)
    session = lab.settings.session.model_copy(update={"mode": "direct"})
    settings = lab.settings.model_copy(update={"session": session})
    generator = Generator(lab.engine(), lab.tokenizer, settings, verifier, metrics)

    async def one(index: int) -> int:
        stream = generator.generate(request_of(f"d{index}", index))
        return sum([len(delta.token_ids) async for delta in stream])

    tokens = sum(await asyncio.gather(*(one(i) for i in range(4))))
    verifier.close()  # its step thread counts a token after it has handed it on
    report.report()
    page = page_of(metrics)
    for name in ("committed_tokens_total", "verifier_tokens_total"):
        assert page.total(name, way="direct") == page.total(name) == tokens == 4 * 48
    assert page.total("verifier_preemptions_total") == verifier.stats().preemptions > 0
    assert page.total("verifier_direct_requests") == 0


async def test_a_request_that_is_cancelled_is_counted_too(lab: Lab) -> None:
    """What was committed before the client left is in the counters, and the outcome says so."""
    metrics = PrometheusMetrics("tiny")
    engine, verifier = lab.engine(), lab.verifier().start()
    generator = Generator(engine, lab.tokenizer, lab.settings, verifier, metrics)
    request = request_of("gone", 1)
    stream = Observed(request, metrics).run(generator.generate(request))
    first = await anext(stream)
    await stream.aclose()
    page = page_of(metrics)
    assert page.total("committed_tokens_total") == page.total("output_tokens_total") == len(first.token_ids)
    assert page.total("requests_total", outcome="aborted") == 1
    assert page.total("requests_total") == 1
