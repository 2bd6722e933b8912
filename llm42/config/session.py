"""Settings of the decode-verify-rollback session."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from llm42.config.section import Section, or_null


class SessionSettings(Section):
    """The decode-verify-rollback session of a deterministic request."""

    mode: Literal["auto", "verify", "direct"] = Field("verify", json_schema_extra=or_null)
    """verify: the fast path decodes and the verifier checks it in windows. direct: the verifier decodes by
    itself. auto: for each request whichever costs less at the time, by measured step times; it may change in
    mid-request, and best-effort requests are decoded with the deterministic ones where that is faster for
    them; not the default yet, since on one H200 it was slower than either pinned mode where loads last some
    seconds each. The output of a deterministic request is the same. null: verify, but direct with
    engine.kind canonical."""
    credit: PositiveInt = 64
    """How many tokens the verifier may decode by itself before the replica must have said that somebody still
    reads them; said anew when half of them are used. With fewer than about 2 (commit_interval_s + 0.02) /
    (seconds of a step) a stream waits for its credit."""
    commit_interval_s: PositiveFloat = 0.05
    """The longest that a token which the verifier decoded by itself waits there for others (seconds). A
    request's first one and its last never wait, nor does what answers candidates."""
    min_window: PositiveInt = 7
    """Shortest target length of a window, in candidates."""
    max_window: PositiveInt = 63
    """Longest window."""
    start_window: PositiveInt = 15
    """Target length before acceptance is known."""
    lookahead: PositiveInt = 128
    """How far the fast path may decode beyond the last commit, in candidates."""
    commit_deadline_s: PositiveFloat = 0.5
    """A window is sent at the latest this long after the last commit (seconds), so that streams stay
    smooth."""
    verify_timeout_s: PositiveFloat = 60.0
    """What a verifier does not answer is asked again after this long (seconds), in which it has not completed
    a step for any other request either: who waits while it works on others waits for its turn."""
    verify_attempts: PositiveInt = 4
    """Calls for one window that are left unanswered before the request ends with an error. A verifier that
    is dead or full refuses at once; it is asked again for as long as those calls might take."""

    @model_validator(mode="after")
    def _order(self) -> SessionSettings:
        if not self.min_window <= self.start_window <= self.max_window <= self.lookahead:
            raise ValueError("session: need min_window <= start_window <= max_window <= lookahead")
        return self
