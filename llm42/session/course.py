"""A deterministic request from its beginning to its end, whichever way it takes."""

from __future__ import annotations

from llm42.protocol import Delta, Request
from llm42.session.direct import DirectDrive
from llm42.session.drive import Drive, Owner, Shared
from llm42.session.verify import VerifyDrive
from llm42.text.output_text import OutputText


class Course:
    """One drive after another. Belongs to an event loop."""

    def __init__(self, owner: Owner, request: Request, text: OutputText) -> None:
        self._owner, self._request, self._text = owner, request, text
        self._shared = Shared.of(request, owner.settings.session)
        self._drive = self._next()

    @property
    def done(self) -> bool:
        """Whether the output has ended."""
        return self._shared.session.done

    def close(self) -> None:
        """Frees everything; safe at any moment."""
        if self.done:
            self._owner.ways.ended(self._shared.session)
        self._drive.close()

    async def score_prompt(self) -> Delta:
        """As every drive."""
        return await self._drive.score_prompt()

    def begin(self) -> None:
        """Asks for tokens, in the way that is cheaper now."""
        session, drive = self._shared.session, self._drive
        if self._owner.ways.first(session, drive.verifier) != session.way:
            session.turn("direct" if session.way == "verify" else "verify")
            self._drive = self._next()
        self._begin()

    async def advance(self) -> Delta | None:
        """Waits until something has come and takes it in: the delta that it makes, if any. Raises
        LLM42Error."""
        self._drive.turn_if_cheaper()
        self._follow_turn()
        delta = await self._drive.advance()
        if not self.done:
            self._follow_turn()
        return delta

    def _follow_turn(self) -> None:
        """What is still in the drive before is not heard any more."""
        if self._drive.turned:
            self._drive.count_progress()
            self._drive = self._next()
            self._begin()

    def _begin(self) -> None:
        self._drive.begin()
        if self._drive.turned:  # the engine has refused
            self._drive = self._next()
            self._drive.begin()

    def _next(self) -> Drive:
        kind = DirectDrive if self._shared.session.direct else VerifyDrive
        return kind(self._owner, self._request, self._text, self._shared)
