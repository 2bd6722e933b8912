"""A whole LLM-42 in one process, without Ray, or as much of it as a command needs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from llm42.checkpoint.description import load_tokenizer
from llm42.checkpoint.load import load_for, require_device
from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.engine.build import build_engine
from llm42.errors import NoFastPath
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, Delta, Failure, Request, RequestStats, Window
from llm42.session.driver import Generator
from llm42.telemetry.metrics import Metrics
from llm42.telemetry.request_metrics import Observed
from llm42.telemetry.tracing import make_tracer
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.build import build_verifier, certificate_for
from llm42.verifier.certify.certificate import Certificate
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cublas import workspace_for_children
from llm42_kernels.operators import Operators

Progress = Callable[[str], None]
"""Told what is going on: a step, or a step and, after a colon, more about it."""


@dataclass(slots=True)
class Output:
    """One request's whole output: token ids, and the log-probabilities that it asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stats: RequestStats | None = None


async def output_of(deltas: AsyncGenerator[Delta, None]) -> Output:
    """A stream read to its end."""
    found = Output()
    async with aclosing(deltas):
        async for delta in deltas:
            found.tokens += delta.token_ids
            found.logprobs += [x.logprob for x in delta.logprobs]
            found.stats = delta.stats or found.stats
    return found


class Local:
    """`Answers` of this process. Closing it, or leaving the `with`, ends what it has started; so does a
    construction that fails. The attributes of a part that was not asked for are not there."""

    tokenizer: Tokenizer
    verifier: Verifier
    certificate: Certificate
    """The verifier's."""
    engine: Engine
    generator: Generator
    """Of the engine, and of the verifier if there is one."""

    def __init__(
        self,
        settings: Settings,
        *,
        verifier: bool = True,
        engine: bool = True,
        progress: Progress = lambda _: None,
        operators: Callable[[Certificate], Operators | None] = lambda _: None,
    ) -> None:
        """Loads the model once for both sides; a verifier is certified. verifier: for deterministic requests
        and stored answers. engine: for requests of either kind; where the settings have none, a verifier
        answers both. operators: the torch engine's, beside the
        verifier that has this certificate; None: its own. Raises LLM42Error."""
        verifier = verifier or (engine and not settings.engine.decodes)
        self.settings, self._tracer = settings, make_tracer(settings.telemetry, "embedded")
        with ExitStack() as started:
            started.callback(self._tracer.close)
            progress("Loading the model")
            require_device(settings.model.device)
            model: LoadedModel | None = None
            client: Verifier | None = None
            changed: Operators | None = None
            if verifier or (engine and settings.engine.shares_weights):
                model, self.tokenizer = load_for(settings)
            else:  # vLLM has its own copy
                self.tokenizer = load_tokenizer(settings.model)
            if verifier:
                assert model is not None
                self.certificate, client = _certified(settings, model, self.tokenizer, progress)
                self.verifier = client.start()
                started.callback(client.close)
                changed = operators(self.certificate)
            if engine:
                self.engine = _engine(settings, model, changed, progress)
                started.callback(self.engine.close)
                parts = (self.engine, self.tokenizer, settings, client)
                self.generator = Generator(*parts, tracer=self._tracer)
            self._started = started.pop_all()

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The generator's stream, logged and traced as a service's."""
        decode = self.tokenizer.decode if self.settings.telemetry.log_prompts else None
        observed = Observed(request, Metrics(), self._tracer, decode)
        return observed.run(self.generator.generate(observed.request))

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """By the verifier, without its cache."""
        return await self.verifier.verify(windows, cold=True)

    async def fingerprint(self, agreed: bool = False) -> tuple[str, dict[str, Any]]:
        """The verifier's, which this process always agrees with."""
        return self.verifier.fingerprint, self.verifier.manifest

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads, the engine's first."""
        self._started.close()


def require_fast_path(settings: Settings) -> None:
    """Raises NoFastPath for settings without one. For commands that are about the fast path."""
    if not settings.engine.decodes:
        raise NoFastPath(
            "engine.kind canonical has no fast path, hence no candidates, windows and rollbacks to show: set"
            " engine.kind to torch or vllm (with session.mode null), or use serve_config.yaml"
        )


def verified(settings: Settings) -> Settings:
    """The same with session.mode verify: the fast path decodes, and no best effort is moved."""
    session = settings.session.model_copy(update={"mode": "verify"})
    return settings.model_copy(update={"session": session})


def _certified(
    settings: Settings, model: LoadedModel, tokenizer: Tokenizer, progress: Progress
) -> tuple[Certificate, Verifier]:
    """A verifier that is not yet started, and its certificate."""

    def certifying(what: str) -> None:
        progress(f"Certifying: {what}")

    progress("Certifying")
    certificate = certificate_for(settings, model, tokenizer, progress=certifying)
    return certificate, build_verifier(settings, model, tokenizer, certificate, certifying)


def _engine(
    settings: Settings, model: LoadedModel | None, operators: Operators | None, progress: Progress
) -> Engine:
    """The engine that the settings name, started."""
    if settings.engine.shares_weights or not settings.engine.decodes:
        return build_engine(settings, model, operators)
    progress("Starting vLLM")
    # in a service, too, it has the verifiers' environment only where their products shall agree
    alike = settings.verifier.affinity == "vllm"
    with nullcontext() if alike else workspace_for_children():
        return build_engine(settings)
