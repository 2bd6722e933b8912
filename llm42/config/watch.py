"""Settings of who watches whom."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from llm42.config.section import Section

LEASE_MARGIN_S = 14.0
"""What a hung supervisor's successor needs to be noticed missing, to start and to ask the verifiers."""


class WatchSettings(Section):
    """How long (seconds) a process may be silent before another one takes its place."""

    verifier_s: PositiveFloat = 60.0
    """A verifier that was ready and does not answer for so long is killed and started anew."""
    verifier_start_s: PositiveFloat = 900.0
    """The same before it is ready: it may wait for a device, or load what is large."""
    supervisor_s: PositiveFloat = 12.0
    """The same for the supervisor, as each replica sees it."""
    supervisor_start_s: PositiveFloat = 120.0
    """The same before the supervisor has answered that replica at all."""
    drain_check_s: NonNegativeFloat = 1.0
    """How often the supervisor looks for nodes that Ray drains: their verifiers give their work to successors
    elsewhere and end. 0: never; they then end with their node."""
    lease_s: PositiveFloat = Field(
        30.0,
        description="A verifier that nobody asks how it is for so long ends itself; a supervisor after half"
        f" of it. At least {LEASE_MARGIN_S:.0f} s more than supervisor_s.",
    )

    @model_validator(mode="after")
    def _successor_in_time(self) -> WatchSettings:
        if self.lease_s < self.supervisor_s + LEASE_MARGIN_S:
            raise ValueError(
                f"watch.lease_s must be at least {LEASE_MARGIN_S:.0f} s more than watch.supervisor_s:"
                " verifiers must not end while a hung supervisor is being replaced"
            )
        return self
