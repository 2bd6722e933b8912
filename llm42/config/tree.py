"""The whole tree, and what holds across its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from llm42.config.audit import AuditSettings
from llm42.config.engine import EngineSettings
from llm42.config.model import ModelSettings
from llm42.config.section import Section
from llm42.config.server import ServerSettings
from llm42.config.session import SessionSettings
from llm42.config.telemetry import TelemetrySettings
from llm42.config.verifier import GPU_DEFAULTS, VerifierSettings
from llm42.config.watch import WatchSettings
from llm42.config.yaml_file import read_yaml


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
            raise ValueError("engine.vllm.structured_outputs needs model.device 'cuda'")
        if (wanted := self.verifier.affinity) != "none":
            raise ValueError(f"verifier.affinity {wanted!r} needs model.device 'cuda': leave it at 'none'")
        return self

    @model_validator(mode="before")
    @classmethod
    def _by_device(cls, data: Any) -> Any:
        """A GPU's verifier wants other step and block sizes than a CPU's."""
        if not isinstance(data, dict):
            return data
        model, verifier = data.get("model"), data.get("verifier", {})
        device = model.get("device") if isinstance(model, dict) else getattr(model, "device", None)
        if not isinstance(verifier, dict):
            return data
        told = {k: v for k, v in verifier.items() if v is not None or k not in GPU_DEFAULTS}
        return data | {"verifier": GPU_DEFAULTS | told if device == "cuda" else told}

    @classmethod
    def load(cls, source: str | Path | dict[str, Any] | None) -> Settings:
        """Reads a YAML file or takes a mapping; None gives the defaults. Errors name the field; YamlProblem
        names the file."""
        if source is None:
            return cls()
        return cls.model_validate(source if isinstance(source, dict) else read_yaml(Path(source)))
