"""Draws docs/structure.svg: the four processes and what goes between them.

    python docs/picture.py

Colours follow the reader's light or dark scheme; the picture brings its own background.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1130, 434
STYLE = """
  svg { font: 15px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .ground { fill: #ffffff; }
  .box { fill: #f1f5f9; stroke: #64748b; stroke-width: 1.5; }
  .part { fill: #ffffff; stroke: #94a3b8; }
  .line { fill: none; stroke: #334155; stroke-width: 1.8; }
  .watch { stroke-dasharray: 5 4; }
  .head { fill: #334155; }
  text { fill: #1e293b; text-anchor: middle; }
  .name { font-size: 18px; font-weight: 600; }
  .small { font-size: 13px; fill: #475569; }
  .message { font-weight: 600; fill: #0f5fb8; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0f172a; }
    .box { fill: #1e293b; stroke: #94a3b8; }
    .part { fill: #0f172a; stroke: #64748b; }
    .line { stroke: #cbd5e1; }
    .head { fill: #cbd5e1; }
    text { fill: #f1f5f9; }
    .small { fill: #cbd5e1; }
    .message { fill: #7cc0ff; }
  }
"""


def text(x: int, y: int, words: str, kind: str = "") -> str:
    """A line of text, centred at x."""
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def box(x: int, y: int, width: int, height: int, *lines: tuple[str, str], kind: str = "box") -> str:
    """A rectangle with lines of (words, class) from its top."""
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="{kind}"/>'
    below = range(y + 26, y + height + 26, 20)
    return "\n".join(
        [rect, *(text(x + width // 2, at, *line) for at, line in zip(below, lines, strict=False))]
    )


def arrow(*points: tuple[int, int], kind: str = "line") -> str:
    """A line through the points with a head at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}" marker-end="url(#head)"/>'


def message(left: int, right: int, y: int, name: str, says: str, back: bool = False) -> str:
    """An arrow between two boxes with a message's name above it and what it holds below; back: leftwards."""
    middle, ends = (left + right) // 2, ((left + 5, y), (right - 5, y))
    return "\n".join(
        [
            arrow(*(reversed(ends) if back else ends)),
            text(middle, y - 8, name, "message"),
            text(middle, y + 19, says, "small"),
        ]
    )


def picture() -> str:
    """The whole file."""
    title = "The four processes of LLM-42 and the messages between them"
    marker = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
        ' orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" class="head"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{marker}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" class="ground"/>',
        # the client's side
        text(48, 138, "client", "name"),
        message(86, 184, 98, "HTTP", "JSON"),
        message(86, 184, 168, "HTTP", "text", back=True),
        box(184, 30, 176, 210, ("Ingress", "name"), ("keys, limits,", "small"), ("chat template", "small")),
        text(272, 150, "text to tokens;", "small"),
        text(272, 168, "output to OpenAI's", "small"),
        text(272, 186, "shapes", "small"),
        message(360, 516, 98, "Request", "prompt, sampling"),
        message(360, 516, 168, "Delta", "committed tokens", back=True),
        # the fast path
        box(516, 30, 236, 210, ("Fast path", "name"), ("ordinary kernels", "small")),
        box(536, 86, 196, 52, ("session", ""), ("says what may leave", "small"), kind="part"),
        box(536, 184, 196, 40, ("engine", ""), kind="part"),
        arrow((626, 184), (626, 141)),
        arrow((642, 138), (642, 181)),
        text(580, 166, "candidates", "small"),
        text(680, 166, "rollback", "small"),
        message(752, 912, 98, "Window", "candidates"),
        message(752, 912, 168, "Commit", "what stands", back=True),
        # the verifier
        box(912, 30, 188, 210, ("Verifier", "name"), ("sums in a fixed order", "small")),
        text(1006, 140, "computes each position", "small"),
        text(1006, 158, "again and decides", "small"),
        text(1006, 176, "its token", "small"),
        # the supervisor
        box(
            516,
            320,
            584,
            84,
            ("Supervisor", "name"),
            ("creates, watches, scales and replaces verifiers", "small"),
            ("and tells replicas which of them to ask", "small"),
        ),
        arrow((634, 240), (634, 315), kind="line watch"),
        text(704, 283, "which are ready?", "small"),
        arrow((1006, 320), (1006, 245), kind="line watch"),
        text(934, 283, "alive? how busy?", "small"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "structure.svg").write_text(picture())
