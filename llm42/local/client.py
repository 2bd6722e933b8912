"""An in-process verifier client, for the embedded CLI, the demo and tests."""

from __future__ import annotations

from collections.abc import Sequence

from llm42.protocol import Commit, Failure, Window
from llm42.verifier.scheduler import Verifier


class LocalVerifier:
    """llm42.session.driver.VerifierClient over a Verifier in this process."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Awaits the answers."""
        return await self.verifier.verify_async(windows)

    def release(self, request_id: str) -> None:
        """Drops what is held for a request."""
        self.verifier.release(request_id)
