"""What vLLM has started ends with the process that started it, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm42.engine.vllm.guard import LOOK_S, started
from tests.support import PATIENCE_S

PARENT = """
import os, subprocess, sys, time
from llm42.engine.vllm.guard import Guard
SLEEP = "import subprocess, sys, time; {}; time.sleep(120)"
def child(inner="pass"):
    return subprocess.Popen([sys.executable, "-S", "-c", SLEEP.format(inner)], stdout=subprocess.DEVNULL)
earlier = child()
guard = Guard() if sys.argv[1] != "unguarded" else None
engine = child("subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(120)'])")
def until(condition):
    while not (found := condition()):
        time.sleep(0.02)
    return found
def slept():  # how often the guard has gone to sleep
    status = open(f"/proc/{guard._process.pid}/status").read()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
def looks(count):
    before = slept()
    until(lambda: slept() >= before + count)
(worker,) = until(lambda: open(f"/proc/{engine.pid}/task/{engine.pid}/children").read().split())
if guard and sys.argv[1] != "starting":
    looks(1)
    before = slept()
    guard.ready()
    until(lambda: slept() > before)  # on ready, the guard looks one last time
    time.sleep(0.5)
later = child()
if sys.argv[1] == "starting":
    looks(2)
if sys.argv[1] == "closed":
    guard.close()
print(earlier.pid, engine.pid, worker, later.pid, flush=True)
time.sleep(120)
"""


def survivors(how: str, left: list[str]) -> list[str]:
    """Which of a killed parent's processes live on; waits until they are `left`."""
    path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
    environment = os.environ | {"PYTHONPATH": path}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    names = ("earlier", "engine", "worker", "later")
    pids = dict(zip(names, map(int, parent.stdout.readline().split()), strict=True))
    births = {name: started(pid) for name, pid in pids.items()}
    time.sleep(LOOK_S)
    parent.kill()
    parent.wait()
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        alive = [name for name, pid in pids.items() if _runs(pid, births[name])]
        if alive == left:
            time.sleep(1.0)  # and it stays so
            alive = [name for name in alive if _runs(pids[name], births[name])]
            break
        time.sleep(0.1)
    for name in alive:
        os.kill(pids[name], signal.SIGKILL)
    return alive


def _runs(pid: int, birth: str | None) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return started(pid) == birth and state != "Z"


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("guarded", ["earlier", "later"]),
        ("starting", ["earlier"]),
        ("closed", ["earlier", "engine", "worker", "later"]),
        ("unguarded", ["earlier", "engine", "worker", "later"]),
    ],
)
def test_what_lives_on_after_the_parent_was_killed(how: str, left: list[str]) -> None:
    assert survivors(how, left) == left
