"""Starts a private Ray cluster on this machine with the application on it, and ends both without a trace."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from typing import Any

from llm42.config import Settings
from llm42.config.serve_file import APP_NAME
from llm42.errors import LaunchFailed, LLM42Error
from llm42.host.direct import go_direct, open_url
from llm42.telemetry.logs import kept_traceback, one_line
from llm42_serve import preflight, ray_node
from llm42_serve.ray_node import signals_later

START_TIMEOUT_S = 300.0
OBJECT_STORE_BYTES = 256 << 20
MAX_CAUSE = 800
"""Characters of a failed deployment's own words."""
Say = Callable[[str], None]


def prepare_environment() -> None:
    """Ray's switches; read when ray is imported, so this comes first. docs/design/ray.md has the reasons."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "llm42_serve.ingress.proxy_replies:middlewares",
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_metrics_report_interval_ms": "2500",
        "RAY_task_events_max_num_task_in_gcs": "10000",
    }.items():
        os.environ.setdefault(name, value)
    go_direct(os.environ)
    if "RAY_AUTH_MODE" not in os.environ:
        assert "ray" not in sys.modules, "call prepare_environment() before ray is imported"
        # Ray's own ports listen on all interfaces whatever it is told: a token made for this run keeps others
        # out, and nothing is written to the user's home.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class Service:
    """A cluster of one node with the application. Use as a context manager."""

    def __init__(self, settings: Settings, say: Say = lambda _: None) -> None:
        self.settings, self._say = settings, say
        host = settings.server.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"

    def __enter__(self) -> Service:
        try:
            self.start()
        except BaseException as error:
            self.stop()
            if isinstance(error, LLM42Error) or not isinstance(error, Exception):
                raise
            # whatever Ray raises: what a user can act on is its last words, not its frames
            raise LaunchFailed(f"The start failed: {one_line(error)}{kept_traceback(error)}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once best-effort requests are answered. Raises LaunchFailed; a user of the context manager
        gets nothing else."""
        server = self.settings.server
        preflight.check(self.settings, self._say)
        prepare_environment()
        self._say("Starting Ray")
        with signals_later():
            # an interrupted import leaves half a module, and Python an exit code of its own
            import ray
            from ray import serve

            from llm42_serve.app import build

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        directory = ray_node.temp_dir(self._say)
        with ray_node.nothing_left(directory), signals_later(), ray_node.no_dashboard() as taken_port:
            ray.init(
                address="local",
                include_dashboard=False,
                dashboard_host="127.0.0.1",
                dashboard_port=taken_port,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(directory),
                _metrics_export_port=self.settings.telemetry.metrics_port or None,
            )
        loading = self.settings.engine.decodes
        self._say("Loading the model into the replicas" if loading else "Starting the replicas")
        target = serve.RunTarget(
            target=build(self.settings.model_dump(mode="json")), name=APP_NAME, route_prefix="/"
        )
        serve.start(http_options={"host": server.host, "port": server.port})
        serve.run_many([target], wait_for_applications_running=False)
        self._wait_running()

    def _wait_running(self) -> None:
        from ray import serve

        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            app = serve.status().applications.get(APP_NAME)
            state = app.status.value if app else "MISSING"
            if state == "RUNNING":
                return
            if app and (state in ("DEPLOY_FAILED", "UNHEALTHY") or time.monotonic() > deadline):
                raise LaunchFailed(f"The application is {state}: {cause_of(app)} (logs: {log_dir()})")
            time.sleep(0.2)

    @property
    def metrics_url(self) -> str:
        """The page with the metrics of all processes, as Prometheus reads it."""
        import ray

        return f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def health(self) -> dict[str, Any]:
        """What /health says, whatever its HTTP status. Raises OSError when there is no answer, ValueError for
        one that is not the service's."""
        try:
            with open_url(f"{self.url}/health", 10, direct=True) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            text = error.read()
        return dict(json.loads(text))

    def wait_deterministic(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Waits for a certified verifier and returns the fingerprint. Raises LaunchFailed."""
        deadline = time.monotonic() + timeout_s
        while True:
            health, problem = self._health()
            if health.get("deterministic"):
                return str(health["fingerprint"])
            doing = problem or health["detail"].removeprefix("No verifier is ready: ")
            self._say(f"Starting the verifier: {doing}")
            states = health.get("verifier_states")
            failed = states and all(s == "failed" for s in states)
            if failed or time.monotonic() > deadline:
                raise LaunchFailed(f"{problem or health['detail']} (logs: {log_dir()})")
            time.sleep(0.2)

    def _health(self) -> tuple[dict[str, Any], str]:
        """/health, and "" or why it says nothing. On a machine that is busy with starting that passes."""
        try:
            health = self.health()
        except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
            return {}, f"{self.url}/health does not answer ({one_line(error)})"
        if "detail" not in health:
            return {}, f"{self.url}/health: {health.get('error', health)}"
        return health, ""

    def verifier_news(self) -> Callable[[], None]:
        """A look at the verifiers, which logs what has become of them since the one before."""
        from llm42_serve.verifiers.news import VerifierNews, members_of

        return VerifierNews(members_of(self.settings)).look

    def stop(self) -> None:
        """Ends the cluster, and with it replicas and verifiers; streams in progress are cut."""
        import ray

        if threading.current_thread() is threading.main_thread():
            # an impatient second Ctrl-C must not leave half of it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        ray.shutdown()


def log_dir() -> str:
    """Where this cluster's logs are."""
    import ray

    context = ray.get_runtime_context()
    return f"{context.get_temp_dir()}/{context.get_session_name()}/logs"


def cause_of(application: Any) -> str:
    """Why an application of Ray Serve (its ApplicationStatusOverview) is not running: in the words of each
    deployment that is not healthy, of a traceback only the exception."""
    words = (_describe(d.message) for d in application.deployments.values() if d.status.value != "HEALTHY")
    return "; ".join(dict.fromkeys(filter(None, words))) or str(application.message)


def _describe(message: str) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    if frames:
        after = lines[frames[-1] + 1 :]
        start = next((i for i, line in enumerate(after) if line and not line.startswith(" ")), len(after))
        lines = after[start:]
    text = " ".join(" ".join(lines).split())
    return re.sub(r"^(?:\w+\.)+(?=\w+)", "", text)[:MAX_CAUSE]
