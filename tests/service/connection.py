"""One HTTP connection to the application, message by message: what httpx's transport joins is seen apart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from llm42.api.app import create_app
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import Script, Scripted


def _scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "scheme": "http",
        "server": ("test", 80), "client": ("test", 1), "http_version": "1.1", "root_path": "",
        "asgi": {"version": "3.0"},
    }  # fmt: skip


class Connection:
    """Sends a body, then says nothing until `leave`; notes what comes back."""

    def __init__(self, body: dict[str, Any]) -> None:
        whole = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait(whole)
        self.receive = self._incoming.get
        self.sent: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.broken = False

    async def send(self, message: dict[str, Any]) -> None:
        if self.broken:
            raise OSError("broken pipe")
        self.sent.append(message)
        await self.reading.wait()

    def leave(self) -> None:
        """The client closes the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent[1:]).decode()


def connect(
    tokenizer: Tokenizer, script: Script, settings: Settings, path: str, body: dict[str, Any]
) -> tuple[Connection, Scripted, asyncio.Task[None]]:
    """A request that is under way."""
    backend, link = Scripted(script), Connection(body)
    app: Any = create_app(settings, tokenizer, backend)
    return link, backend, asyncio.create_task(app(_scope_of(path), link.receive, link.send))
