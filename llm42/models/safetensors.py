"""Hugging Face directories: one model.safetensors, or shards with an index."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models.files import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32", "F16", "BF16"}
_HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""


class SafetensorsSource:
    """weights.TensorSource over a directory. Headers are checked at once, values are read on demand."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelFileError, and UnsupportedModel for a type of tensor that is not read."""
        self.files, placed = _files(directory)
        self._index = directory / INDEX if placed is not None else self.files[0]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for file in self.files:
            for name, entry in read_header(file).items():
                if name in self._file_of:
                    raise ModelFileError(f"{file}: tensor {name} is also in {self._file_of[name].name}")
                self._shapes[name], self._file_of[name] = tuple(entry["shape"]), file
        for name, file in (placed or {}).items():
            if self._file_of.get(name) != file:
                raise ModelFileError(f"{file}: tensor {name} is missing, though {INDEX} places it there")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes from the headers."""
        return self._shapes

    def where(self, name: str) -> str:
        """The shard, or the index for a tensor that no shard holds."""
        return str(self._file_of.get(name, self._index))

    def read(self, name: str) -> Tensor:
        """The tensor in the file's own dtype, on the CPU. Raises ModelFileError."""
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: tensor {name}: {error}") from error


def _files(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The weight files, and where the index (if there is one) places each tensor."""
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ModelFileError(f"{index}: weight_map is missing")
        files = sorted({directory / str(name) for name in placed.values()})
        for file in files:
            if file.parent != directory or not file.is_file():
                raise ModelFileError(f"{file}: no such file, though {INDEX} names it")
        return files, {name: directory / str(file) for name, file in placed.items()}
    if single.is_file():
        return [single], None
    raise ModelFileError(f"{directory}: neither {SINGLE} nor {INDEX} is there (other formats are not read)")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> {"dtype", "shape", "data_offsets"}; checked against the file's length. Raises ModelFileError,
    and UnsupportedModel for a type that is not read.

    The library would refuse a truncated file too, but without saying which tensor is cut.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise ModelFileError(f"{file}: not a safetensors file, or truncated inside its header")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelFileError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            kind, end, _ = entry["dtype"], int(entry["data_offsets"][1]), tuple(map(int, entry["shape"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ModelFileError(f"{file}: tensor {name} has a broken header entry: {entry!r}") from error
        if kind not in _DTYPES:
            raise UnsupportedModel(f"{file}: tensor {name} has type {kind}: not supported", str(kind))
        if 8 + length + end > size:
            raise ModelFileError(f"{file}: file is truncated: tensor {name} ends beyond it ({size} bytes)")
    return header
