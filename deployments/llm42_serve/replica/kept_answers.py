"""Directly decoded answers that are to be audited: what has been committed of each, and by whom, until its
end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llm42.protocol import Commit, TokenLogprob, Window

if TYPE_CHECKING:
    from llm42_serve.replica.member import Member


@dataclass(slots=True)
class Part:
    """What one verifier has decoded of an answer, without a break."""

    member: Member
    actor_id: str
    fingerprint: str
    window: Window
    """That asks for what it has decoded, so far without candidates."""
    found: list[TokenLogprob] = field(default_factory=list)

    def claim(self) -> tuple[Window, Commit]:
        """All of it as one window, and the answer that it must have."""
        *tokens, last = (x.token for x in self.found)
        window = replace(self.window, candidates=tuple(tokens))
        base, accepted = len(window.tokens), len(tokens)
        commit = Commit(window.request_id, base, accepted, last, tuple(self.found), self.fingerprint)
        return window, commit


@dataclass(slots=True)
class _Kept:
    tokens: list[int]
    """Prompt and output, as far as they are committed."""
    first: Window
    parts: list[Part] = field(default_factory=list)
    behind: tuple[int, ...] = ()
    """Tokens of the last window: what commits do not say of them was decided in another way."""
    broken: bool = False
    """Some of these have been taken over: the next commit begins another part."""


class KeptAnswers:
    """Chooses when a request begins; of those that are not chosen nothing is kept."""

    def __init__(self, share: float) -> None:
        """share: of the answers, and so of the rows that are decoded directly."""
        self._share, self._random = share, random.Random()
        self._kept: dict[str, _Kept | None] = {}

    def begin(self, window: Window) -> None:
        """A window with credit; only the first one of a request decides. One further on comes behind what was
        verified in windows, which are audited themselves."""
        if window.request_id not in self._kept:
            plain = replace(window, candidates=(), credit=0, stop_token_ids=(), max_len=0)
            chosen = self._random.random() < self._share
            self._kept[window.request_id] = _Kept(list(window.tokens), plain) if chosen else None
        elif (kept := self._kept[window.request_id]) is not None:
            kept.behind = window.tokens

    def committed(self, member: Member, commit: Commit) -> None:
        """Takes what follows what is there: as a session does, nothing behind a gap, and nothing twice."""
        kept = self._kept.get(commit.request_id)
        if kept is None:
            return
        if len(kept.tokens) < commit.base <= len(kept.behind):
            kept.tokens, kept.broken = list(kept.behind), True
        if not commit.base <= len(kept.tokens) < commit.end:
            return
        fresh, of = commit.logprobs[len(kept.tokens) - commit.base :], (member.actor_id, commit.fingerprint)
        last = kept.parts[-1] if kept.parts else None
        same = last is not None and last.member is member and (last.actor_id, last.fingerprint) == of
        if kept.broken or not same:
            kept.broken = False
            kept.parts.append(Part(member, *of, replace(kept.first, tokens=tuple(kept.tokens))))
        kept.parts[-1].found += fresh
        kept.tokens += (x.token for x in fresh)

    def end(self, request_id: str) -> list[Part]:
        """The request is over: what was kept of it."""
        kept = self._kept.pop(request_id, None)
        return [] if kept is None else kept.parts
