"""What is checked before the slow part of a start begins, and what is said when it fails after all."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

from llm42.config import Settings
from llm42.engine.vllm_options import require_vllm
from llm42.models.fetch import DEFAULT_DIR
from llm42.models.load import require_device
from llm42.protocol import LLM42Error


class LaunchFailed(LLM42Error):
    """The service did not come up; the message says why and where the logs are."""

    code = "launch_failed"


def check(settings: Settings) -> None:
    """Raises LaunchFailed for a model, library or GPU that is not there, and for a port that is taken."""
    server, model = settings.server, Path(settings.model.path)
    if not model.exists():
        default = DEFAULT_DIR.name in model.parts
        hint = " It is fetched by `make run`, or by: python -m llm42.models.fetch" if default else ""
        raise LaunchFailed(f"There is no model at {model} (model.path).{hint}")
    require_free_port(server.host, server.port)
    if port := settings.telemetry.metrics_port:
        require_free_port("0.0.0.0", port, "telemetry.metrics_port")
    try:
        if settings.engine.kind == "vllm":
            require_vllm()
        require_device(settings.model.device)
    except LLM42Error as error:
        raise LaunchFailed(str(error)) from error
    if settings.model.device == "cuda":
        _require_gpus(settings)


def _require_gpus(settings: Settings) -> None:
    """Ray would wait for them, silently and for ever."""
    import torch

    engine, server = settings.engine, settings.server
    parallel = engine.vllm.tensor_parallel_size if engine.kind == "vllm" else 1
    replicas = server.fastpath_replicas * parallel * engine.gpus
    verifiers = server.verifiers * settings.verifier.gpus
    found = torch.cuda.device_count()
    if replicas + verifiers > found + 1e-6:
        raise LaunchFailed(
            f"{replicas:g} GPUs for replicas (server.fastpath_replicas, engine.gpus) and {verifiers:g} for"
            f" verifiers (server.verifiers, verifier.gpus) are asked for; this machine has {found}"
        )


def require_free_port(host: str, port: int, option: str = "--port") -> None:
    """Raises LaunchFailed when something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchFailed(
                f"{host}:{port} cannot be used ({error.strerror}); choose another with {option}"
            ) from error


def cause_of(application: Any) -> str:
    """Why an application of Ray Serve (its ApplicationStatusOverview) failed: the last line of each failed
    deployment's traceback, else its own message."""
    found = []
    for deployment in application.deployments.values():
        lines = [line for line in deployment.message.splitlines() if re.match(r"[\w.]+: ", line)]
        if lines and deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
            found.append(re.sub(r"^[\w.]+\.(?=\w+: )", "", lines[-1]))
    return "; ".join(dict.fromkeys(found)) or str(application.message)
