"""An HTTP proxy that lets nothing through and remembers what it was asked."""

from __future__ import annotations

import os
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
REFUSAL = b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<html>no</html>"


class RecordingProxy(socketserver.ThreadingTCPServer):
    """`asked`: the first line of every request."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, **more: str | None) -> dict[str, str]:
        """This process's environment with every proxy variable set, in both spellings; None removes one."""
        env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        for name in NAMES:
            env[name] = env[name.upper()] = self.url
        env |= {name: value for name, value in more.items() if value is not None}
        return {name: value for name, value in env.items() if more.get(name, "") is not None}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, RecordingProxy)
        self.server.asked.append(self.rfile.readline(4096).decode("latin-1").strip())
        self.wfile.write(REFUSAL)


@contextmanager
def recording_proxy() -> Iterator[RecordingProxy]:
    """A proxy for the length of a block."""
    with RecordingProxy() as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()
