"""Prefix preference: requests that begin alike prefer the same replica and the same verifier, whose caches
then hold their beginning, unless it has clearly more to do than others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

PREFIX_TOKENS = 64
"""Requests that share this many first tokens have the same preference."""
SPILL = 4


def preferred(prefix: tuple[int, ...], names: Iterable[str]) -> str:
    """Rendezvous hashing: the same in every process, and stable while other names come and go."""
    key = repr(prefix).encode()
    return max(names, key=lambda name: hashlib.blake2b(key, key=name.encode()[:64]).digest())


def is_busy(name: str, held: Mapping[str, int]) -> bool:
    """Whether it is to be passed over: it holds over SPILL more than twice what the idlest one does."""
    return held[name] > 2 * min(held.values()) + SPILL
