"""Loads a model, from a GGUF file or a Hugging Face directory, and its tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from llm42.checkpoint.description import load_tokenizer, read_config, require_context
from llm42.config import Settings
from llm42.errors import LLM42Error, ModelFileError
from llm42.models.config import ModelConfig
from llm42.models.decoder import activation_dtype
from llm42.models.gguf.source import GGUFSource
from llm42.models.safetensors import SafetensorsSource
from llm42.models.weights import LoadedModel, assemble
from llm42.text.tokenizer import Tokenizer

_CHUNK_BYTES = 1 << 22
_SAMPLE_BYTES = 1 << 20
_GGUF_HEAD_BYTES = 1 << 26
"""More than the metadata of any model has: a vocabulary of 256,000 tokens and its merges take 15 MB."""


class DeviceUnavailable(LLM42Error):
    """model.device names a device that is not there."""

    code = "device_unavailable"


def require_device(device: str) -> None:
    """Raises DeviceUnavailable where `device` is cuda and PyTorch has no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = "finds no GPU here" if built else "is a build without CUDA"
        raise DeviceUnavailable(
            f"model.device is cuda, but PyTorch {torch.__version__} {why}: install the GPU's driver or"
            " PyTorch's CUDA build, or set model.device to cpu"
        )


def load_for(settings: Settings) -> tuple[LoadedModel, Tokenizer]:
    """The model and tokenizer that the settings name. Raises as `load_model`."""
    m = settings.model
    tokenizer = load_tokenizer(m)  # first: what it refuses, it refuses at once
    return load_model(m.path, m.dtype, m.device, m.max_model_len), tokenizer


def load_model(path: str | Path, dtype: str, device: str, max_model_len: int) -> LoadedModel:
    """Reads configuration and weights.

    path: a GGUF file, or a directory with config.json and safetensors. dtype: "bfloat16", "float16" or
    "float32", the activation dtype, to which all weights are rounded. max_model_len: positions in the rotary
    table.
    Raises ModelFileError (file and tensor named), UnsupportedModel (field named) or DeviceUnavailable.
    """
    require_device(device)
    place = Path(path)
    config = read_config(place)
    require_context(place, config, max_model_len)
    source, files, dequantiser = _open(place, config)
    return LoadedModel(
        config=config,
        weights=assemble(config, source, activation_dtype(dtype), device, max_model_len),
        dtype=activation_dtype(dtype),
        device=device,
        identity=identity_of(config, files),
        dequantiser=dequantiser,
    )


def _open(place: Path, config: ModelConfig) -> tuple[GGUFSource | SafetensorsSource, list[Path], str]:
    """(tensors, weight files, dequantiser)."""
    if place.is_dir():
        source = SafetensorsSource(place)
        return source, source.files, "none"
    opened = GGUFSource(place, config)
    return opened, [place], f"gguf {version('gguf')}" if opened.quantised else "none"


def sampled_identity(path: str | Path) -> str:
    """A quick stand-in for `identity_of`, 16 hex digits: names and lengths of the files that make a model,
    all of what is no weights, and of weights a mebibyte from the start, the middle and the end of each file.
    Raises ModelFileError."""
    place = Path(path)
    kinds = (".json", ".safetensors", ".jinja", ".model", ".txt")
    files = sorted(f for f in place.iterdir() if f.suffix in kinds) if place.is_dir() else [place]
    digest = hashlib.sha256()
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(f"\0{file.name}\0{size}\0".encode())
            # all that is read of a model in one file, GGUF, begins with the tokenizer and the template
            whole = 0 if file.suffix == ".safetensors" else size if place.is_dir() else _GGUF_HEAD_BYTES
            with file.open("rb") as stream:
                for start in range(0, min(whole, size), _CHUNK_BYTES):
                    digest.update(stream.read(min(_CHUNK_BYTES, whole - start)))
                for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)) if whole < size else ():
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelFileError(f"{place}: {error}") from error
    return digest.hexdigest()[:16]


def identity_of(config: ModelConfig, files: Iterable[Path]) -> str:
    """sha256 (hex) over the configuration and, in order, each file's name, length and content."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
