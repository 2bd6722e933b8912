"""SmolLM2: the default model, which the processes of a tier certify once together."""

from __future__ import annotations

import fcntl
from functools import cache
from pathlib import Path

from llm42.checkpoint.fetch import DEFAULT_DIR, fetch_smollm2
from llm42.config import Settings
from llm42.models.weights import LoadedModel
from llm42.text.tokenizer import Tokenizer
from tests.support.lab import Lab

ROOT = Path(__file__).parents[2]
CERTIFICATES = ROOT / "build" / "tests" / "certificates"
"""Where its certificate is kept, under its inputs; `make test-all` starts without one (tests/tiers.py)."""


@cache
def smollm2_file() -> Path:
    """Its GGUF file."""
    return fetch_smollm2(ROOT / DEFAULT_DIR)


def smollm2_settings() -> Settings:
    """What the tests' SmolLM2 is loaded and certified with."""
    verifier = {"certificate_dir": str(CERTIFICATES), "kv_tokens": 8192}
    tree = {"model": {"path": str(smollm2_file())}, "verifier": verifier, "session": {"mode": "verify"}}
    return Settings.load(tree)


def certified_smollm2(model: LoadedModel, tokenizer: Tokenizer) -> Lab:
    """The model with its certificate; whoever comes first certifies, the others wait here."""
    CERTIFICATES.mkdir(parents=True, exist_ok=True)
    with (CERTIFICATES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Lab.certified(smollm2_settings(), model, tokenizer)
