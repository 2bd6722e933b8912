"""Which file a function comes from in this process, and what identifies the file: as the dynamic linker and
the kernel see it, not as a package's version says."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")


def mapped_files(maps: str) -> list[str]:
    """The files of a /proc/PID/maps text, each once, in order."""
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    return list(dict.fromkeys(f[5] for f in fields if len(f) == 6 and f[5].startswith("/")))


def mapped_file(stem: str) -> str | None:
    """The file of a loaded shared library, by the beginning of its name (`libcuda.so`), or None."""
    try:
        files = mapped_files(MAPS.read_text())
    except OSError:
        return None
    return next((file for file in files if os.path.basename(file).startswith(stem)), None)


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def file_of(function: Any) -> str | None:
    """The file in which a C function lies."""
    info, address = _SymbolInfo(), ctypes.cast(function, ctypes.c_void_p)
    try:
        known = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except (AttributeError, OSError, TypeError):
        return None
    return os.fsdecode(info.file) if known and info.file else None


def find(symbols: Iterable[str], library: str) -> Any | None:
    """The function that a call from `library` (a path) reaches: the first of `symbols` in the process's
    global scope, where a preloaded library comes first, else in the library and what it was linked with."""
    for scope in (None, library):
        try:
            handle = ctypes.CDLL(scope)
        except (OSError, TypeError):
            continue
        for symbol in symbols:
            function = getattr(handle, symbol, None)
            if function is not None:
                return function
    return None


def file_identity(path: str) -> str:
    """The build id that a linker wrote into an ELF file, else a hash of the file. 16 hex digits."""
    try:
        stat = os.stat(path)
        return _identity(path, stat.st_size, stat.st_mtime_ns)
    except OSError:
        return "unreadable"


@lru_cache(maxsize=64)
def _identity(path: str, _size: int, _modified: int) -> str:
    with open(path, "rb") as file:
        try:
            found = _build_id(file.fileno())
        except (struct.error, IndexError, ValueError):
            found = None
        if found is not None:
            return found.hex()[:16]
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _build_id(fd: int) -> bytes | None:
    """The GNU build id of a little-endian 64-bit ELF file (its note of type 3)."""
    head = os.pread(fd, 64, 0)
    if head[:6] != b"\x7fELF\x02\x01":
        return None
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    for i in range(count):
        entry = os.pread(fd, size, table + i * size)
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", entry)
        if kind == 4:  # PT_NOTE
            found = _gnu_build_id(os.pread(fd, min(length, 1 << 16), offset))
            if found is not None:
                return found
    return None


def _gnu_build_id(notes: bytes) -> bytes | None:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12 : at + 12 + name_size]
        start = at + 12 + -(-name_size // 4) * 4
        if kind == 3 and name == b"GNU\0":
            return notes[start : start + size]
        at = start + -(-size // 4) * 4
    return None
