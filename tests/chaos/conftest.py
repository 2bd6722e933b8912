"""Applications of the session's cluster that may be broken: the tiny model, several of everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llm42.config import Settings
from llm42_serve.launch import Service
from tests.chaos.support import App
from tests.support import Lab


@pytest.fixture(scope="session")
def tree(tiny: Lab) -> dict[str, Any]:
    """Settings of the applications: wrong candidates, several replicas, short idle times."""
    return {
        "model": {"path": tiny.settings.model.path, "name": "tiny", "max_model_len": 768},
        "engine": {"threads": 1, "kv_tokens": 8192, "corrupt_share": 0.02},
        "verifier": {
            "certificate_dir": str(Path(tiny.settings.model.path).parent),
            "kv_tokens": 8192,
            "idle_s": 5.0,
            "audit_share": 0.0,
        },
        "session": {"mode": "verify", "commit_deadline_s": 0.2},
        "server": {
            "fastpath_replicas": 2,
            "ingress_replicas": 2,
            "verifiers": 2,
            "drain_s": 60.0,
            "failover_s": 180.0,
        },
    }


def in_mode(tree: dict[str, Any], mode: str) -> dict[str, Any]:
    """The settings with this session.mode; with little credit, so that it is renewed often."""
    return tree | {"session": tree["session"] | {"mode": mode, "credit": 16}}


def with_server(tree: dict[str, Any], **server: Any) -> dict[str, Any]:
    """The settings with other numbers of processes."""
    return tree | {"server": tree["server"] | server}


@asynccontextmanager
async def application(
    service: Service, name: str, tree: dict[str, Any], **made_by: Any
) -> AsyncIterator[App]:
    """An application under a route of its own, ready for deterministic requests; deleted afterwards.
    made_by: App's `build`."""
    app = App(service, name, Settings.load(tree), **made_by)
    await app.deploy()
    try:
        yield app
    finally:
        await app.delete()
