"""Settings of the decode-verify-rollback session."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from llm42.config.section import Section, or_null


class SessionSettings(Section):
    """How a deterministic request is decoded, verified and rolled back."""

    mode: Literal["auto", "verify", "direct"] = Field("verify", json_schema_extra=or_null)
    """verify: the fast path decodes and the verifier checks it in windows. direct: the verifier decodes by
    itself. auto: for each request whichever costs less at the time, by measured step times; it may change in
    mid-request, and best-effort requests are decoded with the deterministic ones where that is faster for
    them; not the default yet, since on one H200 it was slower than either pinned mode where loads last some
    seconds each. The output of a deterministic request is the same. null: verify, but direct with
    engine.kind canonical."""
    credit: PositiveInt = 64
    """Tokens that a verifier may decode by itself before the replica confirms that the client still reads; it
    confirms when half of them are used. With fewer than about 2 (commit_interval_s + 0.02) / (seconds of a
    step) streams stall."""
    commit_interval_s: PositiveFloat = 0.05
    """Longest time, in seconds, that a verifier holds back a token that it decoded by itself, to send several
    together. A request's first and last token and the answer to candidates are sent at once."""
    min_window: PositiveInt = 7
    """Shortest target length of a window, in candidates."""
    max_window: PositiveInt = 63
    """Longest window, in candidates."""
    start_window: PositiveInt = 15
    """Target length of a request's first windows, in candidates, until it is known how many are accepted."""
    lookahead: PositiveInt = 128
    """How many candidates the fast path may decode beyond the last committed token. More hides the time of
    verification better and loses more at a rollback."""
    commit_deadline_s: PositiveFloat = 0.5
    """A window is sent at most this many seconds after the last commit, even if it is short. Lower it for
    smoother streams, raise it for longer windows."""
    verify_timeout_s: PositiveFloat = 60.0
    """Seconds after which an unanswered window is sent again. They count only if the verifier has completed
    no step for other requests either: otherwise the window is still in its queue."""
    verify_attempts: PositiveInt = 4
    """How many times a window may stay unanswered before the request ends with an error. A verifier that is
    dead or full refuses at once; then the window is sent again for as long as those attempts might take."""

    @model_validator(mode="after")
    def _order(self) -> SessionSettings:
        if not self.min_window <= self.start_window <= self.max_window <= self.lookahead:
            raise ValueError(
                "session: min_window <= start_window <= max_window <= lookahead must hold; they are"
                f" {self.min_window}, {self.start_window}, {self.max_window} and {self.lookahead}"
            )
        return self
