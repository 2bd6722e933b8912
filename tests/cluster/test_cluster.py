"""A Ray cluster of several nodes, started by hand: who is placed where, and a node that is drained under
streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import DRAIN_S, RESOURCES
from tests.support import Lab

pytestmark = [pytest.mark.service, pytest.mark.slow]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tiny: Lab) -> Found:
    """What tests/cluster/parts.py has found."""
    return found_by("parts", tiny)


def found_by(module: str, tiny: Lab) -> Found:
    """What a module of this package prints, run in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.cluster.{module}", str(Path(tiny.settings.model.path))],
        env=environment | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def test_a_missing_node_for_verifiers_does_not_hold_best_effort_back(found: Found) -> None:
    """The control is the other application: where an ingress has no place it does not run."""
    part = found["without_a_verifiers_node"]
    assert part["best_effort"] == "length"
    assert part["deterministic"] == [503, True], "refused for now, with Retry-After"
    assert part["other_ingress"] == "DEPLOYING"
    assert part["then"] == [True, True], "once there is one, both answer as the oracle does"


def test_two_verifiers_never_share_a_node(found: Found) -> None:
    """Each asks for a tenth of a GPU and for its node's one resource. The control: without they share one."""
    nodes = {kind: len(set(where)) for kind, where in found["one_verifier_a_node"].items()}
    assert nodes == {"with": 2, "without": 1}


@pytest.mark.parametrize("part", ["drained", "control"])
def test_no_stream_notices_that_a_node_is_drained(found: Found, part: str) -> None:
    """A successor is ready before the only verifier leaves; Serve moves replicas and ingresses."""
    seen = found[part]["seen"]
    assert seen["deterministic"].pop("ended") > 0
    assert seen["best effort"].pop("ended") > 0
    if part == "drained":
        assert seen == {"deterministic": {}, "best effort": {}}
    assert not seen["deterministic"].get("wrong")
    assert found[part]["verifiers_on"] == 1, "on a node that is still there"


def test_a_drained_node_is_idle_long_before_its_time_is_over(found: Found) -> None:
    """The control: nobody looks for drains, and the node waits in vain for its verifier to go."""
    assert found["drained"]["idle"]
    assert not found["control"]["idle"]
    assert found["control"]["seconds"] >= DRAIN_S


def test_a_node_with_a_fast_path_and_no_ingress_answers(tiny: Lab) -> None:
    """Its proxy sends requests to the ingress elsewhere (proxy_location EveryNode, as in the chart). The
    control is the verifier's node, which has no replica of Serve's, and so no proxy."""
    seen = found_by("proxies", tiny)
    whole = {"health": "ok", "best_effort": "length", "deterministic": True}
    fast, verifier, ingress = (seen[role] for role in RESOURCES)
    assert fast == ingress == whole
    assert verifier == {"health": "no answer", "best_effort": None, "deterministic": False}
