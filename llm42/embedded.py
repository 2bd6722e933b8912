"""A whole LLM-42 in one process, without Ray: engine, verifier and driver."""

from __future__ import annotations

from collections.abc import Callable

from llm42.config import Settings
from llm42.driver import Generator
from llm42.engine.build import build_engine, load_tokenizer
from llm42.local import LocalVerifier
from llm42.verifier.build import build_verifier, load_for
from llm42.verifier.core import Verifier


class Embedded:
    """Loads the model once for both sides; closing it (or leaving the `with`) ends both threads."""

    def __init__(
        self, settings: Settings, deterministic: bool = True, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """Loads and, when deterministic requests are wanted, certifies. Raises LLM42Error."""
        progress("Loading the model")
        needed = deterministic or settings.engine.kind == "torch"  # vLLM has its own copy
        loaded, self.tokenizer = load_for(settings) if needed else (None, load_tokenizer(settings))
        self.settings = settings
        self.verifier: Verifier | None = None
        if deterministic:
            progress("Certifying")
            built = build_verifier(
                settings,
                loaded,
                self.tokenizer,
                progress=lambda operator: progress(f"Certifying: {operator}"),
            )
            self.verifier = built.start()
        if settings.engine.kind == "vllm":
            progress("Starting vLLM")
        try:
            self.engine = build_engine(settings, loaded)
        except BaseException:
            if self.verifier is not None:
                self.verifier.close()
            raise
        client = LocalVerifier(self.verifier) if self.verifier else None
        self.generator = Generator(self.engine, self.tokenizer, settings, client)

    def __enter__(self) -> Embedded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        self.engine.close()
        if self.verifier is not None:
            self.verifier.close()
