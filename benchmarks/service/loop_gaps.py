"""How long request bodies keep an ingress's event loop from its work.

    python -m benchmarks.service.loop_gaps

Sends hostile bodies (tests/service/hostile_bodies.py) to the HTTP application in this process, without a
network, and reports of each the longest gap between two turns of the loop (tests/service/loop_gap.py: the
time, or the process's CPU time where that is less), the least of `--tries` tries.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.report import RESULTS, Figure, arguments, report
from llm42.api.app import create_app
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from tests.service.hostile_bodies import bodies
from tests.service.loop_gap import longest_gap, settle_heap
from tests.service.scripted import Scripted, hello

TARGET_MS = 50.0


async def gaps(settings: Settings, size: int, tries: int) -> dict[str, dict[str, Any]]:
    """By body: its bytes, the answer's status, the gap in milliseconds."""
    tokenizer, found = Tokenizer.load(settings.model.path), dict[str, dict[str, Any]]()
    transport = httpx.ASGITransport(create_app(settings, tokenizer, Scripted(hello)))
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.get("/version")
        settle_heap()
        for name, path, body in bodies(settings.model.name, size):

            async def pieces(body: bytes = body) -> AsyncIterator[bytes]:
                for at in range(0, len(body), 1 << 16):
                    yield body[at : at + (1 << 16)]
                    await asyncio.sleep(0)

            least = float("inf")
            for _ in range(tries):
                gap, reply = await longest_gap(http.post(path, content=pieces(), headers=headers))
                least = min(least, gap)
            found[name] = {"bytes": len(body), "status": reply.status_code, "gap_ms": round(1e3 * least, 1)}
            print(name, found[name], flush=True)
    return found


def main() -> None:
    """Writes results/loop-gaps.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000, help="bytes of a body, about")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = asyncio.run(gaps(Settings(), args.size, args.tries))
    worst = max(found, key=lambda name: float(found[name]["gap_ms"]))
    raw = {"options": arguments(args), "bodies": found, "worst": worst, "load_average": os.getloadavg()}
    figures = {
        "longest_gap_ms": Figure(found[worst]["gap_ms"], "ms", TARGET_MS),
        "bodies": Figure(len(found), "bodies", better="higher"),
    }
    print(report("loop-gaps", figures, raw, args.out))


if __name__ == "__main__":
    main()
