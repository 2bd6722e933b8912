"""The log of a process: text or JSON lines with request ids; prompts only where the settings ask for them.
And an error as one line for a terminal, with its traceback in a file."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TextIO

from llm42.config import TelemetrySettings

LOGGERS = ("llm42", "llm42_serve")
MAX_WORDS = 800
_bound: ContextVar[Mapping[str, str]] = ContextVar("llm42_log_fields", default=MappingProxyType({}))


def event(log: logging.Logger, message: str, **fields: Any) -> None:
    """An informational line with fields."""
    log.info(message, extra={"fields": fields})


@contextmanager
def bound(**fields: str) -> Iterator[None]:
    """Lines that are written inside, and by tasks that are started inside, have these fields too; empty ones
    are left out."""
    token = _bound.set({**_bound.get(), **{name: value for name, value in fields.items() if value}})
    try:
        yield
    finally:
        _bound.reset(token)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The record's own and the bound ones; handlers write at once, so in the context of who logs."""
    return {**_bound.get(), **getattr(record, "fields", {})}


class _Lines(logging.Formatter):
    """Text: time, level, logger, message, then name=value."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        # quoted, so that no value can start a line of its own
        return " ".join([text, *(f"{name}={json.dumps(value)}" for name, value in _fields(record).items())])


class _Json(logging.Formatter):
    """One object a line."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(settings: TelemetrySettings, component: str, stream: TextIO | None = None) -> None:
    """Sends what this project's loggers say to `stream` (standard error), which Ray keeps per process.
    Calling it again replaces the former settings."""
    # not sys.stderr: Serve puts a logger of its own there, which may keep lines back
    handler = logging.StreamHandler(stream or sys.__stderr__)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_Json(component) if settings.log_format == "json" else _Lines(text))
    for name in LOGGERS:
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(settings.log_level.upper())


def one_line(error: BaseException) -> str:
    """Its kind and its own words, without line breaks; of many words the last, where a cause stands."""
    words = " ".join(str(error).split())
    if len(words) > MAX_WORDS:
        words = f"... {words[-MAX_WORDS:]}"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def kept_traceback(error: BaseException) -> str:
    """Writes the traceback to a new file; " (traceback: PATH)", or nothing where none can be written."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="llm42-error-", suffix=".log")
        try:
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError:
            os.unlink(path)
            raise
        return f" (traceback: {path})"
    return ""
