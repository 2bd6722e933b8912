"""serve_config.yaml and its variants, from the settings tree: names and defaults of the fields, descriptions
as comments.

python helm/serve_config.py > serve_config.yaml
python helm/serve_config.py canonical > serve_config.canonical.yaml
python helm/serve_config.py gpu > serve_config.gpu.yaml
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from llm42.config import BY_OTHERS, Settings
from llm42.config.section import TEST_PLANT, Section

WIDTH = 120
IN_HTTP_OPTIONS = ("server.host", "server.port")


class Variant(NamedTuple):
    """A file: what it is for, and where it differs from the defaults."""

    topic: str
    own: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """Section -> its fields that are not at their defaults."""
    note: str = ""
    """What to do before the start."""

    @property
    def names(self) -> list[str]:
        """The dotted names of these fields."""
        return [f"{section}.{name}" for section, values in self.own.items() for name in values]


VARIANTS = {
    "": Variant("The configuration of the service, as Ray Serve reads it:"),
    "canonical": Variant(
        "The service in the canonical layout: no fast path, verifiers decode every request.",
        {"engine": {"kind": "canonical"}},
    ),
    "gpu": Variant(
        "The service on one NVIDIA GPU: vLLM as the fast path, and a verifier beside it.",
        {
            "model": {"path": "/models/model", "device": "cuda", "max_model_len": 8192},
            "engine": {"kind": "vllm"},
        },
        "Set model.path to yours; all else may stay. Not at their defaults: model.path, model.device,"
        " model.max_model_len, engine.kind. What is null follows from model.device or model.path. On a"
        " Hopper GPU verifier.affinity may be vllm, which keeps rollbacks rare. The GPU holds the weights"
        " twice, under engine.vllm.gpu_memory_utilization and beside it: a smaller GPU may need another"
        " share (docs/vllm.md).",
    ),
}
HEAD = """\
# {topic}
#   one machine:   llm42 serve --config {file}{make}
#   a Ray cluster: serve deploy {file}
# Generated from the settings tree (llm42/config/): python helm/serve_config.py {variant}> {file}
{note}\
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


def serve_config(name: str = "") -> str:
    """The file's text. name: of VARIANTS."""
    variant = VARIANTS[name]
    settings = Settings.load(dict(variant.own))
    own = ", ".join(variant.names) if len(variant.names) < 2 else "the fields named above"
    words = {
        "topic": variant.topic,
        "file": f"serve_config.{name}.yaml" if name else "serve_config.yaml",
        "make": "" if name else "     (what `make run` does)",
        "variant": f"{name} " if name else "",
        "note": "".join(f"{line}\n" for line in _comment(variant.note, "")),
        "beside": f", and {own}" if own else "",
    }
    lines = [HEAD.format(**words, host=settings.server.host, port=settings.server.port).rstrip()]
    for section in Settings.model_fields:
        lines += [*_section(section, getattr(settings, section), " " * 6), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, section: Section, indent: str) -> Iterator[str]:
    """The lines of a section at its defaults. path: its dotted name."""
    yield from _comment(inspect.getdoc(type(section)), indent)
    yield f"{indent}{path.split('.')[-1]}:"
    indent += "  "
    for name, info in type(section).model_fields.items():
        value, inner = getattr(section, name), f"{path}.{name}"
        if isinstance(value, Section):
            yield from _section(inner, value, indent)
        elif inner not in IN_HTTP_OPTIONS and TEST_PLANT not in info.metadata:
            yield from _comment(info.description, indent)
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
