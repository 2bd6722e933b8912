"""Writes what the chart repeats of other files: the settings in values.schema.json, from llm42/config/, and
the table of values in README.md, from the comments of values.yaml.

    python helm/generate.py            writes
    python helm/generate.py --check    exit status 1 when something is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from llm42.config import Settings

CHART = Path(__file__).parent / "llm42"
EXACT = 2**53 - 1
"""Helm reads numbers as floating point: a larger seed would silently become another one."""
BEGIN, END = "<!-- values: written by helm/generate.py -->", "<!-- end of values -->"


def settings_definitions() -> dict[str, Any]:
    """The JSON schema of the settings tree as `$defs` of values.schema.json, one a section."""
    tree = Settings.model_json_schema(ref_template="#/$defs/Settings.{model}")
    sections = tree.pop("$defs")
    found = {"Settings": tree} | {f"Settings.{name}": section for name, section in sections.items()}
    return {name: _clean(section) for name, section in found.items()}


def _clean(node: Any) -> Any:
    """Without titles and defaults (helm's values decide), texts in a line, integers helm keeps exactly."""
    if isinstance(node, list):
        return [_clean(x) for x in node]
    if not isinstance(node, dict):
        return " ".join(node.split()) if isinstance(node, str) else node
    kept = {
        key: _clean(value) for key, value in node.items() if key != "default" and not _is_title(key, value)
    }
    if kept.get("type") == "integer":
        if "exclusiveMinimum" not in kept:
            kept.setdefault("minimum", -EXACT)
        kept.setdefault("maximum", EXACT)
    return kept


def _is_title(key: str, value: Any) -> bool:
    return key == "title" and isinstance(value, str)


def schema() -> str:
    """values.schema.json with today's settings."""
    document = json.loads((CHART / "values.schema.json").read_text())
    kept = {name: d for name, d in document["$defs"].items() if not name.startswith("Settings")}
    document["$defs"] = kept | settings_definitions()
    return json.dumps(document, indent=2) + "\n"


def documented_values() -> dict[str, str]:
    """Dotted name -> description (empty without a `# --` comment) of every key in values.yaml."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("# -- "):
            comment = [text.removeprefix("# -- ")]
        elif text.startswith("# ") and comment:
            comment.append(text.removeprefix("# "))
        elif match := re.match(r"( *)([A-Za-z][\w-]*):", line):
            indent, key = len(match[1]), match[2]
            path = [p for p in path if p[0] < indent] + [(indent, key)]
            found[".".join(name for _, name in path)] = " ".join(comment)
            comment = []
    return found


def table() -> str:
    """A markdown table of all values: those with a description, and leaves."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for name, meaning in documented_values().items():
        default = values
        for part in name.split("."):
            default = default[part]
        whole = isinstance(default, dict) and bool(default)
        if meaning or not whole:
            shown = "see values.yaml" if whole else f"`{json.dumps(default)}`"
            rows.append(f"| `{name}` | {shown} | {meaning} |")
    return "\n".join(rows)


def readme() -> str:
    """README.md with today's table."""
    before, _, rest = (CHART / "README.md").read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--check", action="store_true", help="write nothing")
    asked = options.parse_args()
    stale = []
    for name, text in (("values.schema.json", schema()), ("README.md", readme())):
        if (CHART / name).read_text() != text:
            stale.append(name)
            if not asked.check:
                (CHART / name).write_text(text)
    if stale:
        print(
            ("out of date, run python helm/generate.py: " if asked.check else "written: ") + ", ".join(stale)
        )
    return 1 if stale and asked.check else 0


if __name__ == "__main__":
    sys.exit(main())
