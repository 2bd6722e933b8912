"""Settings of receipts and audits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from llm42.config.section import Section


class AuditSettings(Section):
    """Receipts, and audits of stored answers (docs/audits.md)."""

    keys: dict[str, str] = Field(default_factory=dict)
    """Keys that sign receipts and check their signatures: id -> file with a secret of 16 bytes or more. On
    a cluster the files must exist on every node. Keep old keys here as long as their receipts shall be
    checked."""
    signing_key: str | None = None
    """Id of the key that signs new receipts; null: receipts are not signed."""
    batch_tokens: PositiveInt = 4096
    """Tokens that an audit sends to a verifier in one call (at least one answer)."""
    concurrency: PositiveInt = 2
    """Such calls at a time: what audits may take of the verifiers. (Answers of which only text or a hash
    was kept are generated again: eight times as many at a time.)"""
    max_window: PositiveInt = 2048
    """Longest window of an audit, in candidates; a longer answer is replayed in several."""
    max_records: Annotated[int, Field(ge=32)] = 1000
    """Most records, and most answers in them, in one call of POST /v1/audit."""

    @model_validator(mode="after")
    def _known_key(self) -> AuditSettings:
        if self.signing_key is not None and self.signing_key not in self.keys:
            raise ValueError(f"audit.signing_key {self.signing_key!r} is not one of audit.keys")
        return self
