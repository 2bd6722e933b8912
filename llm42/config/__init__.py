"""The one typed configuration tree: read from YAML or a mapping, validated once, printed at start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llm42.config.yaml_file import read_yaml
from llm42.host.cores import usable_cores


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Section):
    """Which model is served and in which arithmetic."""

    path: str = Field(
        ".models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", description="GGUF file or HF directory"
    )
    name: str = Field("SmolLM2-135M-Instruct", description="name in the API")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="activation dtype; weights are rounded to it. On CPU, products run in float32"
    )
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = Field(2048, ge=16, description="longest prompt plus output, in tokens")
    chat_template: str | None = Field(
        None,
        description="a Jinja file: the chat template instead of the model's own; null: the model's",
    )


class VllmSettings(_Section):
    """The fast path on vLLM (`engine.kind: vllm`). The torch engine's fields do not apply to it."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None, description="vLLM's dtype; null: model.dtype. Candidates agree best when it is the same"
    )
    gpu_memory_utilization: float = Field(
        0.6, gt=0, le=1, description="share of the GPU for vLLM; a verifier beside it needs the rest"
    )
    max_num_seqs: int = Field(256, gt=0, description="requests decoded together")
    max_num_batched_tokens: int | None = Field(
        None, gt=0, description="most tokens in one step; null: vLLM's default"
    )
    tensor_parallel_size: int = Field(1, gt=0, description="GPUs of a replica")
    enforce_eager: bool = Field(
        False, description="no compilation, no CUDA graphs: starts faster, runs slower"
    )
    custom_ops: tuple[str, ...] = Field(
        (), description="vLLM's compilation custom_ops, such as '+rms_norm': operators that are not compiled"
    )
    sampled_agreement: bool = Field(
        False,
        description="deterministic requests that do not decode greedily propose the canonical sampler's"
        " tokens, through a logits processor; it is engine-wide and may change vLLM's model runner",
    )
    structured_outputs: bool = Field(
        False,
        description="best-effort requests may ask for JSON (response_format); GPUs only",
    )
    stall_s: float = Field(
        300.0, gt=0, description="an engine with requests that says nothing for so long is taken for dead"
    )
    export_dir: str = Field(
        ".cache/exports", description="where a GGUF file is kept in the form that vLLM reads"
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict,
        description="more arguments of vLLM's AsyncEngineArgs; they override the above, and what the service"
        " depends on is refused",
    )


class EngineSettings(_Section):
    """The fast path."""

    kind: Literal["torch", "vllm"] = Field("torch", description="torch: built in; vllm: needs llm42[vllm]")
    vllm: VllmSettings = VllmSettings()
    kv_tokens: int = Field(16384, gt=0, description="KV cache of a replica, in tokens")
    block_size: int = Field(16, gt=0)
    max_batch: int = Field(32, gt=0, description="requests decoded together")
    prefill_chunk: int = Field(256, gt=0, description="most prompt tokens in one step")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0: half the cores, at least 1")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources a replica needs besides: which nodes it may be on"
    )
    gpus: float = Field(
        0.9, gt=0, description="GPUs that Ray reserves for a replica, when model.device is cuda"
    )
    corrupt_share: float = Field(0.0, ge=0, le=1, description="test plant: share of candidates made wrong")


def _or_null(schema: dict[str, Any]) -> None:
    """The schema of a field whose null `Settings` replaces."""
    alone = {key: schema.pop(key) for key in set(schema) - {"title", "description", "default"}}
    schema["anyOf"] = [alone, {"type": "null"}]


class VerifierSettings(_Section):
    """The canonical verifier."""

    kv_tokens: int = Field(
        16384,
        gt=0,
        description="KV cache of a verifier, in tokens; null: 16384 on a CPU, 131072 on a GPU",
        json_schema_extra=_or_null,
    )
    block_size: int = Field(
        16, gt=0, description="tokens of a KV block; null: 16 or 64", json_schema_extra=_or_null
    )
    buckets: tuple[int, ...] = Field(
        (8, 16, 24, 32, 48, 64, 96, 128),
        description="step sizes, in rows; null: 8 to 128 on a CPU, 1 to 1024 on a GPU",
        json_schema_extra=_or_null,
    )
    threads: int = Field(1, ge=1, description="CPU threads; part of the fingerprint")
    affinity: Literal["none", "vllm"] = Field(
        "none",
        description="whose bits the canonical ones shall be, so that little is rolled back. vllm: those of"
        " vLLM's compiled decode on Hopper; none: the fastest kernels",
    )
    logits_dtype: Literal["auto", "float32", "activation"] = Field(
        "auto",
        description="activation: logits are rounded to model.dtype before anything else, as vLLM does unless"
        " its head_dtype is float32. auto: activation with affinity vllm, else float32",
    )
    gpus: float = Field(
        0.1, gt=0, description="GPUs that Ray reserves for a verifier, when model.device is cuda"
    )
    target_queue_s: float = Field(
        0.5, gt=0, description="queue time of windows above which less is admitted and verifiers are added"
    )
    idle_s: float = Field(
        120.0, gt=0, description="KV of a request that has sent no window for this long is freed"
    )
    scale_down_s: float = Field(
        120.0, gt=0, description="a verifier is given up after its kind was idle for this long"
    )
    audit_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of windows that another verifier computes again, from a cold cache",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources a verifier needs besides: which nodes it may be on"
    )
    max_waiting: int = Field(
        256, gt=0, description="windows that may wait; beyond it the verifier says overloaded"
    )
    certificate_dir: str | None = Field(
        ".cache/certificates", description="where certificates are kept; None: never"
    )

    @property
    def rounds_logits(self) -> bool:
        """Whether logits are rounded to the activation dtype: what `auto` comes to."""
        if self.logits_dtype == "auto":
            return self.affinity == "vllm"
        return self.logits_dtype == "activation"

    @model_validator(mode="after")
    def _sorted(self) -> VerifierSettings:
        if list(self.buckets) != sorted(set(self.buckets)) or not self.buckets or self.buckets[0] < 1:
            raise ValueError("verifier.buckets must be distinct positive row counts in rising order")
        return self


GPU_DEFAULTS: dict[str, Any] = {
    "block_size": 64,
    "buckets": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    "kv_tokens": 131072,
}
"""verifier.* where model.device is cuda and the configuration does not say otherwise, or says null; on a CPU
null is the field's default."""


class SessionSettings(_Section):
    """The decode-verify-rollback session."""

    min_window: int = Field(7, gt=0, description="shortest target length of a window, in candidates")
    max_window: int = Field(63, gt=0, description="longest window")
    start_window: int = Field(15, gt=0, description="target length before acceptance is known")
    lookahead: int = Field(128, gt=0, description="candidates that may be ahead of the last commit")
    commit_deadline_s: float = Field(
        0.5, gt=0, description="a window is sent when the last commit is older than this"
    )
    verify_timeout_s: float = Field(
        60.0, gt=0, description="a verify call without an answer for this long is retried"
    )
    verify_attempts: int = Field(
        4,
        gt=0,
        description="tries of one window that are left unanswered before the request ends with an error; a"
        " verifier that is dead or full is asked again for as long as they may take",
    )

    @model_validator(mode="after")
    def _order(self) -> SessionSettings:
        if not self.min_window <= self.start_window <= self.max_window <= self.lookahead:
            raise ValueError("session: need min_window <= start_window <= max_window <= lookahead")
        return self


LEASE_MARGIN_S = 14.0
"""What a hung supervisor's successor needs to be noticed missing, to start and to ask the verifiers."""


class WatchSettings(_Section):
    """How long a process may be silent before another one takes its place."""

    verifier_s: float = Field(
        60.0, gt=0, description="a verifier that was ready and does not answer for so long is replaced"
    )
    verifier_start_s: float = Field(
        900.0,
        gt=0,
        description="the same before it is ready: it may wait for a device, or load what is large",
    )
    supervisor_s: float = Field(
        12.0, gt=0, description="a supervisor that does not answer a replica for so long is replaced"
    )
    supervisor_start_s: float = Field(
        120.0, gt=0, description="the same before it has answered that replica at all"
    )
    lease_s: float = Field(
        30.0,
        gt=0,
        description="a verifier that nobody asks how it is for so long ends itself, a supervisor after half"
        f" of it; at least {LEASE_MARGIN_S:.0f} s more than supervisor_s",
    )

    @model_validator(mode="after")
    def _successor_in_time(self) -> WatchSettings:
        if self.lease_s < self.supervisor_s + LEASE_MARGIN_S:
            raise ValueError(
                f"watch.lease_s must be at least {LEASE_MARGIN_S:.0f} s more than watch.supervisor_s:"
                " verifiers must not end while a hung supervisor is being replaced"
            )
        return self


class ApiKeySettings(_Section):
    """A key that clients authenticate with, and what its requests may do."""

    name: str = Field(min_length=1, description="what logs and errors call it")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal digits")
    deterministic_default: bool | None = Field(
        None, description="what a request without the field gets; null: server.deterministic_default"
    )
    deterministic_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the deterministic places that it may hold at once; 0: no determinism",
    )


Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*]+)$")]


class ServerSettings(_Section):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    deterministic_default: bool = Field(False, description="what a request without the field gets")
    default_seed: int = Field(
        42, description="seed of a deterministic request that names none; echoed in the reply"
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path under which a proxy in front publishes the API, such as /llm; paths with it are"
        " answered too",
    )
    api_keys: tuple[ApiKeySettings, ...] = Field(
        (), description="keys of which a request must present one; none: nobody is asked for a key"
    )
    cors_origins: tuple[Origin, ...] = Field(
        (), description="pages (https://HOST[:PORT]) whose scripts may use the API; '*': all; none: no page"
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="a request whose body is not there by then is refused"
    )
    heartbeat_s: float = Field(
        10.0,
        ge=0,
        description="a stream that has had nothing to send for this long sends a comment, and its head before"
        " that; 0: never",
    )
    max_queued: int = Field(256, gt=0, description="requests a replica holds; beyond it 429")
    deterministic_share: float = Field(
        0.5, gt=0, le=1, description="share of a replica's places for deterministic requests while both wait"
    )
    failover_s: float = Field(
        60.0, ge=0, description="how long a stream waits for another replica to go on with it; 0: never"
    )
    resume_best_effort: bool = Field(
        False, description="whether a best-effort stream goes on elsewhere too, with some continuation"
    )
    drain_s: float = Field(
        120.0, gt=0, description="how long a replica that is being replaced may finish its streams"
    )
    ready_when: Literal["serving", "certified"] = Field(
        "serving", description="certified: a new replica joins only once a verifier is ready (or has failed)"
    )
    ingress_replicas: int = Field(1, gt=0)
    fastpath_replicas: int = Field(1, gt=0)
    max_fastpath_replicas: int = Field(
        0, ge=0, description="above fastpath_replicas: replicas are added and removed by load"
    )
    target_ongoing_requests: float = Field(
        16.0, gt=0, description="requests per replica that the scaling of replicas aims at"
    )
    verifiers: int = Field(1, ge=0, description="0: deterministic requests are refused")
    max_verifiers: int = Field(0, ge=0, description="above verifiers: verifiers are added by queue time")
    stream_interval_s: float = Field(
        0.05,
        ge=0,
        description="best-effort tokens are sent at most this often, less often with many streams or where"
        " the client waits for the whole; 0: each at once",
    )


class TelemetrySettings(_Section):
    """What the service says of itself: metrics, logs, traces."""

    metrics_port: int = Field(
        0, ge=0, le=65535, description="port of the metrics page of `llm42 serve`; 0: 8090, or a free one"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="from which level on; info has a line for each request"
    )
    log_prompts: bool = Field(False, description="whether that line has the prompt's text")
    traces: Literal["off", "file", "otlp"] = Field(
        "off",
        description="OpenTelemetry spans of requests, windows and verify calls. file: JSON lines in"
        " trace_dir; otlp: to trace_endpoint (needs llm42[otlp])",
    )
    trace_dir: str = Field(".cache/traces", description="where traces: file writes, a file a process")
    trace_endpoint: str = Field(
        "http://127.0.0.1:4318/v1/traces", description="where traces: otlp sends to (OTLP over HTTP)"
    )
    trace_share: float = Field(
        1.0, ge=0, le=1, description="share of requests traced, unless the client's traceparent decides"
    )


class AuditSettings(_Section):
    """Receipts and audits (docs/audits.md)."""

    keys: dict[str, str] = Field(
        default_factory=dict,
        description="key id -> file with a secret of 16 bytes or more, which signs and checks receipts",
    )
    signing_key: str | None = Field(
        None, description="id of the key that signs new receipts; null: they are not signed"
    )
    batch_tokens: int = Field(
        4096, gt=0, description="tokens that an audit sends to a verifier in one call (at least one answer)"
    )
    concurrency: int = Field(
        2,
        gt=0,
        description="such calls at a time: what audits may take of the verifiers; answers that are generated"
        " again: eight times as many",
    )
    max_window: int = Field(
        2048, gt=0, description="longest window of an audit, in candidates; a longer answer takes several"
    )
    max_records: int = Field(
        1000, ge=32, description="most records, and most answers in them, in one call of POST /v1/audit"
    )

    @model_validator(mode="after")
    def _known_key(self) -> AuditSettings:
        if self.signing_key is not None and self.signing_key not in self.keys:
            raise ValueError(f"audit.signing_key {self.signing_key!r} is not one of audit.keys")
        return self


class Settings(_Section):
    """The whole tree."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    verifier: VerifierSettings = VerifierSettings()
    session: SessionSettings = SessionSettings()
    watch: WatchSettings = WatchSettings()
    server: ServerSettings = ServerSettings()
    audit: AuditSettings = AuditSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _structured(self) -> Settings:
        # vLLM's CPU build ends constrained requests with an error of its own
        if self.engine.vllm.structured_outputs and self.model.device != "cuda":
            raise ValueError("engine.vllm.structured_outputs needs model.device 'cuda'")
        return self

    @model_validator(mode="after")
    def _affinity(self) -> Settings:
        if self.verifier.affinity != "none" and self.model.device != "cuda":
            raise ValueError(
                f"verifier.affinity {self.verifier.affinity!r} needs model.device 'cuda': leave it at 'none'"
            )
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


def engine_threads(settings: EngineSettings) -> int:
    """The engine's thread count: as configured, or half of the cores that this process may use, so that a
    verifier has room beside it."""
    return settings.threads or max(1, usable_cores() // 2)
