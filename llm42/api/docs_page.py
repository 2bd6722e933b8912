"""GET /docs: the OpenAPI document as one page, without scripts and without anything from another host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "td,th{text-align:left;padding:.2em 1em .2em 0;vertical-align:top}code{font-size:.95em}"
)


def page(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: its operations, and the fields of their bodies."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = "".join(
        _operation(document, method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>The same as a document for programs:"
        f' <a href="openapi.json">openapi.json</a>.</p>{parts}</body></html>'
    )


def _operation(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    text = escape(operation.get("description", ""))
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    rows = "".join(_rows(document, content["schema"])) if content else ""
    table = f"<table><tr><th>field</th><th>values</th><th></th></tr>{rows}</table>" if rows else ""
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{text}</p>{table}"


def _rows(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    name = schema.get("$ref", "").rpartition("/")[2]
    body = document["components"]["schemas"][name] if name else schema
    for name, field in body.get("properties", {}).items():
        needed = "required" if name in body.get("required", ()) else escape(field.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field))}</td><td>{needed}</td></tr>"


def _kind(field: Mapping[str, Any]) -> str:
    """A field's type in words: `integer (0 to 20)`, `string or array`."""
    if forms := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(f) for f in forms if f.get("type") != "null"))
    if choices := field.get("enum"):
        return " | ".join(map(str, choices))
    if name := field.get("$ref", "").rpartition("/")[2]:
        return str(name)
    least = field.get("minimum", field.get("exclusiveMinimum"))
    bounds = [f"from {least:g}"] if least is not None else []
    bounds += [f"to {field['maximum']:g}"] if "maximum" in field else []
    return str(field.get("type", "any")) + (f" ({' '.join(bounds)})" if bounds else "")
