"""Runs the tests in tiers, each of several processes side by side, and says what was left out.

    python -m tests.tiers quick [pytest's options]   what is not slow
    python -m tests.tiers all [pytest's options]     everything but vLLM's tests
    python -m tests.tiers vllm [pytest's options]    those, where vLLM is installed
    python -m tests.tiers told all vllm              fails where more was left out than tests/skips.txt names

What needs a Ray cluster waits half of its time, and much else a part of it, so there are more processes than
cores, but not all at once: what waits for an answer on a busy machine takes for dead what is only slow.
Triton's interpreter is chosen when Triton is imported, so its cases have a process of their own. The output
of each process goes to a file in build/tests; its end is shown when all are done, all of it when something
failed.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "tests"
SKIPS = ROOT / "tests" / "skips.txt"
AT_ONCE = 4
"""Processes side by side, on two cores."""
NOTHING_TO_RUN = 5
"""pytest's exit status when no test was selected."""
HOW = {
    "slow": "make test-all",
    "vllm": "make test-vllm",
    "gpu": "on an NVIDIA GPU, see tests/gpu/conftest.py",
}
"""How to get what a marker leaves out."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a tier."""

    name: str
    where: tuple[str, ...]
    marks: str = ""
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


HERE = "not service and not gpu and not vllm"
CLUSTERS = "service and not gpu and not vllm"
STARTS_ITS_OWN = (
    "tests/service/test_behind_a_proxy.py",
    "tests/service/test_failed_starts.py",
    "tests/service/test_serve_command.py",
    "tests/chaos/test_nodes.py",
    "tests/cluster",
)
"""What does not use the cluster of tests/conftest.py."""
UNIT = Part("unit", ("tests/unit",), HERE)
PROTOCOL = Part("protocol", ("tests/protocol",), HERE)
REST = Part("rest", ("tests", *(f"--ignore={folder}" for folder in UNIT.where + PROTOCOL.where)), HERE)
APART = tuple(f"--ignore={file}" for file in STARTS_ITS_OWN)
CLUSTER = Part("cluster", ("tests/service", "tests/metrics", *APART), CLUSTERS)
NO_METRICS = {"RAY_metrics_report_interval_ms": "60000"}
"""Where no test reads Ray's metrics: with many processes a node spends a tenth of a core on them."""
CHAOS = Part("chaos", ("tests/chaos", *APART), CLUSTERS, env=NO_METRICS)
"""All of it is slow, and waits most of the time: a cluster of its own."""
STARTS = Part("starts", STARTS_ITS_OWN, CLUSTERS)
INTERPRETER = Part(
    "interpreter",
    ("tests/interpreter",),
    options=("-o", "python_files=cases_*.py"),
    env={"TRITON_INTERPRET": "1"},
)
ADAPTER = "tests/protocol/test_vllm.py"
VLLM = Part("vllm", ("tests/protocol", f"--ignore={ADAPTER}"), "vllm")
VLLM_ADAPTER = Part("vllm-adapter", (ADAPTER,), "vllm")


def parts_of(tier: str) -> list[Part]:
    """The processes of a tier."""
    if tier == "vllm":
        return [VLLM, VLLM_ADAPTER]
    if tier == "all":
        return [CLUSTER, CHAOS, UNIT, PROTOCOL, STARTS, INTERPRETER, REST]
    assert tier == "quick", f"there are the tiers quick, all and vllm, not {tier!r}"
    marked = CLUSTER, PROTOCOL, UNIT, REST, STARTS
    quick = [replace(part, marks=f"{part.marks} and not slow") for part in marked]
    return [*quick, replace(INTERPRETER, marks="not slow")]


class Running:
    """A part under way; its output goes to a file."""

    def __init__(self, tier: str, part: Part, options: list[str]) -> None:
        self.part, self.began, self.seconds, self.cpu = part, time.monotonic(), 0.0, 0.0
        self.log, self.tally = (BUILD / f"{tier}-{part.name}.{kind}" for kind in ("log", "json"))
        self.tally.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *part.where,
            "-p",
            "tests.tally",
            "--tally",
            str(self.tally),
        ]
        command += ["-o", f"cache_dir=.pytest_cache/{part.name}", *part.options]
        command += ["-m", part.marks] if part.marks else []
        # one thread each: those that wait for each other make no progress while another process has the core
        env = {"OMP_NUM_THREADS": "1"} | os.environ | part.env
        # else each of some hundred processes would compile every module anew
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *options], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def done(self) -> bool:
        """Whether it has ended; notes when, and the CPU seconds of it and of its children."""
        before = _ended_children_cpu()
        if self.process.poll() is None:
            return False
        self.seconds = self.seconds or time.monotonic() - self.began
        self.cpu = self.cpu or _ended_children_cpu() - before
        return True

    def closing(self) -> str:
        """pytest's last line."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def _ended_children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(tier: str, options: list[str]) -> int:
    """Runs a tier; the exit status."""
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{tier}.json").unlink(missing_ok=True)
    if tier != "quick":  # tests/support/smollm2.py: it is kept under its inputs; CI makes one anew
        shutil.rmtree(BUILD / "certificates", ignore_errors=True)
    running, left = list[Running](), parts_of(tier)
    try:
        while (busy := sum(not one.done() for one in running)) or left:
            for part in left[: AT_ONCE - busy]:
                running.append(Running(tier, part, options))
                print(f"{tier}: {part.name} is running: {running[-1].log.relative_to(ROOT)}", flush=True)
            left = left[AT_ONCE - busy :]
            time.sleep(0.2)
    except KeyboardInterrupt:  # the terminal has told the children too: a cluster needs time to end
        for one in running:
            one.process.wait()
        return 130
    except SystemExit:
        for one in running:
            one.process.send_signal(signal.SIGINT)
            one.process.wait()
        raise
    codes = [one.process.returncode for one in running]
    bad = [
        one
        for one, code in zip(running, codes, strict=True)
        if code and not (code == NOTHING_TO_RUN and options and 0 in codes)
    ]
    for one in bad:
        print(f"\n======== {one.part.name} ========\n{one.log.read_text(errors='replace')}", flush=True)
    told = merged([one.tally for one in running])
    (BUILD / f"{tier}.json").write_text(json.dumps(told, indent=1))
    print_times(told)
    for one in running:
        print(f"{tier}: {one.part.name} {one.seconds:.0f} s, {one.cpu:.0f} s of CPU: {one.closing()}")
    print(summary(told), flush=True)
    return max((abs(one.process.returncode) for one in bad), default=0)


def merged(tallies: list[Path]) -> dict[str, Any]:
    """What several runs came to together: left out is what none of them ran."""
    told: dict[str, Any] = {"ran": [], "failed": []}
    told |= {key: {} for key in ("skipped", "left_out", "seconds", "cpu")}
    for file in tallies:
        if not file.is_file():
            continue
        for key, value in json.loads(file.read_text()).items():
            told[key] = [*told[key], *value] if isinstance(value, list) else told[key] | value
    ran = set(told["ran"])
    told["skipped"] = {name: why for name, why in told["skipped"].items() if name not in ran}
    told["left_out"] = {
        name: mark
        for name, mark in told["left_out"].items()
        if name not in ran and name not in told["skipped"]
    }
    return told


def print_times(told: dict[str, Any]) -> None:
    """Seconds by folder and of the slowest files, and the files that take most of the CPU."""
    folders, files, busy = (defaultdict[str, float](float) for _ in range(3))
    for name, seconds in told["seconds"].items():
        file = name.split("::")[0]
        files[file] += seconds
        folders[str(Path(file).parent)] += seconds
        busy[file] += told["cpu"].get(name, 0.0)
    for title, found in (("by folder", folders), ("slowest files", files), ("most CPU", busy)):
        most = sorted(found.items(), key=lambda item: -item[1])[:8]
        print(f"{title}: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in most))


def summary(told: dict[str, Any]) -> str:
    """One line: what was left out, and how to get it."""
    found = Counter[str]()
    for mark in told["left_out"].values():
        found[f"{mark} ({HOW[mark]})" if mark in HOW else "not selected"] += 1
    for why in told["skipped"].values():
        found[f"skipped ({why})"] += 1
    if not found:
        return "Nothing was left out."
    return "Left out: " + "; ".join(f"{count} {what}" for what, count in found.most_common())


def known_skips() -> list[str]:
    """Patterns of tests/skips.txt."""
    lines = (line.split("#")[0].strip() for line in SKIPS.read_text().splitlines())
    return [line.split()[0] for line in lines if line]


def tell(tiers: list[str]) -> int:
    """The summary of tiers that have run; 1 where something is left out that the written list does not
    name."""
    files = [BUILD / f"{tier}.json" for tier in tiers]
    told = merged(files)
    known = known_skips()
    absent = [*told["skipped"].items(), *told["left_out"].items()]
    unknown = [
        f"{name}: {why or 'left out'}"
        for name, why in absent
        if not any(fnmatchcase(name, pattern) for pattern in known)
    ]
    if unknown:
        print(f"{len(unknown)} tests are left out and not named in {SKIPS.relative_to(ROOT)}:")
        print("\n".join(sorted(unknown)[:50]))
    absent_tiers = [file.stem for file in files if not file.is_file()]
    if absent_tiers:
        print(f"these tiers have not run: {', '.join(absent_tiers)}")
    print(summary(told), flush=True)
    return 1 if unknown or absent_tiers or not told["ran"] else 0


def main(arguments: list[str]) -> int:
    """The command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # what a shell puts into the background ignores SIGINT, and what tests start and interrupt would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tier, *rest = arguments
    return tell(rest) if tier == "told" else run(tier, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
