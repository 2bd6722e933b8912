"""The libraries as far as bits may depend on them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("torch", "triton", "numpy", "tokenizers", "jinja2", "gguf", "safetensors")


def library_versions() -> dict[str, str | None]:
    """The installed distributions' versions; None for one that is not installed."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
