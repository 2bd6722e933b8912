"""serve_config.yaml and serve_config.canonical.yaml, from the settings tree: names and defaults of the
fields, descriptions as comments.

python helm/serve_config.py > serve_config.yaml
python helm/serve_config.py canonical > serve_config.canonical.yaml
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from llm42.config import BY_OTHERS, Settings
from llm42.config.section import TEST_PLANT, Section

WIDTH = 120
IN_HTTP_OPTIONS = ("server.host", "server.port")
TOPICS = {
    "": "The configuration of the service, as Ray Serve reads it:",
    "canonical": "The service in the canonical layout: no fast path, verifiers decode every request.",
}
"""First line by variant. A variant is serve_config.yaml with another engine.kind."""
HEAD = """\
# {topic}
#   one machine:   llm42 serve --config {file}{make}
#   a Ray cluster: serve deploy {file}
# Generated from the settings tree (llm42/config/): python helm/serve_config.py {variant}> {file}
# Everything under `args` is that tree; an unknown or wrong field stops the start with its name. The values
# here are the defaults, except where a comment says otherwise{beside}. Beside `args`, `llm42 serve`
# honours host and port; it refuses other options of Ray Serve by name, as they need a cluster.

proxy_location: HeadOnly

http_options:
  # 0.0.0.0 to be reached from other machines; set server.api_keys then, or put authentication in front.
  host: {host}
  port: {port}

applications:
  - name: llm42
    route_prefix: /
    import_path: llm42_serve.app:build
    args:
"""


def serve_config(variant: str = "") -> str:
    """The file's text. variant: of TOPICS."""
    settings = Settings.load({"engine": {"kind": variant}} if variant else {})
    words = {
        "topic": TOPICS[variant],
        "file": f"serve_config.{variant}.yaml" if variant else "serve_config.yaml",
        "make": "" if variant else "     (what `make run` does)",
        "variant": f"{variant} " if variant else "",
        "beside": ", and engine.kind" if variant else "",
    }
    lines = [HEAD.format(**words, host=settings.server.host, port=settings.server.port).rstrip()]
    for name in Settings.model_fields:
        lines += [*_section(name, getattr(settings, name), " " * 6), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, section: Section, indent: str) -> Iterator[str]:
    """The lines of a section at its defaults. path: its dotted name."""
    yield from _comment(inspect.getdoc(type(section)), indent)
    yield f"{indent}{path.split('.')[-1]}:"
    indent += "  "
    for name, field in type(section).model_fields.items():
        value, inner = getattr(section, name), f"{path}.{name}"
        if isinstance(value, Section):
            yield from _section(inner, value, indent)
        elif inner not in IN_HTTP_OPTIONS and TEST_PLANT not in field.metadata:
            yield from _comment(field.description, indent)
            yield f"{indent}{name}: {_yaml_value(None if inner in BY_OTHERS else value)}"


def _comment(text: str | None, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join((text or "").split()),
        WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yaml_value(value: Any) -> str:
    """A default as YAML writes it."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=WIDTH).removesuffix("...\n").strip()


if __name__ == "__main__":
    print(serve_config(*sys.argv[1:2]), end="")
