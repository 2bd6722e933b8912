"""A whole LLM-42 in one process, without Ray: engine, verifier and driver."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext

from llm42.checkpoint.description import load_tokenizer
from llm42.checkpoint.load import load_for, require_device
from llm42.config import Settings
from llm42.engine.build import build_engine
from llm42.protocol import Delta, Request
from llm42.session.driver import Generator
from llm42.telemetry.metrics import Metrics, NullMetrics
from llm42.telemetry.request_metrics import Observed, VerifierReport
from llm42.telemetry.tracing import make_tracer
from llm42.verifier.build import build_verifier, certificate_for
from llm42.verifier.certify.cpu import Certificate, Progress
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cublas import workspace_for_children
from llm42_kernels.operators import Operators

REPORT_S = 0.5


class Embedded:
    """Loads the model once for both sides; closing it (or leaving the `with`) ends both threads."""

    def __init__(
        self,
        settings: Settings,
        deterministic: bool = True,
        progress: Callable[[str], None] = lambda _: None,
        metrics: Metrics | None = None,
        products: Callable[[Certificate], Operators | None] = lambda _: None,
    ) -> None:
        """Loads and, when deterministic requests are wanted, certifies. products: which operators the torch
        engine computes with, when they are not its own. Raises LLM42Error."""
        self.metrics, self._tracer = metrics or NullMetrics(), make_tracer(settings.telemetry, "embedded")
        progress("Loading the model")
        require_device(settings.model.device)
        needed = deterministic or settings.engine.shares_weights  # vLLM has its own copy
        loaded, self.tokenizer = load_for(settings) if needed else (None, load_tokenizer(settings.model))
        self.settings = settings
        self.verifier: Verifier | None = None
        self.certificate: Certificate | None = None
        operators: Operators | None = None
        if deterministic:
            assert loaded is not None
            progress("Certifying")
            tell: Progress = lambda operator: progress(f"Certifying: {operator}")  # noqa: E731
            self.certificate = certificate_for(settings, loaded, self.tokenizer, progress=tell)
            built = build_verifier(settings, loaded, self.tokenizer, self.certificate, tell)
            self.verifier, operators = built.start(), products(self.certificate)
        try:
            if not settings.engine.shares_weights:
                progress("Starting vLLM")
                # in a service, too, it has the verifiers' environment only where their products shall agree
                alike = settings.verifier.affinity == "vllm"
                with nullcontext() if alike else workspace_for_children():
                    self.engine = build_engine(settings)
            else:
                self.engine = build_engine(settings, loaded, operators)
        except BaseException:
            if self.verifier is not None:
                self.verifier.close()
            raise
        self.generator = Generator(
            self.engine, self.tokenizer, settings, self.verifier, self.metrics, self._tracer
        )
        self._reporting = Reporting(self.verifier, settings, self.metrics) if self.verifier else None

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The generator's stream, counted as the service counts it."""
        decode = self.tokenizer.decode if self.settings.telemetry.log_prompts else None
        observed = Observed(request, self.metrics, self._tracer, decode)
        async with aclosing(observed.run(self.generator.generate(observed.request))) as deltas:
            async for delta in deltas:
                yield delta

    def __enter__(self) -> Embedded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        self.engine.close()
        if self._reporting is not None:
            self._reporting.close()
        if self.verifier is not None:
            self.verifier.close()
        self._tracer.close()


class Reporting:
    """A thread that reports a verifier's counters, without an event loop to do it."""

    def __init__(self, verifier: Verifier, settings: Settings, metrics: Metrics) -> None:
        self._report = VerifierReport(verifier, settings, metrics)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(REPORT_S):
            self._report.report()

    def close(self) -> None:
        """Ends the thread after a last report."""
        self._ended.set()
        self._thread.join()
        self._report.report()
