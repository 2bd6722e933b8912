"""The same with session.mode auto, where requests of both classes change their way at any commit while
verifiers and replicas are killed: one output all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from llm42_serve.launch import Service
from tests.chaos.conftest import application, in_mode
from tests.chaos.support import App
from tests.chaos.switching import LATE, build, changes_in
from tests.chaos.test_kills import (
    IN_BOTH_WAYS,
    NOISE,
    STREAMS,
    burst,
    check,
    kill_one_verifier,
    nothing_is_left,
    wrong,
)
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(service: Service, tree: dict[str, Any]) -> AsyncIterator[App]:
    async with application(service, "chaos-switching", in_mode(tree, "auto"), build=build) as made:
        yield made


def directory_of(app: App) -> Path:
    return Path(app.settings.verifier.certificate_dir)


@pytest.mark.parametrize("action", IN_BOTH_WAYS)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_stream_ends_with_the_oracles_tokens(app: App, lab: Lab, action: Any) -> None:
    before = changes_in(directory_of(app))
    found, noise = await burst(app, action, seeded=False)
    check(lab, action, found, noise)
    took_place = changes_in(directory_of(app)) - before
    assert min(took_place[f"to {way}"] for way in ("direct", "verify")) >= STREAMS, took_place
    assert min(took_place[what] for what in ("moved", "back")) >= NOISE // 2, took_place
    await nothing_is_left(app)


@contextmanager
def a_token_late(app: App) -> Iterator[None]:
    """Whoever goes direct meanwhile goes on behind a candidate that nobody has verified."""
    flag = directory_of(app) / LATE
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()


@pytest.mark.asyncio(loop_scope="module")
async def test_control_switches_that_resume_one_token_late(app: App, lab: Lab) -> None:
    with a_token_late(app):
        found, _ = await burst(app, kill_one_verifier, seeded=False)
    assert wrong(lab, found, cut_allowed=False) != []
    oracle = {request: lab.oracle(request).sent[0] for request, _ in found}
    assert any(got.tokens != oracle[request][: len(got.tokens)] for request, got in found), "errors alone"
    await nothing_is_left(app)
