"""The battery of reported failures: a system that keeps the rules passes, one that breaks a rule fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from benchmarks.battery import __main__ as command
from benchmarks.battery.api import Answer, Api
from benchmarks.battery.registry import CHECKS, judge, same
from benchmarks.battery.surface import restart_check
from benchmarks.battery.table import PAGE, load_results, page
from tests.support.fake_openai import FakeOpenAI
from tests.support.patience import PATIENCE_S

assert command  # importing it fills CHECKS


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """The test keeps its own."""


@asynccontextmanager
async def served(fake: FakeOpenAI) -> AsyncIterator[Api]:
    """An Api of a fake endpoint on 127.0.0.1: streams and clients that leave are real."""
    config = uvicorn.Config(fake.app(), host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = _Server(config)
    socket = config.bind_socket()
    task = asyncio.create_task(server.serve(sockets=[socket]))
    base = f"http://127.0.0.1:{socket.getsockname()[1]}/v1/"
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S, limits=limits, trust_env=False) as c:
            yield Api(c, "fake", {}, tokens=24, load_size=4)
    finally:
        server.should_exit = True
        await task


async def verdict(name: str, broken: str = "") -> dict[str, Any]:
    async with served(FakeOpenAI(broken)) as api:
        return await judge(CHECKS[name], api, PATIENCE_S)


@pytest.mark.parametrize("name", CHECKS)
async def test_a_system_that_keeps_the_rules_passes(name: str) -> None:
    got = await verdict(name)
    assert got["verdict"] == "pass", got


BREAKS = {
    "repeated": "random", "beside-load": "load", "equal-at-once": "load", "batch-sizes": "load",
    "list-of-prompts": "lists", "long-prompt-joins": "random", "long-prompt-beside-load": "load",
    "cache-hit": "cache", "shared-prefix": "cache", "order": "order", "echo-beside-load": "load",
    "scored-again": "rescored", "aborted-neighbours": "aborts", "odd-requests": "crashes",
    "longer-answer": "load", "alternatives-beside-load": "load", "seeds-repeat": "seed_ignored",
    "seeds-repeat-in-chat": "seed_ignored", "seed-beside-load": "load", "seeds-at-once": "load",
    "sampling-fields": "load", "n-choices": "seed_constant", "unseeded-vary": "seed_constant",
    "streamed-and-whole": "stream_scores", "chunks": "empty_chunk", "errors-before-streams": "late_errors",
    "fingerprint": "fingerprint",
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
async def test_control_a_system_that_breaks_the_rule_fails(name: str) -> None:
    """Every check has one."""
    got = await verdict(name, BREAKS[name])
    assert got["verdict"] == "fail", got


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("seeds-repeat", "seed_constant"),
        ("n-choices", "load"),
        ("chunks", "finish_reason"),
        ("order", "random"),
    ],
)
async def test_control_further_ways_to_break_a_rule(name: str, broken: str) -> None:
    got = await verdict(name, broken)
    assert got["verdict"] == "fail", got


async def test_what_a_system_refuses_is_not_offered_and_says_why() -> None:
    got = await verdict("cache-hit", "no_salt")
    assert got["verdict"] == "not offered" and "cache_salt" in got["detail"]


@pytest.mark.parametrize(("after", "expected"), [("", "pass"), ("random", "fail")])
async def test_a_restart_is_compared(tmp_path: Path, after: str, expected: str) -> None:
    """Another server stands for the restarted one."""
    kept, got = tmp_path / "kept.json", {}
    try:
        for broken, files in (("", (kept, None)), (after, (None, kept))):
            restart_check(*files)
            got = await verdict("restart", broken)
    finally:
        CHECKS.pop("restart", None)
    assert got["verdict"] == expected, got


def test_a_restarted_server_is_compared_before_anything_else(tmp_path: Path) -> None:
    try:
        restart_check(None, tmp_path / "kept.json")
        assert next(iter(command.in_order(after_a_restart=True))) == "restart"
        assert list(command.in_order(after_a_restart=False))[-1] == "restart"
        assert command.in_order(after_a_restart=True).keys() == CHECKS.keys()
    finally:
        CHECKS.pop("restart", None)


@pytest.mark.parametrize("broken", ["", "dead"])
async def test_a_dead_server_has_no_result(broken: str) -> None:
    """It breaks no rule; the control is a server that answers."""
    async with served(FakeOpenAI(broken)) as api:
        if broken:
            with pytest.raises(SystemExit, match="no result"):
                await command.answers(api)
        else:
            await command.answers(api)


async def test_a_slow_server_breaks_no_rule() -> None:
    async with served(FakeOpenAI()) as api:
        got = await judge(CHECKS["beside-load"], api, 0.0)
    assert got["verdict"] == "not run"


def test_bits_count() -> None:
    """Answers whose text is equal and whose log-probabilities differ in the last bit are different."""
    answer = Answer("a", ("a",), (-0.1,), "stop")
    other = Answer("a", ("a",), (-0.10000000000000002,), "stop")
    with pytest.raises(Exception, match="log-probability 0"):
        same(answer, [other], "here")


def test_nothing_compared_is_no_pass() -> None:
    empty = Answer("", (), (), "stop")
    with pytest.raises(Exception, match="nothing was compared"):
        same(empty, [empty], "here")


def test_the_page_is_what_the_results_say() -> None:
    """Otherwise: python -m benchmarks.battery.table"""
    assert PAGE.read_text() == page(load_results())


def test_control_the_page_shows_a_failure_and_its_reason() -> None:
    checks = {"x": {"verdict": "fail", "detail": "other tokens", "rule": "equal", "reports": "a#1"}}
    raw = {"system": "S", "extra": {}, "tokens": 1, "load": 1, "checks": checks}
    text = page({"s": {"raw": raw, "machine": {"cpu": "C"}, "date": "2026-01-01"}})
    assert "**fail**" in text and "- `x`: fail: other tokens" in text
