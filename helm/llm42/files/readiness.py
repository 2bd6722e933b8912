"""Readiness of a worker: exit status 0 when this pod should get traffic.

certified: once the service has had a certified verifier. From then on this pod stays ready while best-effort
requests are served, because a verifier that dies must not take best-effort traffic down with it:
deterministic requests get a 503 instead.
serving: as soon as best-effort requests are served.

Standard library only: it runs every few seconds.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy that the pod's environment names is for the outside world."""


def main() -> int:
    """Asks this node's own Serve proxy, which exists only where a replica of the service runs."""
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--require", choices=["certified", "serving"], required=True)
    options.add_argument("--latch", type=Path, default=Path("/tmp/llm42-certified"))
    asked = options.parse_args()
    try:
        with DIRECT.open(f"http://127.0.0.1:{asked.port}/health", timeout=4) as reply:
            health = json.load(reply)
            certified = bool(health["deterministic"])
    except urllib.error.HTTPError as error:
        return refuse(f"/health answers {error.code}: {error.read(400).decode(errors='replace')}")
    except OSError as error:
        return refuse(f"no proxy, or none that answers: {error}")
    except (ValueError, TypeError, KeyError) as error:
        return refuse(f"this is not the service's /health: {error!r}")
    if certified:
        asked.latch.write_text(container())
    elif asked.require == "certified" and not seen(asked.latch):
        return refuse(f"not certified yet: {health.get('detail')}")
    return 0


def container() -> str:
    """When the container's first process started: the directory of the latch outlives a container."""
    return Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]


def seen(latch: Path) -> bool:
    """Whether this container has been certified before."""
    return latch.exists() and latch.read_text() == container()


def refuse(why: str) -> int:
    """Kubernetes shows the output of a failed probe in the pod's events."""
    print(why)
    return 1


if __name__ == "__main__":
    sys.exit(main())
