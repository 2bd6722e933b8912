"""What stands before Serve's proxy: its own replies in the service's shape, and no header that switches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve._private.http_util import get_http_response_status
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from llm42_serve.ingress.proxy_replies import ProxyReplies, middlewares

Said = tuple[int, dict[str, str], bytes]


def start(status: int, kind: str, **headers: str) -> Message:
    raw = [(b"content-type", kind.encode()), *((k.encode(), v.encode()) for k, v in headers.items())]
    return {"type": "http.response.start", "status": status, "headers": raw}


def body(text: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


async def asked(messages: list[Message], path: str = "/v1/completions") -> Said:
    """The reply that a client gets when Serve's proxy sends these messages."""
    sent: list[Any] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(b"x-request-id", b"mine")]}
    await ProxyReplies(proxy)(scope, _nothing, send)
    assert [m["type"] for m in sent[:1]] == ["http.response.start"]
    assert not sent[-1].get("more_body", False)
    assert sum(m["type"] == "http.response.start" for m in sent) == 1
    headers = {k.decode().lower(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(m["body"] for m in sent[1:])


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


PRESSED = BackPressureError(num_queued_requests=7, max_queued_requests=5)


def own_words(status: int) -> str:
    """As the installed Serve says them."""
    raised: dict[int, BaseException] = {
        408: TimeoutError(),
        429: PRESSED,
        503: DeploymentUnavailableError(DeploymentID(name="Ingress", app_name="llm42")),
    }
    if status in raised:
        return get_http_response_status(raised[status], 2.5, "r-1").message
    if status == 404:
        return "Path '/health' not found. Ping http://.../-/routes for available routes."
    return "Internal Server Error"


@pytest.mark.parametrize(
    ("status", "becomes", "code"),
    [
        (404, 503, "service_unavailable"),
        (408, 408, "request_timeout"),
        (429, 429, "overloaded"),
        (500, 500, "internal_error"),
        (503, 503, "service_unavailable"),
    ],
)
async def test_serves_own_errors(status: int, becomes: int, code: str) -> None:
    text = own_words(status).encode()
    kind = "" if status == 500 else "text/plain; charset=utf-8"
    messages = [start(status, kind, **{"x-request-id": "theirs"}), body(text)]
    got, headers, reply = await asked(messages)
    error = json.loads(reply)["error"]
    assert (got, error["code"], headers["content-type"]) == (becomes, code, "application/json")
    assert set(error) == {"message", "type", "param", "code"}
    assert (headers["x-request-id"], int(headers["content-length"])) == ("theirs", len(reply))
    assert ("retry-after" in headers) is (becomes in (429, 503))
    assert b"routes" not in reply


async def test_what_the_service_says_is_not_touched() -> None:
    for messages in (
        [start(404, "application/json"), body(b'{"error": 1}')],
        [start(200, "text/plain"), body(b"fine", more=True), body(b"")],
        [start(200, "text/event-stream"), body(b"data: 1\n\n", more=True), body(b"data: [DONE]\n\n")],
    ):
        status, _, reply = await asked(messages)
        assert status == messages[0]["status"]
        assert reply == b"".join(m["body"] for m in messages[1:])


@pytest.mark.parametrize("status", [400, 404, 408, 429, 500, 503])
async def test_nor_what_another_application_says(status: int) -> None:
    """In plain text, as many frameworks do; whole or in pieces."""
    said = start(status, "text/plain; charset=utf-8")
    for pieces in ([body(b"Internal Server Error")], [body(b"Not ", more=True), body(b"here.")], [body(b"")]):
        got, headers, reply = await asked([said, *pieces], "/other")
        assert (got, headers["content-type"]) == (status, "text/plain; charset=utf-8")
        assert reply == b"".join(p["body"] for p in pieces)


async def test_serves_own_paths_are_not_touched() -> None:
    messages = [start(503, "text/plain"), body(b"This node is being drained.")]
    assert (await asked(messages, "/-/healthz"))[2] == b"This node is being drained."


async def test_no_answer_at_all_is_an_error_object() -> None:
    status, headers, reply = await asked([])
    assert (status, headers["x-request-id"]) == (500, "mine")
    assert json.loads(reply)["error"]["code"] == "internal_error"


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    _, _, reply = await asked([start(200, "text/event-stream"), body(b"data: {}\n\n", more=True)])
    first, error, done, end = reply.decode().split("\n\n")
    assert (first, done, end) == ("data: {}", "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "service_unavailable"


async def test_headers_for_serve_alone_do_not_pass() -> None:
    """Nor do bytes on which it fails: its reply to them is a plain 500."""
    seen: list[Any] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        await send(start(200, "text/plain"))
        await send(body(b""))

    async def send(_: Message) -> None:
        pass

    given = [
        (b"X-Request-Timeout-Seconds", b"0.3"),
        (b"x-request-timeout-seconds", b"0"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"X-Request-ID", b"caf\xe9"),
        (b"traceparent", b"\xff"),
        (b"serve_multiplexed_model_id", b"\xe9"),
        (b"accept", b"*/*"),
        (b"x-request-id", "café".encode()),
    ]
    made, _ = middlewares()
    application: Callable[..., Any] = made.cls(proxy)
    await application({"type": "http", "path": "/", "headers": given}, _nothing, send)
    assert seen == given[-2:]
