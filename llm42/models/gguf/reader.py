"""Opens GGUF files: the `gguf` library's reader, with errors that name file and tensor."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from llm42.errors import ModelFileError


class _CheckedReader(GGUFReader):  # type: ignore[misc,unused-ignore]  # the library ships no types
    """GGUFReader that names the tensor where the file ends early; arrays are not taken apart item by item."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
            end = start_offs + int(offset[0]) + int(np.prod(dims)) // block * size
            if end > len(self.data):
                raise ModelFileError(
                    f"file is truncated: tensor {bytes(name).decode()} ends at byte {end},"
                    f" the file at {len(self.data)}"
                )
        super()._build_tensors(start_offs, fields)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            found: tuple[int, list[Any], list[int], list[GGUFValueType]]
            found = super()._get_field_parts(orig_offs, raw_type)
            return found
        head, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, start = GGUFValueType(int(head[0])), orig_offs + 12
        types = [GGUFValueType.ARRAY, item]
        if item != GGUFValueType.STRING:
            values = self._get(start, self.gguf_scalar_to_np[item], int(count[0]))
            if len(values) != int(count[0]):
                raise ModelFileError("file is truncated inside its metadata")
            return 12 + values.nbytes, [head, count, values], [2], types
        parts, offset = [head, count], start
        for _ in range(int(count[0])):
            length = int.from_bytes(self.data[offset : offset + 8].tobytes(), "little")
            parts.append(self.data[offset + 8 : offset + 8 + length])
            offset += 8 + length
            if offset > len(self.data):
                raise ModelFileError("file is truncated inside its metadata")
        return offset - orig_offs, parts, list(range(2, len(parts))), types


@lru_cache(maxsize=2)
def _open(path: str, _modified: int) -> GGUFReader:
    try:
        return _CheckedReader(path)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelFileError(f"{path}: not a readable GGUF file, or truncated: {error}") from error


def open_gguf(path: str | Path) -> GGUFReader:
    """A reader with the file mapped into memory. Raises ModelFileError naming the file (and tensor)."""
    file = Path(path)
    if not file.is_file():
        raise ModelFileError(f"{file}: no such file")
    return _open(str(file), file.stat().st_mtime_ns)


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """All key-value pairs, arrays as lists. The vocabulary is large: call once."""
    return {key: contents(key, field) for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def contents(key: str, field: Any) -> Any:
    """One value. Raises ModelFileError naming the key."""
    try:
        return field.contents()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"metadata {key} is not valid UTF-8: {error}") from error
