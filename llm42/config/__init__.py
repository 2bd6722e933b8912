"""The one typed configuration tree, a file a section: read from YAML or a mapping, validated once, printed at
start. helm/serve_config.py writes serve_config.yaml from it, helm/generate.py the chart's schema."""

from llm42.config.audit import AuditSettings
from llm42.config.engine import EngineSettings, VllmSettings
from llm42.config.model import ModelSettings
from llm42.config.server import ApiKeySettings, ServerSettings
from llm42.config.session import SessionSettings
from llm42.config.telemetry import TelemetrySettings
from llm42.config.tree import Settings
from llm42.config.verifier import GPU_DEFAULTS, VerifierSettings
from llm42.config.watch import LEASE_MARGIN_S, WatchSettings

__all__ = [
    "GPU_DEFAULTS",
    "LEASE_MARGIN_S",
    "ApiKeySettings",
    "AuditSettings",
    "EngineSettings",
    "ModelSettings",
    "ServerSettings",
    "SessionSettings",
    "Settings",
    "TelemetrySettings",
    "VerifierSettings",
    "VllmSettings",
    "WatchSettings",
]
