"""Settings of the decode-verify-rollback session."""

from __future__ import annotations

from pydantic import Field, model_validator

from llm42.config.section import Section


class SessionSettings(Section):
    """The decode-verify-rollback session of a deterministic request."""

    min_window: int = Field(7, gt=0, description="Shortest target length of a window, in candidates.")
    max_window: int = Field(63, gt=0, description="Longest window.")
    start_window: int = Field(15, gt=0, description="Target length before acceptance is known.")
    lookahead: int = Field(
        128, gt=0, description="How far the fast path may decode beyond the last commit, in candidates."
    )
    commit_deadline_s: float = Field(
        0.5,
        gt=0,
        description="A window is sent at the latest this long after the last commit (seconds), so that"
        " streams stay smooth.",
    )
    verify_timeout_s: float = Field(
        60.0, gt=0, description="A verify call without an answer for this long (seconds) is repeated."
    )
    verify_attempts: int = Field(
        4,
        gt=0,
        description="Calls for one window that are left unanswered before the request ends with an error. A"
        " verifier that is dead or full refuses at once; it is asked again for as long as those calls might"
        " take.",
    )

    @model_validator(mode="after")
    def _order(self) -> SessionSettings:
        if not self.min_window <= self.start_window <= self.max_window <= self.lookahead:
            raise ValueError("session: need min_window <= start_window <= max_window <= lookahead")
        return self
