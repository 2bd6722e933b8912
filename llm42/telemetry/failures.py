"""An error as one line for a terminal, with its traceback in a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback

MAX_WORDS = 800


def one_line(error: BaseException) -> str:
    """Its kind and its own words, without line breaks; of many words the last, where a cause stands."""
    words = " ".join(str(error).split())
    if len(words) > MAX_WORDS:
        words = f"... {words[-MAX_WORDS:]}"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def kept_traceback(error: BaseException) -> str:
    """Writes the traceback to a new file; " (traceback: PATH)", or nothing where none can be written."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="llm42-error-", suffix=".log")
        try:
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError:
            os.unlink(path)
            raise
        return f" (traceback: {path})"
    return ""
