"""Runs tests with the libraries held to other instruction sets and thread counts, and shows that each took
effect: by what the library itself reports, in a process with the same environment. One that is ignored is not
run.

    python -m tests.isa [targets ...] [--only WORD] [--jobs N] [--json FILE] [--pytest-args=...]

Prints a table: the switch, its value, the library's report, honoured or ignored, passed and failed. MKL
ignores MKL_ENABLE_INSTRUCTIONS on processors that are not Intel's. There a small library that is loaded first
says that it is one (it needs a C compiler), and MKL honours the variable: the same code paths as on Intel's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUICK = (
    "tests/unit/test_certify.py",
    "tests/unit/test_affinity.py",
    "tests/unit/test_engine.py",
    "tests/unit/test_verifier_core.py",
    "tests/unit/test_sampling.py",
    "tests/unit/test_noise.py",
    "tests/protocol/test_golden.py",
    "tests/protocol/test_one_promise.py",
    "tests/protocol/test_lookahead.py",
)
"""The tests that compare bits, on the tiny model."""
MARKS = "not slow and not service and not gpu and not vllm"
THREADS = "LLM42_TEST_THREADS"
"""Read by tests/conftest.py: verifiers of all tests get so many threads, unless a test says otherwise."""
INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"
PROBE = """
import json, os, torch
from pathlib import Path
def used():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return found
print("CAPABILITY", torch.backends.cpu.get_cpu_capability())
a = torch.randn(512, 512)
before = used()
for _ in range(60):
    b = a @ a
    (torch.ones(1 << 19) + 1).exp()
after = used()
print("ACTIVE", sum(after[t] - before.get(t, 0) > 1_000_000 for t in after))  # nanoseconds
torch.relu(torch.randn(4, 4).to_mkldnn())
"""


@dataclass
class Case:
    """A setting of a library and what came of it."""

    switch: str
    value: str
    env: dict[str, str]
    took: Callable[[str], bool] = field(repr=False)
    read: Callable[[str], str] = field(repr=False)
    report: str = ""
    honoured: bool = False
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    exit: int | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Without the functions."""
        plain = {k: v for k, v in vars(self).items() if k not in ("took", "read")}
        return dict(plain)


def _found(pattern: str) -> Callable[[str], str]:
    def read(output: str) -> str:
        found = re.search(pattern, output)
        return found[1].strip() if found else "nothing"

    return read


mkl = _found(r"MKL_VERBOSE oneMKL.*? for Intel\(R\) 64 architecture (.*?), Lnx")
cnr = _found(r"MKL_VERBOSE SGEMM.*?(CNR:\S+)")
aten = _found(r"CAPABILITY (\S+)")
onednn = _found(r"onednn_verbose.*?cpu,isa:(.*)")


def threads(output: str) -> str:
    """Threads that have worked in torch's and MKL's parallel regions, and MKL's own word."""
    working, own = _found(r"ACTIVE (\d+)")(output), _found(r"MKL_VERBOSE SGEMM.*?(NThr:\d+)")(output)
    return f"{working} threads worked, MKL {own}"


def cases(shim: Path | None) -> list[Case]:
    """All of them; what a value must look like in the library's report."""
    sets = {"SSE4_2": "SSE4.2", "AVX2": "AVX2", "AVX512": "AVX-512"}
    made = [Case("(nothing)", "", {}, lambda _: True, lambda out: f"MKL {mkl(out)}; ATen {aten(out)}")]
    for value, word in sets.items():
        env, took = {"MKL_ENABLE_INSTRUCTIONS": value}, _says(mkl, word)
        made.append(Case("MKL_ENABLE_INSTRUCTIONS", value, env, took, mkl))
        if shim is not None:
            env = env | {"LD_PRELOAD": str(shim)}
            made.append(Case("MKL_ENABLE_INSTRUCTIONS, as on Intel", value, env, took, mkl))
    for value in ("COMPATIBLE", "AVX2", "AVX512"):
        made.append(Case("MKL_CBWR", value, {"MKL_CBWR": value}, _says(cnr, f"CNR:{value}"), cnr))
    made.append(Case("MKL_DEBUG_CPU_TYPE", "5", {"MKL_DEBUG_CPU_TYPE": "5"}, _says(mkl, "AVX2"), mkl))
    for value in ("default", "avx2", "avx512"):
        env = {"ATEN_CPU_CAPABILITY": value}
        made.append(Case("ATEN_CPU_CAPABILITY", value, env, _is(aten, value.upper()), aten))
    for value, word in {"SSE41": "SSE4.1", "AVX2": "Intel AVX2", "AVX512_CORE": "AVX512BW"}.items():
        env = {"ONEDNN_MAX_CPU_ISA": value}
        made.append(Case("ONEDNN_MAX_CPU_ISA", value, env, _says(onednn, word), onednn))
    for count in ("1", "2", "4"):
        env = {"OMP_NUM_THREADS": count, THREADS: count}
        made.append(
            Case("threads", count, env, _is(threads, f"{count} threads worked, MKL NThr:{count}"), threads)
        )
    return made


def _says(read: Callable[[str], str], word: str) -> Callable[[str], bool]:
    return lambda output: word in read(output)


def _is(read: Callable[[str], str], wanted: str) -> Callable[[str], bool]:
    return lambda output: read(output) == wanted


def environment(case: Case) -> dict[str, str]:
    """This process's, with the case's; one thread unless the case is about threads."""
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"} | case.env
    )


def probe(case: Case) -> None:
    """Whether the setting takes effect, as the libraries report it."""
    env = environment(case) | {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    case.report, case.honoured = case.read(output), done.returncode == 0 and case.took(output)
    if done.returncode:
        case.report = f"ended with {done.returncode}: {output.strip().splitlines()[-1:]}"


def run(case: Case, targets: list[str], options: list[str], folder: Path) -> None:
    """The tests under the setting."""
    began, name = time.monotonic(), re.sub(r"\W+", "-", f"{case.switch}-{case.value}")
    tally = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", *targets, "-q", "-p", "no:cacheprovider", "-p", "tests.tally"]
    command += ["--tally", str(tally), "-m", MARKS, *options]
    with (folder / f"{name}.log").open("w") as out:
        done = subprocess.run(
            command, env=environment(case), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False
        )
    told = json.loads(tally.read_text()) if tally.is_file() else {"ran": [], "failed": ["no result"]}
    case.failed, case.exit = told["failed"], done.returncode
    case.passed = len(set(told["ran"]) - set(told["failed"]))
    case.seconds = round(time.monotonic() - began, 1)
    print(f"{line(case)}   ({folder / name}.log)", flush=True)


def line(case: Case) -> str:
    """A row of the table."""
    outcome = f"{case.passed} passed, {len(case.failed)} failed" if case.honoured else "not run"
    said = "honoured" if case.honoured else "ignored"
    return f"{case.switch:38} {case.value:12} {said:9} {outcome:26} {case.report}"


def intel_shim(folder: Path) -> Path | None:
    """The library that tells MKL it runs on an Intel processor; None on one, or without a C compiler."""
    info = Path("/proc/cpuinfo")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not info.is_file() or "GenuineIntel" in info.read_text():
        return None
    source, made = folder / "intel.c", folder / "intel.so"
    source.write_text(INTEL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made


def machine() -> dict[str, str]:
    """What the table is about."""
    import torch

    info = Path("/proc/cpuinfo")
    model = _found(r"model name\s*: (.*)")(info.read_text()) if info.is_file() else platform.processor()
    return {"cpu": model, "python": platform.python_version(), "torch": torch.__version__}


def main() -> int:
    """The command line; 1 when a test failed under a setting that took effect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(QUICK), help="what pytest runs")
    parser.add_argument("--only", default="", help="only cases whose switch and value contain this word")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--pytest-args", default="", help="more options of pytest, separated by spaces")
    args = parser.parse_args()
    folder = ROOT / "build" / "isa"
    folder.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        chosen = [c for c in cases(intel_shim(Path(temporary))) if args.only in f"{c.switch}={c.value}"]
        for case in chosen:  # one at a time: they count threads that work
            probe(case)
        options = args.pytest_args.split()
        list(pool.map(lambda c: run(c, args.targets, options, folder), [c for c in chosen if c.honoured]))
    print("\n" + "\n".join(map(line, chosen)))
    for case in chosen:
        for name in case.failed:
            print(f"failed with {case.switch}={case.value}: {name}")
    if args.json:
        args.json.write_text(json.dumps(about | {"cases": [c.to_json() for c in chosen]}, indent=1))
    return 1 if any(c.honoured and (c.exit or c.failed) for c in chosen) or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
