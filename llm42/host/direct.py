"""What the service says to itself goes direct, whatever proxy the environment names for the outside world."""

from __future__ import annotations

import http.client
import ipaddress
import urllib.request
from collections.abc import MutableMapping
from urllib.parse import urlsplit

NO_GRPC_PROXY = "0.0.0.0/0,::/0,localhost"
"""All addresses. gRPC takes its proxy from grpc_proxy, https_proxy or http_proxy, and the exceptions from
no_grpc_proxy, else no_proxy. All gRPC here is between Ray's processes, which call each other by address."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def go_direct(environ: MutableMapping[str, str]) -> None:
    """Sets what keeps gRPC, and HTTP to this machine, off any proxy. It holds for this process, if it has not
    opened a gRPC channel yet, and for those that it starts. Other exceptions that are there stay."""
    environ["no_grpc_proxy"] = _joined(environ.get("no_grpc_proxy", ""), NO_GRPC_PROXY.split(","))
    # the lower-case name wins where both are read, so it gets what either has
    both = ",".join(filter(None, (environ.get("no_proxy"), environ.get("NO_PROXY"))))
    environ["no_proxy"] = environ["NO_PROXY"] = _joined(both, LOOPBACK)


def _joined(value: str, more: tuple[str, ...] | list[str]) -> str:
    known = [part.strip() for part in value.split(",") if part.strip()]
    return ",".join(dict.fromkeys([*known, *more]))


def is_this_machine(url: str) -> bool:
    """Whether a URL's host is a loopback name or address (or 0.0.0.0, which reaches the same)."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def open_url(
    request: str | urllib.request.Request, timeout_s: float, direct: bool | None = None
) -> http.client.HTTPResponse:
    """`urllib.request.urlopen`, without a proxy where `direct` is true (None: for this machine's URLs).
    Raises what that raises: OSError, http.client.HTTPException, ValueError."""
    url = request if isinstance(request, str) else request.full_url
    without = is_this_machine(url) if direct is None else direct
    handlers = [urllib.request.ProxyHandler({})] if without else []
    reply: http.client.HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)
    return reply
