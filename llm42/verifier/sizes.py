"""Step sizes: which one the canonical bits are those of, and over which ones providers are chosen.

Both are constants, so that no setting chooses the arithmetic. The configured sizes (verifier.buckets) decide
only how fast a verifier is: one whose bits are not those of the reference size is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)

REFERENCE_ROWS = {"cpu": 128, "cuda": 1024}
"""Kind of device -> the step size whose bits are the canonical ones. Named in the manifest."""

PROVIDER_ROWS = {
    "cpu": (8, 16, 24, 32, 48, 64, 96, 128),
    "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
}
"""Kind of device -> the sizes at which a provider must agree with itself to be chosen; the last is the
reference."""


def beyond(configured: Iterable[int], kind: str) -> list[int]:
    """The configured sizes that are not among those over which providers are chosen."""
    return [rows for rows in configured if rows not in PROVIDER_ROWS[kind]]


def usable(configured: Iterable[int], agreeing: Collection[int], kind: str) -> tuple[int, ...]:
    """The configured sizes that agree with the reference; if there is none, the reference."""
    return tuple(rows for rows in configured if rows in agreeing) or (REFERENCE_ROWS[kind],)


def log_unused(configured: Iterable[int], used: Collection[int], kind: str) -> None:
    """Says which configured sizes are not used, and why."""
    unused = [rows for rows in configured if rows not in used]
    if unused:
        log.warning(
            "steps of %s rows (verifier.buckets) are not used: their bits differ from those of the reference,"
            " %d rows; used are %s",
            ", ".join(map(str, unused)),
            REFERENCE_ROWS[kind],
            ", ".join(map(str, used)),
        )
