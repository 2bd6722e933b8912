"""An audit in this process: a verifier of its own, and a whole engine only where text is generated again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.errors import VerifierUnavailable
from llm42.local.embedded import Embedded
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.driver import Generator
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.build import build_verifier
from llm42.verifier.scheduler import Verifier


class LocalCanon:
    """llm42.audit.source.Canon over a verifier in this process."""

    def __init__(self, verifier: Verifier, generator: Generator | None = None) -> None:
        """generator: its verifier is this one; None when nothing is generated again."""
        self._verifier, self._generator = verifier, generator

    async def identity(self) -> tuple[str, Mapping[str, Any]]:
        """Of this machine."""
        return self._verifier.fingerprint, self._verifier.manifest

    async def replay(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Computed without the cache."""
        return await self._verifier.verify(windows, cold=True)

    def regenerate(self, request: Request) -> AsyncIterator[Delta]:
        """Through the engine, decided by the verifier."""
        if self._generator is None:
            raise VerifierUnavailable("this audit was opened without an engine")
        return self._generator.generate(request)


class LocalAudit:
    """Loads and certifies; closing it (or leaving the `with`) ends its threads."""

    def __init__(
        self, settings: Settings, regenerate: bool, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """regenerate: whether an engine is needed too. Raises LLM42Error."""
        self._embedded: Embedded | None = None
        self.tokenizer: Tokenizer
        if regenerate:
            self._embedded = Embedded(settings, progress=progress)
            assert self._embedded.verifier is not None
            self.verifier, self.tokenizer = self._embedded.verifier, self._embedded.tokenizer
        else:
            progress("Loading the model")
            model, self.tokenizer = load_for(settings)
            progress("Certifying")
            built = build_verifier(
                settings, model, self.tokenizer, progress=lambda what: progress(f"Certifying: {what}")
            )
            self.verifier = built.start()
        self.canon = LocalCanon(self.verifier, self._embedded.generator if self._embedded else None)

    def __enter__(self) -> LocalAudit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        (self._embedded or self.verifier).close()
