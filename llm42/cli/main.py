"""The `llm42` command. Each subcommand imports what it needs when it runs, so that `--help` is immediate."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import time
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from llm42.cli.errors import actionable
from llm42.cli.progress import Steps
from llm42.cli.telemetry import MetricsPortOption, metrics_for, top
from llm42.config import Settings

if TYPE_CHECKING:
    from llm42.local.embedded import Embedded
    from llm42.protocol import Request, RequestStats
    from llm42_serve.launch import Service

app = typer.Typer(
    name="llm42",
    help="Deterministic LLM serving: decode fast, verify under a fixed schedule, roll back what differs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
# messages have paths and URLs, which a wrapped line would break
out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="serve_config.yaml or a settings file; default: built in"),
]


def main() -> None:
    """Entry point: errors that a user can act on are one line and exit code 1, not a traceback."""
    signal.signal(signal.SIGTERM, _interrupt)  # like Ctrl-C: commands clean up behind themselves
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from llm42.telemetry.failures import kept_traceback, one_line

        fail(actionable(error) or f"{one_line(error)}{kept_traceback(error)}")


def fail(message: str) -> NoReturn:
    """Prints an error and ends the process with 1."""
    err.print(f"[bold red]Error:[/] {escape(message)}")
    sys.exit(1)


def load_settings(config: Path | None) -> Settings:
    """Settings of a file, or the defaults, with absolute paths."""
    from llm42.config.serve_file import absolute, read_serve_config

    return absolute(Settings()) if config is None else read_serve_config(config)


def settings_here(config: Path | None) -> Settings:
    """The same for a command that computes in this process, which gets what its device needs: before PyTorch
    is imported, since libraries read it once."""
    from llm42_kernels.cublas import rule_out_workspace

    settings = load_settings(config)
    if settings.model.device == "cuda":
        rule_out_workspace()
    return settings


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="address to listen on, instead of the config's")] = None,
    port: Annotated[int | None, typer.Option(help="port, instead of the config's", min=1, max=65535)] = None,
    metrics_port: Annotated[int, typer.Option(help="default: 8090, or a free one", min=0, max=65535)] = 0,
) -> None:
    """Starts the service on this machine and serves until Ctrl-C."""
    from llm42_serve.launch import Service
    from llm42_serve.ports import default_metrics_port

    settings = load_settings(config)
    metrics_port = metrics_port or settings.telemetry.metrics_port or default_metrics_port()
    telemetry = settings.telemetry.model_copy(update={"metrics_port": metrics_port})
    changes = {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    server = settings.server.model_copy(update=changes)
    settings = settings.model_copy(update={"server": server, "telemetry": telemetry})
    try:
        with Steps() as steps, Service(settings, steps) as service:
            problem = _certification_problem(service)
            steps.done()
            _announce(service.url, settings, problem)
            out.print(f"\nMetrics; live: {sys.argv[0]} top {service.metrics_url}", soft_wrap=True)
            until_interrupted()
            err.print("Stopping ...")
    except KeyboardInterrupt:
        err.print("Interrupted; nothing is left running.")


def until_interrupted() -> None:
    """Sleeps until Ctrl-C or SIGTERM. In short pieces: a signal that the kernel gives to another thread does
    not wake this one, and Python's handlers run in this one only."""
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(1.0)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _certification_problem(service: Service) -> str:
    """Waits for the verifiers; returns the reason when there is none, and "" when there is."""
    from llm42.errors import LaunchFailed

    if service.settings.server.verifiers == 0:
        return "Deterministic requests are switched off (server.verifiers is 0)."
    try:
        service.wait_deterministic()
    except LaunchFailed as error:
        return str(error)
    return ""


def _announce(url: str, settings: Settings, problem: str) -> None:
    """What to do next, ready to be pasted."""
    model = settings.model
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
        "temperature": 0,
        "deterministic": not problem,
    }
    curl = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'"
    if settings.server.api_keys:
        curl += " -H 'Authorization: Bearer YOUR_KEY'"
    curl += f" -d {shlex.quote(json.dumps(body))}"
    out.print(f"[bold green]Ready[/]: {escape(model.name)} on {url} ({model.dtype}, {model.device})")
    if problem:
        out.print(f"[bold yellow]Best-effort only:[/] {escape(problem)}")
    kind = "best-effort" if problem else "deterministic: the same bits each time, under any load"
    out.print(f"\nAsk it something ({kind}):\n")
    print(curl, flush=True)  # unwrapped, so that it can be pasted
    out.print(
        "\nSee what happens without determinism, in another terminal:\n\n  make demo\n\nCtrl-C stops it."
    )


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="a chat message, or with --raw the text to continue")],
    config: ConfigOption = None,
    deterministic: Annotated[bool, typer.Option("--deterministic/--best-effort")] = True,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="default: server.default_seed")] = None,
    raw: Annotated[bool, typer.Option(help="no chat template")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of streamed text")] = False,
    metrics_port: MetricsPortOption = None,
) -> None:
    """Answers one prompt in this process, without a server."""
    settings = settings_here(config)
    from llm42.local.embedded import Embedded
    from llm42.protocol import Request, SamplingParams

    with (
        metrics_for(settings, metrics_port) as metrics,
        Steps() as steps,
        Embedded(settings, deterministic, steps, metrics) as embedded,
    ):
        steps.done()
        tokenizer = embedded.tokenizer
        if raw:
            ids = tokenizer.encode(prompt, add_special=True)
        else:
            ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
        room = settings.model.max_model_len - len(ids)
        if not ids or room < 1:
            fail(f"The prompt has {len(ids)} tokens; the context is {settings.model.max_model_len}.")
        request = Request(
            request_id="generate",
            prompt=tuple(ids),
            max_tokens=min(max_tokens, room),
            sampling=SamplingParams(
                temperature=temperature,
                seed=(settings.server.default_seed if seed is None else seed) & (2**64 - 1),
            ),
            deterministic=deterministic,
            stop_token_ids=tokenizer.eos_token_ids,
        )
        asyncio.run(_print_answer(embedded, request, as_json))


async def _print_answer(embedded: Embedded, request: Request, as_json: bool) -> None:
    tokens: list[int] = []
    text, fingerprint, finish = "", None, None
    stats: RequestStats | None = None
    async with aclosing(embedded.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            text += delta.text
            fingerprint = delta.fingerprint or fingerprint
            stats, finish = delta.stats or stats, delta.finish_reason
            if not as_json:
                print(delta.text, end="", flush=True)
    evidence = {
        "deterministic": request.deterministic,
        "seed": request.sampling.seed,
        **(asdict(stats) if stats else {}),
    }
    if as_json:
        reply = {
            "text": text,
            "token_ids": tokens,
            "finish_reason": finish,
            "system_fingerprint": fingerprint,
        }
        print(json.dumps(reply | {"llm42": evidence}))
        return
    print(flush=True)
    err.print(f"[dim]{len(tokens)} tokens, fingerprint {fingerprint}, {evidence}[/]")


@app.command()
def certify(
    config: ConfigOption = None,
    plant: Annotated[list[str] | None, typer.Option(help="break an operator on purpose (repeatable)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Proves, or refutes, that this machine's operators are row-invariant; exit code 1 names the operator."""
    from llm42.cli.commands import run_certify

    raise typer.Exit(run_certify(settings_here(config), plant or [], as_json))


@app.command()
def demo(
    config: ConfigOption = None,
    requests: Annotated[int, typer.Option(min=1, help="prompts to compare")] = 20,
    load: Annotated[int, typer.Option(min=0, help="best-effort streams beside them")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="output tokens of each prompt")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
    metrics_port: MetricsPortOption = None,
) -> None:
    """Sends prompts alone and again under load, best-effort and deterministic, and counts what changed."""
    from llm42.cli.commands import run_demonstration

    settings = settings_here(config)
    with metrics_for(settings, metrics_port) as metrics:
        code = run_demonstration(settings, requests, load, tokens, temperature, as_json, metrics)
    raise typer.Exit(code)


app.command()(top)


@app.command()
def affinity(
    config: ConfigOption = None,
    requests: Annotated[int, typer.Option(min=1, help="prompts to answer")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="output tokens of each prompt")] = 128,
    concurrent: Annotated[int, typer.Option(min=1, help="requests at a time")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Replays the fast path's answers through the verifier: mismatches, each of which costs a rollback."""
    from llm42.cli.commands import run_affinity

    raise typer.Exit(run_affinity(settings_here(config), requests, tokens, concurrent, as_json))


@app.command()
def audit(
    file: Annotated[Path, typer.Argument(help="stored answers, one JSON object a line (docs/audits.md)")],
    config: ConfigOption = None,
    url: Annotated[
        str | None, typer.Option(help="audit by this running server, instead of in this process")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="the server's API key, if it asks for one", envvar="LLM42_API_KEY")
    ] = None,
    manifest: Annotated[
        list[Path] | None,
        typer.Option(help="stored reply of GET /v1/fingerprint, to explain another fingerprint (repeatable)"),
    ] = None,
    require_signature: Annotated[
        bool, typer.Option(help="an answer without a valid signature is not confirmed")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Replays stored answers through a verifier.

    Exit code 0: all are confirmed; 1: not all; 2: lines that are no records; 3: no audit took place.
    """
    try:
        settings = None if url else settings_here(config)
        from llm42.cli.audit import AuditOptions, run_audit

        options = AuditOptions(file, url, api_key, manifest or (), require_signature, as_json)
        code = run_audit(options, settings)
    except Exception as error:
        if (line := actionable(error)) is None:
            raise
        from llm42.cli.audit import NO_RECORDS

        err.print(f"[bold red]Error:[/] {escape(line)}", soft_wrap=True)
        code = 2 if isinstance(error, NO_RECORDS) else 3
    raise typer.Exit(code)
