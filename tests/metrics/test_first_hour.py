"""The guide from an empty cluster to an alert: what of it can be had without a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.lib.prometheus import RULES, tool
from llm42_serve.launch import Service
from tests.chart import helm
from tests.metrics.conftest import require_prometheus
from tests.metrics.test_runbook import FIRST_HOUR, ROOT, blocks
from tests.support import wait_until

PAGE = FIRST_HOUR.read_text()
PATIENCE_S = 600


def section(title: str) -> str:
    """A section's text."""
    _, _, rest = PAGE.partition(f"\n## {title}\n")
    assert rest, title
    return rest.partition("\n## ")[0]


def commands(words: str, text: str = PAGE) -> list[list[str]]:
    """The commands of the page that begin so, as the shell splits them."""
    lines = "".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(words)]


def rendered(*more: str) -> dict[str, dict[str, Any]]:
    """Kind -> object, of the page's install with what an upgrade adds."""
    (install,) = commands("helm install llm ")
    arguments = [str(ROOT / word) if word.startswith("helm/") else word for word in install[2:]]
    done = helm.run("template", *[a for a in arguments if a != "--create-namespace"], *more)
    assert done.returncode == 0, done.stderr
    return {d["kind"]: d for d in yaml.load_all(done.stdout, yaml.CSafeLoader) if d}


def settings(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of the Serve application."""
    config = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])
    found: dict[str, Any] = config["applications"][0]["args"]
    return found


def test_the_install_brings_what_the_page_shows() -> None:
    objects = rendered()
    for kind in ("PodMonitor", "PrometheusRule"):
        assert objects[kind]["metadata"]["labels"]["release"] == "monitoring", "what Prometheus picks them by"
    service = objects["RayService"]["spec"]["serveService"]["metadata"]["name"]
    assert f"svc/{service} 8000" in PAGE
    assert {"llm"} == {o["metadata"]["labels"]["app.kubernetes.io/instance"] for o in objects.values()}
    assert "corrupt_share" not in settings(objects).get("engine", {})
    with pytest.raises(AssertionError, match="no_such_file"):
        rendered("-f", "no_such_file.yaml")  # the control


def test_the_upgrade_changes_the_engine_and_nothing_that_a_fingerprint_has() -> None:
    (upgrade,) = commands("helm upgrade llm ")
    assert "--reuse-values" in upgrade
    before, after = rendered(), rendered(*upgrade[upgrade.index("--reuse-values") + 1 :])
    assert settings(after)["engine"]["corrupt_share"] == 0.1
    pods = [o["RayService"]["spec"]["rayClusterConfig"] for o in (before, after)]
    assert pods[0] == pods[1], "in place: no new cluster"


def test_what_is_filled_in_fits_the_example() -> None:
    images = {c["image"] for t in helm.pod_templates(helm.render(_example())).values()
              for c in t["spec"]["containers"]}  # fmt: skip
    (built,) = commands("docker build", section("2. The image"))
    (loaded,) = commands("kind load", section("2. The image"))
    assert images == {built[built.index("-t") + 1]} == {loaded[3]}
    assert commands("kind create")[0][-1] == loaded[-1] == commands("kind delete")[0][-1]


def _example() -> Path:
    (install,) = commands("helm install llm ")
    return ROOT / install[install.index("-f") + 1]


def test_the_configuration_of_prometheus_is_one(tmp_path: Path) -> None:
    require_prometheus()
    (text,) = blocks(PAGE, "yaml")
    (tmp_path / "prometheus.yml").write_text(text.replace("helm/llm42/rules/llm42.yaml", str(RULES)))
    command = [str(tool("promtool")), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_alert_is_recognised(tmp_path: Path) -> None:
    (filter_,) = re.findall(r"^FIRES='(.*)'$", PAGE, re.MULTILINE)
    for state, code in (("firing", 0), ("pending", 4)):
        alert = {"labels": {"alertname": "LLM42RollbackRateHigh"}, "state": state}
        said = json.dumps({"data": {"alerts": [alert]}})
        done = subprocess.run([_jq(), "-e", filter_], input=said, text=True, capture_output=True, check=False)
        assert done.returncode == code, (state, done.stderr)


def _jq() -> str:
    if shutil.which("jq") is None or shutil.which("curl") is None:
        pytest.skip("jq and curl are not installed (Debian: apt-get install jq curl)")
    return "jq"


KUBECTL = """
kubectl() {
  case "$*" in
    *"get pods"*) echo pod/worker ;;
    *exec*) cat > script.py; kill -9 %d; echo gone ;;
    *) echo "no cluster" ;;
  esac
}
NS=serving RELEASE=llm
"""
"""What stands for a cluster. The script that finds the verifiers is kept, and the one of this test ended:
others on this machine are not ours."""


def shell(service: Service, directory: Path, *titles: str, pid: int = 0) -> str:
    """What the blocks of these sections say, with this service in the place of the page's."""
    text = "".join("".join(blocks(section(title), "sh")) for title in titles)
    text = text.replace("http://127.0.0.1:8000", service.url)
    text = text.replace("SmolLM2-135M-Instruct", service.settings.model.name)
    done = subprocess.run(
        ["bash", "-c", f"set -e{KUBECTL % pid}{text}"], cwd=directory, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.service
def test_the_requests_do_what_the_page_says(service: Service, tmp_path: Path) -> None:
    """The same bytes alone and in a crowd, and while the verifier is killed and made anew."""
    _jq()
    first = _verifier_pid(service)
    twice, killed = "4. The same bytes twice", "5. Kill the verifier"
    said = shell(service, tmp_path, twice, killed, pid=first)
    for words in ("equal, bit for bit", "gone", "equal again"):
        assert words in said
    choices, fingerprint = json.loads((tmp_path / "killed.json").read_text())
    assert choices[0]["message"]["content"]
    assert fingerprint == service.health()["fingerprint"]
    assert wait_until(lambda: _verifier_pid(service) not in (0, first), PATIENCE_S), "it was not killed"
    service.wait_deterministic()
    found = _found(tmp_path / "script.py")
    assert len(found) == 1, "one, however many there are"
    assert found == [_verifier_pid(service)]


def _found(script: Path) -> list[int]:
    """Which processes the page's script would end. It asks this test's cluster, whatever else is started on
    this machine, and ends nobody."""
    import ray

    text = script.read_text().replace("os.kill(status.pid, signal.SIGKILL)", "pass")
    assert "os.kill" not in text
    assert "/proc" not in text, "by what the service says of itself, not by names of processes"
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("killed ")]


def _verifier_pid(service: Service) -> int:
    """The process of the first verifier; 0 while there is none."""
    import ray

    from llm42.checkpoint.load import sampled_identity
    from llm42_serve.verifiers.names import get_actor, verifier_names

    settings = service.settings
    (name, *_) = verifier_names(settings, sampled_identity(settings.model.path), 1)
    try:
        status = ray.get(get_actor(name).status.remote(), timeout=PATIENCE_S)
    except (ValueError, ray.exceptions.RayError):
        return 0
    return int(status.pid)
