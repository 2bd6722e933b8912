"""The whole tree, and what holds across its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from llm42.config.audit import AuditSettings
from llm42.config.engine import EngineSettings, has_no_engine
from llm42.config.model import ModelSettings
from llm42.config.section import Section
from llm42.config.server import ServerSettings
from llm42.config.session import SessionSettings
from llm42.config.telemetry import TelemetrySettings
from llm42.config.verifier import GPU_DEFAULTS, VerifierSettings
from llm42.config.watch import WatchSettings
from llm42.config.yaml_file import read_yaml

BY_OTHERS = (*(f"verifier.{name}" for name in GPU_DEFAULTS), "verifier.gpus", "session.mode", "model.name")
"""Settings that others decide, model.device, engine.kind or model.path, where they are null."""


class Settings(Section):
    """The whole tree."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    verifier: VerifierSettings = VerifierSettings()
    session: SessionSettings = SessionSettings()
    watch: WatchSettings = WatchSettings()
    server: ServerSettings = ServerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    audit: AuditSettings = AuditSettings()

    @model_validator(mode="after")
    def _on_a_gpu(self) -> Settings:
        if self.model.device == "cuda":
            return self
        if self.engine.vllm.structured_outputs:  # vLLM's CPU build ends them with an error of its own
            raise ValueError("engine.vllm.structured_outputs needs model.device 'cuda': leave it at false")
        if (wanted := self.verifier.affinity) != "none":
            raise ValueError(f"verifier.affinity {wanted!r} needs model.device 'cuda': leave it at 'none'")
        return self

    @model_validator(mode="after")
    def _without_engine(self) -> Settings:
        kv_tokens, longest = self.verifier.kv_tokens, self.model.max_model_len
        if kv_tokens is None and (self.engine.decodes or self.model.device != "cuda"):
            raise ValueError(
                "verifier.kv_tokens null takes what is left of a GPU that a verifier has to itself: it needs"
                " engine.kind canonical and model.device cuda. Set a number of tokens"
            )
        if self.engine.decodes:
            return self
        if self.session.mode != "direct":
            raise ValueError(
                f"session.mode {self.session.mode!r} needs a fast path, and engine.kind canonical has none:"
                " leave session.mode at null, or set engine.kind to torch or vllm"
            )
        if not self.server.verifiers:
            raise ValueError(
                "with engine.kind canonical the verifiers decode every request: set server.verifiers to 1 or"
                " more, or engine.kind to torch or vllm"
            )
        if kv_tokens is not None and kv_tokens < longest:
            raise ValueError(
                f"verifier.kv_tokens {kv_tokens} does not hold one request of model.max_model_len {longest},"
                " and with engine.kind canonical nothing else decodes: raise the one or lower the other"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _by_device_and_layout(cls, data: Any) -> Any:
        """Other defaults, where the configuration does not say otherwise or says null: a GPU's verifier wants
        other step and block sizes than a CPU's, and one that has the GPU to itself all that is left of it."""
        if not isinstance(data, dict):
            return data
        on_gpu = _said(data.get("model"), "device") == "cuda"
        alone = has_no_engine(_said(data.get("engine"), "kind"))
        verifier = GPU_DEFAULTS if on_gpu else {}
        if on_gpu and alone:
            verifier = verifier | {"kv_tokens": None, "gpus": 1.0}
        session = {"mode": "direct"} if alone else {}
        return data | _with(data, "verifier", verifier) | _with(data, "session", session)

    @classmethod
    def load(cls, source: str | Path | dict[str, Any] | None) -> Settings:
        """Reads a YAML file or takes a mapping; None gives the defaults. Errors name the field; YamlProblem
        names the file."""
        if source is None:
            return cls()
        return cls.model_validate(source if isinstance(source, dict) else read_yaml(Path(source)))


def _said(section: Any, name: str) -> Any:
    """A field's value in a section of a configuration, which may be checked already; None if none is said."""
    return section.get(name) if isinstance(section, dict) else getattr(section, name, None)


def _with(data: dict[str, Any], name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The section with these defaults, null being no value of those that have one by device or layout. One
    that is checked already stays as it is."""
    section = data.get(name, {})
    if not isinstance(section, dict):
        return {}
    told = {k: v for k, v in section.items() if v is not None or f"{name}.{k}" not in BY_OTHERS}
    return {name: defaults | told}
