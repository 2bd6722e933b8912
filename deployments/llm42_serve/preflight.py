"""What is checked before the slow part of a start begins.

Imports PyTorch only where a GPU is asked for: the process of `llm42 serve` computes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from llm42.api.keys import configured_keys
from llm42.checkpoint.description import check_model
from llm42.checkpoint.fetch import DEFAULT_DIR
from llm42.config import Settings
from llm42.engine.build import require_library
from llm42.errors import LaunchFailed, LLM42Error
from llm42.receipt import Keyring
from llm42.telemetry.tracing import make_tracer

EPSILON = 1e-6
METRICS_PORT = 8090


def check(settings: Settings, say: Callable[[str], None] = lambda _: None) -> None:
    """Raises LaunchFailed for a model, library, key file or GPU that is not there, for a model that cannot be
    served as its files describe it, and for a taken port. say: hears of what a start can do without."""
    server, model = settings.server, Path(settings.model.path)
    if not model.exists():
        default = DEFAULT_DIR.name in model.parts
        hint = " Set it to a GGUF file or to a Hugging Face directory."
        if default:
            hint = " `make run` fetches it, or: python -m llm42.checkpoint.fetch"
        raise LaunchFailed(f"There is no model at {model} (model.path).{hint}")
    require_free_port(server.host, server.port)
    if port := settings.telemetry.metrics_port:
        require_free_port("0.0.0.0", port, "telemetry.metrics_port")
    try:
        check_model(settings.model)
        Keyring.load(settings.audit)
        configured_keys(settings.server)
        make_tracer(settings.telemetry, "preflight").close()
        require_library(settings.engine)
        if settings.model.device == "cuda":
            from llm42.checkpoint.load import require_device

            require_device("cuda")
            _require_gpus(settings, say)
    except LLM42Error as error:
        raise LaunchFailed(str(error)) from error


def _require_gpus(settings: Settings, say: Callable[[str], None]) -> None:
    """Ray would wait for them without a word. A share of a GPU is one GPU's."""
    import torch

    engine, server, found = settings.engine, settings.server, torch.cuda.device_count()
    parallel = engine.gpus_per_replica
    free = [1.0] * found
    if _place(free, server.fastpath_replicas * parallel, engine.gpus):
        raise LaunchFailed(
            f"{server.fastpath_replicas} replicas (server.fastpath_replicas) of {parallel} x {engine.gpus:g}"
            f" GPUs (engine.gpus) do not fit on this machine, which has {found}: lower one of these"
        )
    if missing := _place(free, server.verifiers, settings.verifier.gpus):
        problem = (
            f"{missing} of {server.verifiers} verifiers (server.verifiers) will wait for a GPU: each takes"
            f" {settings.verifier.gpus:g} (verifier.gpus), and that is not left of this machine's {found}"
        )
        if missing == server.verifiers and not engine.decodes:
            raise LaunchFailed(
                f"{problem}; with engine.kind canonical nothing would be answered: lower verifier.gpus"
            )
        say(problem)


def _place(free: list[float], count: int, share: float) -> int:
    """Takes `count` shares out of `free`, GPU by GPU; whole GPUs where a share is more than one. How many
    found no place."""
    for done in range(count):
        places = [i for i, part in enumerate(free) if part >= min(1.0, share) - EPSILON]
        needed = max(1, round(share))
        if len(places) < needed:
            return count - done
        for i in places[:needed]:
            free[i] -= min(1.0, share)
    return 0


def require_free_port(host: str, port: int, option: str = "--port") -> None:
    """Raises LaunchFailed when something listens there already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchFailed(
                f"{host}:{port} cannot be used ({error.strerror}); choose another with {option}"
            ) from error


def default_metrics_port() -> int:
    """The usual port of the metrics page, or 0 (any) when something listens there already."""
    try:
        require_free_port("0.0.0.0", METRICS_PORT)
    except LaunchFailed:
        return 0
    return METRICS_PORT
