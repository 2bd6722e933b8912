"""The `llm42` command and its options. What a subcommand does is in the file of its name, imported when it
runs, so that `--help` is immediate."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from llm42.cli.errors import actionable
from llm42.config import Settings

app = typer.Typer(
    name="llm42",
    help="Deterministic LLM serving: decode fast, verify under a fixed schedule, roll back what differs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
# messages have paths and URLs, which a wrapped line would break
err = Console(stderr=True, soft_wrap=True)
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
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
        from llm42.telemetry.logs import kept_traceback, one_line

        fail(actionable(error) or f"{one_line(error)}{kept_traceback(error)}")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


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
    settings = load_settings(config)
    from llm42.cli.serve import run_serve

    run_serve(settings, host, port, metrics_port)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="a chat message, or with --raw the text to continue")],
    config: ConfigOption = None,
    deterministic: Annotated[bool, typer.Option("--deterministic/--best-effort")] = True,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=-(2**63), max=2**64 - 1, help="default: server.default_seed")
    ] = None,
    raw: Annotated[bool, typer.Option(help="no chat template")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of streamed text")] = False,
) -> None:
    """Answers one prompt in this process, without a server."""
    settings = settings_here(config)
    from llm42.cli.generate import run_generate
    from llm42.protocol import SamplingParams

    seed = (settings.server.default_seed if seed is None else seed) & (2**64 - 1)
    sampling = SamplingParams(temperature=temperature, seed=seed)
    run_generate(settings, prompt, raw, max_tokens, sampling, deterministic, as_json)


@app.command()
def certify(
    config: ConfigOption = None,
    plant: Annotated[list[str] | None, typer.Option(help="break an operator on purpose (repeatable)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Proves, or refutes, that this machine's operators are row-invariant; exit code 1 names the operator."""
    settings, plants = settings_here(config), plant or []
    if "split-k" in plants and settings.model.device == "cuda":
        from llm42_kernels.cublas import allow_workspace

        allow_workspace()  # the plant is the library as it comes
    from llm42.cli.certify import run_certify

    raise typer.Exit(run_certify(settings, plants, as_json))


@app.command()
def demo(
    config: ConfigOption = None,
    requests: Annotated[int, typer.Option(min=1, help="prompts to compare")] = 20,
    load: Annotated[int, typer.Option(min=0, help="best-effort streams beside them")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="output tokens of each prompt")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Sends prompts alone and again under load, best-effort and deterministic, and counts what changed."""
    settings = settings_here(config)
    from llm42.cli.demo import run_demonstration

    raise typer.Exit(run_demonstration(settings, requests, load, tokens, temperature, as_json))


@app.command()
def top(
    url: Annotated[
        str, typer.Argument(help="address of the metrics page, which `llm42 serve` prints", metavar="URL")
    ] = "http://127.0.0.1:8090/metrics",
    once: Annotated[bool, typer.Option(help="print the figures since the start, and end")] = False,
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.2)] = 2.0,
) -> None:
    """Shows rollback rate, latency, verifiers and errors of a running service, live."""
    from llm42.cli.top import run_top

    run_top(url, once, interval)


@app.command()
def affinity(
    config: ConfigOption = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="prompts of each load; default: twice those at a time")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="output tokens of each prompt, at most")] = 128,
    concurrent: Annotated[
        list[int] | None,
        typer.Option(min=1, help="requests at a time, may be repeated; default: 8, on a GPU also 64"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Holds the fast path's answers against the verifier's, decoding alone and beside prompts: how many
    rollbacks to expect."""
    settings = settings_here(config)
    from llm42.cli.affinity import run_affinity

    run_affinity(settings, requests, tokens, concurrent or (), as_json)


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
    as_json: JsonOption = False,
) -> None:
    """Replays stored answers through a verifier.

    Exit code 0: all are confirmed; 1: not all; 2: lines that are no records; 3: no audit took place.
    """
    try:
        settings = None if url else settings_here(config)
        from llm42.audit.remote import RemoteAudit
        from llm42.cli.audit import run_audit

        where = settings or RemoteAudit(url or "", api_key)
        code = run_audit(file, where, manifest or (), require_signature, as_json)
    except Exception as error:
        if (line := actionable(error)) is None:
            raise
        from llm42.cli.audit import NO_RECORDS

        err.print(f"[bold red]Error:[/] {escape(line)}", soft_wrap=True)
        code = 2 if isinstance(error, NO_RECORDS) else 3
    raise typer.Exit(code)
