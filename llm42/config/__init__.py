"""The one typed configuration tree, a file a section: read from YAML or a mapping, validated once, printed at
start. helm/serve_config.py writes serve_config.yaml from it, helm/generate.py the chart's schema."""

from llm42.config.audit import AuditSettings as AuditSettings
from llm42.config.engine import CanonicalSettings as CanonicalSettings
from llm42.config.engine import EngineSettings as EngineSettings
from llm42.config.engine import VllmSettings as VllmSettings
from llm42.config.model import ModelSettings as ModelSettings
from llm42.config.server import ApiKeySettings as ApiKeySettings
from llm42.config.server import ServerSettings as ServerSettings
from llm42.config.session import SessionSettings as SessionSettings
from llm42.config.telemetry import TelemetrySettings as TelemetrySettings
from llm42.config.tree import BY_OTHERS as BY_OTHERS
from llm42.config.tree import Settings as Settings
from llm42.config.verifier import GPU_DEFAULTS as GPU_DEFAULTS
from llm42.config.verifier import VerifierSettings as VerifierSettings
from llm42.config.watch import LEASE_MARGIN_S as LEASE_MARGIN_S
from llm42.config.watch import WatchSettings as WatchSettings
