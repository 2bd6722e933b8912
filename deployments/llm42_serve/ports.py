"""Ports that a start needs."""

from __future__ import annotations

import socket

from llm42.errors import LaunchFailed

METRICS_PORT = 8090


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
