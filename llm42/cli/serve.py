"""The `serve` command: starts the service, says how to ask it something, and waits for Ctrl-C."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.markup import escape

from llm42.cli.progress import Steps
from llm42.config import Settings
from llm42.errors import LaunchFailed
from llm42.telemetry.logs import configure
from llm42_serve.launch import Service
from llm42_serve.preflight import default_metrics_port

# messages have URLs, which a wrapped line would break
out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)


def run_serve(settings: Settings, host: str | None, port: int | None, metrics_port: int) -> None:
    """Serves until it is interrupted. host, port, metrics_port: instead of the settings', where given (not
    None, not 0). Raises LLM42Error."""
    metrics_port = metrics_port or settings.telemetry.metrics_port or default_metrics_port()
    telemetry = settings.telemetry.model_copy(update={"metrics_port": metrics_port})
    changes = {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    server = settings.server.model_copy(update=changes)
    settings = settings.model_copy(update={"server": server, "telemetry": telemetry})
    try:
        with Steps() as steps, Service(settings, steps) as service:
            problem = _certification_problem(service)
            steps.done()
            _announce(service.url, settings, problem)
            command = "python -m llm42" if sys.argv[0].endswith("__main__.py") else sys.argv[0]
            out.print(f"\nMetrics; live: {command} top {service.metrics_url}", soft_wrap=True)
            configure(telemetry, "serve")
            until_interrupted(service.verifier_news())
            err.print("Stopping ...")
    except KeyboardInterrupt:
        err.print("Interrupted; nothing is left running.")


def until_interrupted(look: Callable[[], None] = lambda: None) -> None:
    """Waits for Ctrl-C or SIGTERM, and looks each second. In short pieces: a signal that the kernel gives to
    another thread does not wake this one, and Python's handlers run in this one only."""
    with suppress(KeyboardInterrupt):
        while True:
            look()
            time.sleep(1.0)


def _certification_problem(service: Service) -> str:
    """Waits for the verifiers; returns the reason when there is none, and "" when there is."""
    if service.settings.server.verifiers == 0:
        return "Deterministic requests are switched off (server.verifiers is 0)."
    try:
        service.wait_deterministic()
    except LaunchFailed as error:
        return str(error)
    return ""


def _announce(url: str, settings: Settings, problem: str) -> None:
    """What to do next, ready to be pasted."""
    model = settings.model
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
        "temperature": 0,
        "deterministic": not problem,
    }
    curl = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'"
    if settings.server.api_keys or settings.server.api_keys_file:
        curl += " -H 'Authorization: Bearer YOUR_KEY'"
    curl += f" -d {shlex.quote(json.dumps(body))}"
    out.print(f"[bold green]Ready[/]: {escape(model.name)} on {url} ({model.dtype}, {model.device})")
    if problem:
        left = "Best-effort only" if settings.engine.decodes else "Nothing is answered yet"
        out.print(f"[bold yellow]{left}:[/] {escape(problem)}")
    kind = "best-effort" if problem else "deterministic: the same bits each time, under any load"
    out.print(f"\nAsk it something ({kind}):\n")
    print(curl, flush=True)  # unwrapped, so that it can be pasted
    if settings.engine.decodes:
        out.print("\nSee what happens without determinism, in another terminal:\n\n  make demo")
    out.print("\nCtrl-C stops it.")
