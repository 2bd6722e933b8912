"""Placement over several simulated nodes, and the loss of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.support import deterministic
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]


def test_roles_are_placed_by_resources_and_survive_the_loss_of_a_node(lab: Lab) -> None:
    directory = Path(lab.settings.model.path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.several_nodes", str(directory)],
        env=environment | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert "verify" in found["nodes"][found["verifier"]]
    assert all("fast" in found["nodes"][node] for node in found["replicas"])
    want = [lab.oracle(deterministic(i, 24)).sent for i in range(4)]
    for answers in (found["before"], found["after"], found["afterwards"]):
        assert [(tuple(t), tuple(p)) for t, p, _ in answers] == want
        assert {finish for *_, finish in answers} == {"length"}
    assert found["moved_to_spare"]
