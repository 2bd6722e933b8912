"""What the request side contributes to an answer: the half of the function that is not the verifier's.

An ingress encodes prompts, renders chat templates and fills in defaults; a replica detokenises. Whoever does
so computes these facts of itself, and the verifiers' manifest has them as its section `request`: equal facts,
or no deterministic answer (llm42/fingerprint/skew.py).
"""

from __future__ import annotations

import platform
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm42.config import Settings
from llm42.fingerprint import digest
from llm42.fingerprint.libraries import installed_version
from llm42.fingerprint.source import code_hash

if TYPE_CHECKING:
    from llm42.text.tokenizer import Tokenizer

LIBRARIES = ("jinja2", "markupsafe", "pydantic", "pydantic_core", "tokenizers")
"""What makes ids of a body. Python's own json reads it; the HTTP libraries only carry it."""


def process_facts() -> dict[str, Any]:
    """Of this process alone: code, Python, its Unicode data, libraries. JSON-ready."""
    return {
        "code": code_hash(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libc": platform.libc_ver()[0],
        "unicode": unicodedata.unidata_version,
        "libraries": {name: installed_version(name) for name in LIBRARIES},
    }


def request_facts(settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    """All of it: of this process, its tokenizer and chat template, and the length of the context, which a
    missing `max_tokens` stands for. JSON-ready.

    No other setting: the rest only refuse, and `server.default_seed` is told with each reply.
    """
    facts = process_facts() | {"max_model_len": settings.model.max_model_len}
    if Path(settings.model.path).is_file():  # the library makes a tokenizer of a GGUF file's metadata
        facts["libraries"] |= {"gguf": installed_version("gguf")}
    templates = tokenizer.template_sources
    return facts | {
        "tokenizer": digest([tokenizer.backend.to_str(), tokenizer.special]),
        "end_of_text": list(tokenizer.eos_token_ids),
        "chat_template": digest(templates) if templates else None,
    }
