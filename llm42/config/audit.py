"""Settings of receipts and audits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from llm42.config.section import Section


class AuditSettings(Section):
    """Receipts, and audits of stored answers (docs/audits.md)."""

    keys: dict[str, str] = Field(default_factory=dict)
    """Keys that sign receipts and check their signatures: id -> path of a file with a secret of 16 bytes or
    more. On a cluster the files must exist on every node. Keep an old key here for as long as receipts signed
    with it are to be checked."""
    signing_key: str | None = None
    """Id, in audit.keys, of the key that signs new receipts. null: receipts are not signed."""
    batch_tokens: PositiveInt = 4096
    """Most tokens that an audit sends to a verifier in one call; a single answer may be longer. Lower it if
    audits delay live requests."""
    concurrency: PositiveInt = 2
    """Calls to verifiers that all audits of an ingress may have under way at a time. Raise it to audit
    faster, lower it to leave more of the verifiers to live requests. Answers kept only as text or hash are
    generated again, at most eight times as many at a time."""
    max_window: PositiveInt = 2048
    """Longest window of an audit, in tokens of the answer. A longer answer is checked in several windows."""
    max_records: Annotated[int, Field(ge=32)] = 1000
    """Most records, and most answers in them, that one call of POST /v1/audit may have. A call with more gets
    a 400."""

    @model_validator(mode="after")
    def _known_key(self) -> AuditSettings:
        if self.signing_key is not None and self.signing_key not in self.keys:
            raise ValueError(
                f"audit.signing_key {self.signing_key!r} is not one of audit.keys: add its file there"
            )
        return self
