"""Commands that a benchmark runs as processes: how they ended, and the figures that they printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm42.text.tokenizer import Tokenizer

QUESTION = "Why is the sky blue?"


@dataclass(slots=True)
class Done:
    """One command."""

    name: str
    command: list[str]
    expected: int
    exit_status: int | None = None
    """None: it took too long."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    as_expected: bool = False
    """By its exit status, and by the JSON object that it printed, where one was asked for."""
    error: str = ""
    """The last line that it said, when it did not end as expected."""


@dataclass
class Lab:
    """Where commands are run, and what came of them."""

    out: Path
    model: str
    device: str
    done: list[Done] = field(default_factory=list)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config(self, name: str, **sections: Any) -> str:
        """A settings file: the device's defaults, with these changes."""
        tree = {"model": {"path": self.model, "device": self.device}} | sections
        tree["model"] = {"path": self.model, "device": self.device} | sections.get("model", {})
        tree["verifier"] = {"certificate_dir": str(self.out / "certificates")} | sections.get("verifier", {})
        file = self.out / f"{name}.settings.json"
        file.write_text(json.dumps(tree))
        return str(file)

    def run(
        self,
        name: str,
        command: Sequence[str],
        limit_s: float = 120,
        expected: int = 0,
        figures: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply,
    ) -> dict[str, Any]:
        """Runs a command to its end. Returns the JSON object in the last line of its output, or {}."""
        found, reply, text, began = Done(name, list(command), expected), {}, "", time.monotonic()
        with (self.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
            try:
                text, _ = process.communicate(timeout=limit_s)
                found.exit_status = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own session: vLLM's processes too
                text, _ = process.communicate()
            log.write(text)
        found.seconds = round(time.monotonic() - began, 1)
        found.as_expected = found.exit_status == expected
        last = (text.strip().splitlines() or [""])[-1]
        if last.startswith("{"):
            reply = json.loads(last)
            found.figures = figures(reply)
        found.as_expected &= bool(reply) or "--json" not in command
        self._keep(found)
        return reply

    def note(self, name: str, command: Sequence[str], good: bool, began: float, **figures: Any) -> None:
        """Something that is no single command."""
        seconds = round(time.monotonic() - began, 1)
        self._keep(Done(name, list(command), 0, 0 if good else 1, seconds, figures, good))

    def _keep(self, found: Done) -> None:
        if not found.as_expected and (log := self.out / f"{found.name}.log").exists():
            found.error = (log.read_text().strip().splitlines() or [""])[-1][-500:]
        self.done.append(found)
        (self.out / "commands.json").write_text(json.dumps([asdict(d) for d in self.done], indent=1))
        state = (
            "ok"
            if found.as_expected
            else f"exit {found.exit_status} instead of {found.expected}: {found.error}"
        )
        print(
            f"{found.name:24} {found.seconds:6.1f} s  {state}  {json.dumps(found.figures)[:300]}", flush=True
        )


def plain_record(name: str, model: str, reply: dict[str, Any], temperature: float) -> dict[str, Any]:
    """What `llm42 generate --json` said of QUESTION, as a record for `llm42 audit`."""
    tokenizer = Tokenizer.load(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    sampling = {"temperature": temperature, "seed": str(reply["llm42"]["seed"])}
    return {
        "id": name,
        "fingerprint": reply["system_fingerprint"],
        "prompt": tokenizer.encode(text),
        "output": reply["token_ids"],
        "sampling": sampling,
    }
