"""The hash of the code that makes outputs of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import deployments
import llm42
import llm42_kernels

CODE = (
    "kernels",
    "models",
    "verifier",
    "sampling.py",
    "noise.py",
    "cache.py",
    "threads.py",
    "tokenizer.py",
    "chat_template.py",
    "text.py",
    "protocol.py",
    "session.py",
    "driver.py",
    "outputs.py",
    "prompt_scores.py",
)
REQUEST_CODE = ("translate.py", "openai_types.py", "prompts.py", "messages.py")
"""What makes protocol requests of HTTP bodies: defaults, limits, the seeds of several choices."""


def code_hash() -> str:
    """Hash over the source of the kernels and of everything that makes an output of a request."""
    package, service = Path(llm42.__file__).parent, Path(deployments.__file__).parent
    roots = [Path(llm42_kernels.__file__).parent if name == "kernels" else package / name for name in CODE]
    return source_hash([*roots, *(service / name for name in REQUEST_CODE)])


def source_hash(roots: Iterable[Path]) -> str:
    """Hash over Python files and, of folders, all Python files in them: names and contents."""
    hashed = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            hashed.update(f"{file.relative_to(root.parent)}\0".encode() + file.read_bytes())
    return hashed.hexdigest()[:16]
