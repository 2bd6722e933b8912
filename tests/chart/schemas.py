"""Validation without a cluster: core kinds, the RayService CRD, the Prometheus operator's, HTTPRoute."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.chart.helm import ROOT

KUBERNETES = ("1.29", "1.34")
"""Schemas of the oldest and the newest version that we look at."""
CRD = ROOT.parent / "shared" / "kuberay" / "rayservices-crd.yaml.gz"


def check_core(body: dict[str, Any]) -> None:
    """Raises when a core object has a wrong or unknown field."""
    for version in KUBERNETES:
        kubernetes_validate.validate(body, version, strict=True)


def check_prometheus(body: dict[str, Any]) -> None:
    """The models accept unknown fields and drop them: what comes back must be what went in."""
    from cloudcoil.models.prometheus_operator import v1

    model = getattr(v1, body["kind"])
    back = model.model_validate(body).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert back == body, f"unknown fields: {back} against {body}"


DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _only(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _text(longest: int = 253) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


HTTP_ROUTE = _only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "gateway.networking.k8s.io/v1"},
    kind={"const": "HTTPRoute"},
    metadata={"type": "object"},
    spec=_only(
        parentRefs=_list(
            _only(
                ("name",),
                group={"type": "string", "maxLength": 253},
                kind=_text(63),
                namespace=_text(63),
                name=_text(),
                sectionName=_text(),
                port={"type": "integer", "minimum": 1, "maximum": 65535},
            ),
            32,
        ),
        hostnames=_list(
            {
                "type": "string",
                "maxLength": 253,
                "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9-]+)*$",
            },
            16,
        ),
        rules=_list(
            _only(
                matches=_list(
                    _only(
                        path=_only(
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value={"type": "string", "maxLength": 1024, "pattern": "^/"},
                        )
                    ),
                    64,
                ),
                timeouts=_only(request=DURATION, backendRequest=DURATION),
                backendRefs=_list(
                    _only(
                        ("name", "port"),
                        name=_text(),
                        port={"type": "integer", "minimum": 1, "maximum": 65535},
                        weight={"type": "integer", "minimum": 0},
                    ),
                    16,
                ),
            ),
            16,
        ),
    ),
)
"""Of Gateway API v1 what the chart uses, from its reference: no package for Python has its schemas."""


def check_http_route(body: dict[str, Any]) -> None:
    """Raises ValueError when an HTTPRoute has a wrong or unknown field."""
    validator = jsonschema.Draft202012Validator(HTTP_ROUTE)
    if wrong := [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(body)]:
        raise ValueError("\n".join(wrong))


def check(body: dict[str, Any]) -> None:
    """Raises when any object that the chart renders is not valid; a kind that nothing knows is an error."""
    group = body["apiVersion"].rpartition("/")[0]
    if group == "monitoring.coreos.com":
        check_prometheus(body)
    elif group == "gateway.networking.k8s.io":
        check_http_route(body)
    elif group == "ray.io":
        if crd_there():
            check_ray_service(body)
    else:
        check_core(body)


@functools.cache
def ray_service_crd() -> dict[str, Any]:
    """KubeRay's definition of a RayService."""
    document: dict[str, Any] = yaml.load(gzip.decompress(CRD.read_bytes()), yaml.CSafeLoader)
    return document


@functools.cache
def _ray_service() -> tuple[jsonschema.Draft202012Validator, dict[str, Any]]:
    document = ray_service_crd()
    (version,) = [v for v in document["spec"]["versions"] if v["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(_strict(schema)), schema


def check_ray_service(body: dict[str, Any]) -> None:
    """Raises ValueError with every complaint of the CRD's schema. CEL rules are not evaluated."""
    validator, schema = _ray_service()
    wrong = [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(_with_defaults(body, schema))]
    wrong += _duplicates(body, schema, "$")
    if wrong:
        raise ValueError("\n".join(wrong))


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI as JSON schema: unknown fields are errors, and either type will do where Kubernetes says so."""
    made: dict[str, Any] = {k: v for k, v in schema.items() if not k.startswith("x-") and k != "default"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if "properties" in schema:
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        made["items"] = _strict(schema["items"])
    return made


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """The API server fills defaults in before it looks for required fields."""
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        filled = {name: s["default"] for name, s in known.items() if "default" in s} | value
        return {name: _with_defaults(v, known.get(name, {})) for name, v in filled.items()}
    if isinstance(value, list) and "items" in schema:
        return [_with_defaults(v, schema["items"]) for v in value]
    return value


def _duplicates(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Lists that the API server keys by a field may hold each key once."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _duplicates(child, schema.get("properties", {}).get(name, {}), f"{path}.{name}")
    elif isinstance(value, list):
        if keys := schema.get("x-kubernetes-list-map-keys"):
            seen = [tuple(str(item.get(k)) for k in keys) for item in value]
            yield from (f"{path}: {k} stands there twice" for k in {k for k in seen if seen.count(k) > 1})
        for i, child in enumerate(value):
            yield from _duplicates(child, schema.get("items", {}), f"{path}[{i}]")


def crd_there() -> bool:
    """Whether the CRD can be read: it is KubeRay's, and not part of this repository."""
    return Path(CRD).is_file()
