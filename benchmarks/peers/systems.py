"""The systems of a command, to which h200.py gives loads: engines in processes, or servers and one client."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.direct.http import Server
from benchmarks.lib.sides import Dead, Process
from benchmarks.peers import memory
from benchmarks.peers.cells import GROUPS, KV_TOKENS, MAX_LEN, VERIFIER_KV_TOKENS
from benchmarks.peers.client import PLAIN, Client
from benchmarks.peers.servers import CPU_KV_TOKENS, CPU_MAX_LEN, server_of
from benchmarks.verify_mode.h200 import environment_of
from benchmarks.verify_mode.loads import Load
from benchmarks.verify_mode.options import Options
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT

CLOSE_S, TURN_S = 20.0, 200.0
"""Seconds to end, and of the boot of one."""


class Systems(ABC):
    """Those of a group that are alive."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.ready = args, dict[str, dict[str, Any]]()
        """By system: what it said when it was ready."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """Whose loads can be run."""
        lanes = GROUPS[self.args.group]
        return tuple(lane for lane in lanes if self.kind_of(lane) in self.ready)

    @abstractmethod
    def kind_of(self, lane: str) -> str:
        """Which process has it."""

    @abstractmethod
    def start(self, end: float) -> list[str]:
        """Waits until that time (monotonic); what did not become ready, and why."""

    @abstractmethod
    def flow(self, lane: str, load: Load, seed: str, limit_s: float, tok_s: float | None) -> dict[str, Any]:
        """One load. Raises Dead."""

    @abstractmethod
    def pids(self) -> dict[str, int]:
        """Of each process that is alive."""

    @abstractmethod
    def end(self) -> None:
        """Ends all."""

    def memory(self) -> dict[str, Any]:
        """MiB of each."""
        held = {
            kind: {"host_mib": memory.host_mib(pid), "gpu_mib": memory.gpu_mib(pid)}
            for kind, pid in self.pids().items()
        }
        return held | {"gpu_total_mib": memory.gpu_total_mib()}


class Engines(Systems):
    """Without HTTP."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        super().__init__(args)
        self.model, self.sides = model, dict[str, Process]()

    def kind_of(self, lane: str) -> str:
        """auto and verify are modes of one replica."""
        return "ours" if lane in ("auto", "verify") else lane

    def options(self, kind: str) -> Options:
        """Of a side."""
        args, cpu = self.args, self.args.cpu
        verifier = {"canonical": KV_TOKENS, "ours": VERIFIER_KV_TOKENS}.get(kind, 0)
        return Options(
            self.model, args.engine, cpu, "none" if kind == "canonical" else "vllm",
            CPU_MAX_LEN if cpu else MAX_LEN, CPU_KV_TOKENS if cpu else KV_TOKENS,
            CPU_KV_TOKENS if cpu and verifier else verifier,
            certificates=str(Path(args.scratch or args.out) / "certificates"),
        )  # fmt: skip

    def start(self, end: float) -> list[str]:
        """As Systems'."""
        kinds, failed = list(dict.fromkeys(map(self.kind_of, GROUPS[self.args.group]))), list[str]()
        later = [kind for kind in kinds if kind == "invariant"]
        first = [kind for kind in kinds if kind not in later]
        for turn in (first, later):  # three that boot at once came to nothing in four minutes
            for kind in turn:
                self._boot(kind)
            for kind in turn:
                began = time.monotonic()
                try:
                    self.ready[kind] = self.sides[kind].answer(max(1.0, min(TURN_S, end - began)))
                except Dead as error:
                    failed.append(f"boot: {error}")
                    if kind in ("vllm", "invariant"):
                        self.sides[kind].end_with_stacks()
                    self._drop(kind)
                print(f"{kind}: after {time.monotonic() - began:.0f} s more", flush=True)
        return failed

    def _boot(self, kind: str) -> None:
        options = self.options(kind)
        environment = environment_of("ours" if kind == "ours" else "vllm", options)
        # As `vllm serve` starts its engine. On an H200 one that was forked here said nothing for 200 s. That
        # the fork was the cause is not shown: on a CPU, forked from a process with Ray imported, it ran.
        environment |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONFAULTHANDLER": "1"}
        if kind == "invariant":
            environment |= {"VLLM_BATCH_INVARIANT": "1"}
        if kind == "canonical" and not options.cpu:
            environment |= CUBLAS_ENVIRONMENT
        words = [kind, json.dumps(asdict(options))]
        self.sides[kind] = Process(kind, "benchmarks.peers.side", words, environment, self.args.out)

    def flow(self, lane: str, load: Load, seed: str, limit_s: float, tok_s: float | None) -> dict[str, Any]:
        """As Systems'. Nothing comes at random here."""
        kind = self.kind_of(lane)
        mode = {"canonical": "direct", "ours": lane}.get(kind, "")
        try:
            found = self.sides[kind].ask(limit_s, do="flow", load=asdict(load), seed=seed, mode=mode)
        except Dead:
            self._drop(kind)
            raise
        if "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def pids(self) -> dict[str, int]:
        """As Systems'."""
        return {kind: side.process.pid for kind, side in self.sides.items()}

    def _drop(self, kind: str) -> None:
        self.ready.pop(kind, None)
        side = self.sides.pop(kind)
        if side.process.poll() is None:
            side.process.send_signal(signal.SIGTERM)  # a cluster is ended, if that is still possible
            time.sleep(1.0)
        side.kill()

    def end(self) -> None:
        """As Systems'."""
        for kind in list(self.sides):
            try:
                if kind in ("ours", "canonical"):
                    self.sides[kind].ask(CLOSE_S, do="close")
            except Dead as error:
                print(error, flush=True)
            self.sides.pop(kind).kill()


class Servers(Systems):
    """Over HTTP."""

    def __init__(self, args: argparse.Namespace, path: str, vocab: int) -> None:
        super().__init__(args)
        lanes = [lane for lane in GROUPS[args.group] if not (args.group == "auto" and lane == "verify")]
        whole = args.engine == "vllm"  # else ours stands for vLLM too: that tries the script
        mine = [lane for lane in lanes if whole or lane not in PLAIN]
        self.servers = {lane: server_of(lane, args, path) for lane in mine}
        self.instead = {
            lane: Server(lane, [], {}, self.servers[mine[0]].port) for lane in lanes if lane not in mine
        }
        self.vocab, self.runner = vocab, asyncio.Runner()

    def kind_of(self, lane: str) -> str:
        """Each has a server of its own."""
        return lane

    def start(self, end: float) -> list[str]:
        """As Systems'."""
        return self.runner.run(self._start(end))

    async def _start(self, end: float) -> list[str]:
        began, failed = time.monotonic(), []
        for server in self.servers.values():
            server.start(self.args.out)
        async with aiohttp.ClientSession() as http:
            for lane, server in list(self.servers.items()):
                try:
                    await server.ready(http, began, max(1.0, end - began))
                    self.ready[lane] = {"ready_s": server.ready_s}
                except RuntimeError as error:
                    failed.append(f"boot: {error}")
                    server.stop()
                    del self.servers[lane]
        self.servers |= self.instead
        self.ready |= {lane: {"stands_for_vllm": True} for lane in self.instead}
        return failed

    def flow(self, lane: str, load: Load, seed: str, limit_s: float, tok_s: float | None) -> dict[str, Any]:
        """As Systems'."""
        return self.runner.run(self._flow(self.servers[lane], load, seed, limit_s, tok_s))

    async def _flow(
        self, server: Server, load: Load, seed: str, limit_s: float, tok_s: float | None
    ) -> dict[str, Any]:
        limits = aiohttp.ClientTimeout(total=limit_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 20) as http:
            return await Client(http, self.vocab).flow(server, load, seed, tok_s)

    def pids(self) -> dict[str, int]:
        """As Systems'."""
        return {lane: s.process.pid for lane, s in self.servers.items() if s.process is not None}

    def end(self) -> None:
        """As Systems'."""
        for server in self.servers.values():
            server.stop()
        self.runner.close()
