"""Settings of who watches whom."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from llm42.config.section import Section

LEASE_MARGIN_S = 14.0
"""What a hung supervisor's successor needs to be noticed missing, to start and to ask the verifiers."""


class WatchSettings(Section):
    """How many seconds a process may be silent before it is replaced."""

    verifier_s: PositiveFloat = 60.0
    """Seconds after which a verifier that was ready and does not answer is killed and started again."""
    verifier_start_s: PositiveFloat = 900.0
    """The same while it starts: it may wait for a device or load a large model. Raise it if your model takes
    longer."""
    supervisor_s: PositiveFloat = 12.0
    """Seconds after which a replica that gets no answer from the supervisor has it replaced."""
    supervisor_start_s: PositiveFloat = 120.0
    """The same before the supervisor has answered that replica for the first time."""
    drain_check_s: NonNegativeFloat = 1.0
    """Seconds between the supervisor's looks for nodes that Ray drains: their verifiers hand their work to
    successors on other nodes and end. 0: never; then they end with their node."""
    lease_s: PositiveFloat = Field(
        30.0,
        description="Seconds after which a verifier that nobody has asked for its state ends itself; a"
        f" supervisor ends after half of them. At least {LEASE_MARGIN_S:.0f} more than supervisor_s.",
    )

    @model_validator(mode="after")
    def _successor_in_time(self) -> WatchSettings:
        if self.lease_s < self.supervisor_s + LEASE_MARGIN_S:
            raise ValueError(
                f"watch.lease_s must be at least {LEASE_MARGIN_S:.0f} s more than watch.supervisor_s:"
                " verifiers must not end while a hung supervisor is being replaced"
            )
        return self
