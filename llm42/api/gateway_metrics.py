"""GET /metrics: the load of this machine's replica, under the names that gateways for vLLM read (llm-d, the
Gateway API Inference Extension, production-stack). What Prometheus should scrape is another page, with more
and exact counts: llm42/telemetry/metrics.py."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from llm42.api.backend import Backend, Status
from llm42.api.errors import RETRY_AFTER_S, error_object

FRESH_S = 0.2
"""So old an answer may be: gateways ask twenty times a second, and a replica has other things to do."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MISSING = "No replica answers, so there is no load to show."


def page(status: Status, model: str) -> str:
    """Prometheus' text format. The older name of the KV's share is still what production-stack reads."""
    share = min(1.0, status.kv_used / status.kv_total) if status.kv_total else 0.0
    kv = "Share of the KV cache that live requests use"
    gauges = (
        ("vllm:num_requests_running", "Requests that are being decoded", status.running),
        ("vllm:num_requests_waiting", "Requests that wait to be decoded", status.waiting + status.queued),
        ("vllm:kv_cache_usage_perc", kv, share),
        ("vllm:gpu_cache_usage_perc", f"{kv} (older name)", share),
    )
    quoted = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(
        f'# HELP {name} {text}\n# TYPE {name} gauge\n{name}{{model_name="{quoted}"}} {float(value)!r}\n'
        for name, text, value in gauges
    )


def gateway_routes(model: str, backend: Backend) -> APIRouter:
    """The route. Many who ask at once are answered by one look at the replica."""
    router, looking = APIRouter(), asyncio.Lock()
    seen: tuple[float, Status] | None = None

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        nonlocal seen
        async with looking:
            if seen is None or time.monotonic() - seen[0] > FRESH_S:
                status = await backend.status(near=True)
                seen = time.monotonic(), status
            status = seen[1]
        if status.serving:
            return Response(page(status, model), headers={"Content-Type": CONTENT_TYPE})
        # not counted among the errors: a gateway would add twenty a second
        body = error_object(_MISSING, 503, None, "service_unavailable")
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S[503])})

    return router
