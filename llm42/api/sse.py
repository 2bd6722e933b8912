"""Server-sent events as text."""

from __future__ import annotations

_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What many readers of lines take for the end of one, and JSON leaves as it is; JSON escapes the others."""

DONE = "data: [DONE]\n\n"
"""The event that ends every stream."""
HEARTBEAT = ": still working\n\n"
"""A comment: clients skip it, and what watches the connection sees that it is alive."""


def event(json_text: str) -> str:
    """The event for one JSON value, on one line whatever its reader takes for the end of a line."""
    if not json_text.isascii():
        for char, escape in _LINE_ENDS.items():
            json_text = json_text.replace(char, escape)
    return f"data: {json_text}\n\n"
