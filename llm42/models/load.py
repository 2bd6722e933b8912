"""Loads a model from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import gguf
import torch

from llm42.models import gguf as gguf_files
from llm42.models.config import ModelConfig
from llm42.models.decoder import activation_dtype
from llm42.models.errors import ModelFileError
from llm42.models.weights import LoadedModel, assemble

_CHUNK_BYTES = 1 << 22


def load_model(path: str | Path, dtype: str, device: str, max_model_len: int) -> LoadedModel:
    """Reads configuration and weights.

    path: a GGUF file, or a directory with config.json and safetensors. dtype: "bfloat16", "float16" or "float32", the
    activation dtype, to which all weights are rounded. max_model_len: number of positions in the rotary table.
    Raises ModelFileError (file and tensor named) or UnsupportedModel (field named).
    """
    source = Path(path)
    if source.is_dir():
        raise ModelFileError(f"{source}: Hugging Face directories are not read yet")
    if not source.is_file():
        raise ModelFileError(f"{source}: no such file or directory")
    return _load_gguf(source, activation_dtype(dtype), device, max_model_len)


def _load_gguf(path: Path, dtype: torch.dtype, device: str, max_model_len: int) -> LoadedModel:
    config = gguf_files.read_config(path)
    source = gguf_files.GGUFSource(path, config)
    weights = assemble(config, source, dtype, device, max_model_len)
    dequantiser = f"gguf {_gguf_version()}" if source.quantised else "none"
    return LoadedModel(
        config, weights, dtype, device, identity_of(config, [path]), f"GGUF file {path}", dequantiser
    )


def _gguf_version() -> str:
    from importlib.metadata import version

    return version(gguf.__name__)


def identity_of(config: ModelConfig, files: Iterable[Path]) -> str:
    """sha256 (hex) over the configuration and, in order, each file's name, length and content."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
