"""Starts a private Ray cluster on this machine with the application on it, and ends both without a trace."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deployments import preflight
from deployments.preflight import LaunchFailed, cause_of, require_free_port
from llm42.config import Settings

APP_NAME = "llm42"
METRICS_PORT = 8090
START_TIMEOUT_S = 300.0
OBJECT_STORE_BYTES = 256 << 20
Say = Callable[[str], None]


def read_serve_config(path: str | Path) -> Settings:
    """The settings in a Ray Serve configuration (its only application's args), or in a bare settings file.

    Paths are made absolute, because Ray's workers run elsewhere. A file with options that only a cluster can
    honour (per-deployment overrides, several applications) is refused: `serve deploy` is the tool for it.
    """
    source = Path(path)
    try:
        data: dict[str, Any] = yaml.safe_load(source.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise LaunchFailed(f"{source}: {error}") from error
    if "applications" not in data:
        return absolute(Settings.load(data))
    applications = data["applications"]
    if len(applications) != 1 or applications[0].get("deployments"):
        raise LaunchFailed(
            f"{source}: `llm42 serve` runs one application without overrides in `deployments:`. "
            f"On a cluster use: serve deploy {source}"
        )
    args: dict[str, Any] = dict(applications[0].get("args") or {})
    http = data.get("http_options") or {}
    server = {key: http[key] for key in ("host", "port") if key in http} | dict(args.get("server") or {})
    return absolute(Settings.load(args | {"server": server}))


def absolute(settings: Settings) -> Settings:
    """The same settings with absolute paths."""
    exports = str(Path(settings.engine.vllm.export_dir).absolute())
    vllm = settings.engine.vllm.model_copy(update={"export_dir": exports})
    engine = settings.engine.model_copy(update={"vllm": vllm})
    model = settings.model.model_copy(update={"path": str(Path(settings.model.path).absolute())})
    where = settings.verifier.certificate_dir
    cached = None if where is None else str(Path(where).absolute())
    verifier = settings.verifier.model_copy(update={"certificate_dir": cached})
    traces = str(Path(settings.telemetry.trace_dir).absolute())
    telemetry = settings.telemetry.model_copy(update={"trace_dir": traces})
    keys = {name: str(Path(file).absolute()) for name, file in settings.audit.keys.items()}
    audit = settings.audit.model_copy(update={"keys": keys})
    changes = {
        "model": model,
        "engine": engine,
        "verifier": verifier,
        "telemetry": telemetry,
        "audit": audit,
    }
    return settings.model_copy(update=changes)


def prepare_environment() -> None:
    """Ray's switches; read when ray is imported, so this comes first. docs/structure.md has the reasons."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_metrics_report_interval_ms": "2500",
    }.items():
        os.environ.setdefault(name, value)
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
        self.url = f"http://{settings.server.host}:{settings.server.port}"

    def __enter__(self) -> Service:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once best-effort requests are answered. Raises LaunchFailed."""
        server = self.settings.server
        preflight.check(self.settings, self._say)
        prepare_environment()
        self._say("Starting Ray")
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with signals_later():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _metrics_export_port=self.settings.telemetry.metrics_port or None,
            )
        self._say("Loading the model into the replicas")
        serve.start(http_options={"host": server.host, "port": server.port})
        self._run_application()

    def _run_application(self) -> None:
        from ray import serve

        from deployments.app import build

        target = serve.RunTarget(
            target=build(self.settings.model_dump(mode="json")), name=APP_NAME, route_prefix="/"
        )
        serve.run_many([target], wait_for_applications_running=False)
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
        """What /health says, whatever its HTTP status."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def wait_deterministic(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Waits for a certified verifier and returns the fingerprint. Raises LaunchFailed."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                health = self.health()
            except TimeoutError:  # a machine that is busy with starting; not a failure yet
                if time.monotonic() > deadline:
                    raise LaunchFailed(f"{self.url}/health does not answer (logs: {log_dir()})") from None
                continue
            if health["deterministic"]:
                return str(health["fingerprint"])
            doing = health["detail"].removeprefix("No verifier is ready: ")
            self._say(f"Starting the verifier: {doing}")
            failed = health["verifier_states"] and all(s == "failed" for s in health["verifier_states"])
            if failed or time.monotonic() > deadline:
                raise LaunchFailed(f"{health['detail']} (logs: {log_dir()})")
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends the cluster, and with it replicas and verifiers; streams in progress are cut."""
        import ray

        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # an impatient second Ctrl-C must not leave half of it
        ray.shutdown()


@contextmanager
def signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the block's end: half a Ray cluster cannot be shut down.

    Nobody else sets handlers meanwhile: `ray.init` would make SIGTERM an exit there and then. Its C++ part
    sets one beneath Python's that prints a stack and goes on; that one is gone after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds}
    register = signal.signal

    def register_others(kind: int, handler: Any) -> Any:
        return signal.getsignal(kind) if kind in kinds else register(kind, handler)

    signal.signal = register_others  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = register
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if came:
            signal.raise_signal(came[0])


def log_dir() -> str:
    """Where this cluster's logs are."""
    import ray

    context = ray.get_runtime_context()
    return f"{context.get_temp_dir()}/{context.get_session_name()}/logs"


def default_metrics_port() -> int:
    """The usual port of the metrics page, or 0 (any) when something listens there already."""
    try:
        require_free_port("0.0.0.0", METRICS_PORT)
    except LaunchFailed:
        return 0
    return METRICS_PORT
