"""Settings of the verifiers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from llm42.config.section import PositiveShare, Section, Share, or_null

GPU_DEFAULTS: dict[str, Any] = {
    "block_size": 64,
    # close together where decoding is: one request more must not make all pay for the next power of two
    "buckets": (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), 1024),
    "kv_tokens": 131072,
    "target_step_s": 0.25,
}
"""verifier.* where model.device is cuda and the configuration does not say otherwise, or says null; on a CPU
null is the field's default."""


class VerifierSettings(Section):
    """The canonical verifier: deterministic output consists of its tokens."""

    kv_tokens: PositiveInt | None = 16384
    """KV cache of a verifier, in tokens. null: 16384 on a CPU, 131072 on a GPU, and with engine.kind
    canonical on a GPU what is left under gpu_memory_utilization. Raise it if requests wait for KV."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of the GPU's memory (0 to 1) that all processes together may use once a verifier has started. It
    counts only where kv_tokens takes what is left."""
    block_size: PositiveInt = Field(16, json_schema_extra=or_null)
    """Tokens in a KV block. null: 16 on a CPU, 64 on a GPU."""
    buckets: tuple[int, ...] = Field((8, 16, 24, 32, 48, 64, 96, 128), json_schema_extra=or_null)
    """Step sizes, in rows; a step is padded to the next one. Certification keeps those that give the same
    bits on this machine. null: on a CPU [8, 16, 24, 32, 48, 64, 96, 128]; on a GPU [1, 2, 4, 8, 16, 24, 32,
    48, 64], from there every 32 to 256, every 64 to 512, and 1024."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of a verifier. Part of the fingerprint: another number may give other bits."""
    affinity: Literal["none", "vllm"] = "none"
    """Which engine's arithmetic the verifier reproduces, to keep rollbacks rare. none: the fastest kernels.
    vllm: vLLM's compiled decode on a Hopper GPU; vLLM then runs without a cuBLAS workspace, as verifiers do.
    With few requests vLLM splits their contexts, and some of their tokens are rolled back."""
    logits_dtype: Literal["auto", "float32", "activation"] = "auto"
    """Rounding of the logits before sampling. activation: to model.dtype, as vLLM does unless its head_dtype
    is float32. float32: none. auto: activation with affinity vllm, otherwise float32."""
    gpus: PositiveFloat = Field(0.1, json_schema_extra=or_null)
    """GPUs that Ray reserves for a verifier where model.device is cuda. null: 0.1, which fits beside a
    replica; with engine.kind canonical 1, a whole GPU."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Other Ray resources that a verifier needs, name -> amount. They decide on which nodes verifiers may be
    placed."""
    target_queue_s: PositiveFloat = 0.5
    """Seconds that windows may wait in a verifier's queue. Above it replicas admit fewer deterministic
    requests, and verifiers are added (server.max_verifiers)."""
    target_load: PositiveShare = 0.9
    """Share (above 0, to 1) of a verifier's places (requests that it decodes by itself, against the rows of
    its largest step) and of its KV that may be in use. Above it new requests go to other verifiers. If all
    are above it, replicas admit fewer requests (at least one each), and verifiers are added."""
    target_step_s: PositiveFloat = Field(5.0, json_schema_extra=or_null)
    """Average seconds that a verifier's step may take while it decodes several requests, each of which gets a
    token per step. Above it the same happens as above target_load, unless less than a quarter of the places
    and of the KV is in use. null: 5 on a CPU, 0.25 on a GPU."""
    idle_s: PositiveFloat = 120.0
    """Seconds without a window after which the KV of a request is freed, because its replica may have
    died."""
    scale_down_s: PositiveFloat = 120.0
    """Seconds that the other verifiers must have been able to do an added verifier's work, well within these
    targets, before it is removed. It finishes the requests that it has."""
    audit_share: Share = 0.01
    """Share (0 to 1) of the computed rows that another verifier computes again, from a cold cache, and
    compares bit by bit. A window is chosen with this probability; an answer that a verifier decoded by itself
    is checked as a whole, at its end. Raise it for more certainty; it costs its share of the verifiers'
    time."""
    max_waiting: PositiveInt = 256
    """Windows that may wait in a verifier's queue; above it the verifier answers that it is overloaded.
    Requests that it decodes by itself do not count once they have begun, even while they wait for KV."""
    certificate_dir: str | None = ".cache/certificates"
    """Directory in which certificates are kept, so that a restart need not certify again. null: they are not
    kept."""

    @property
    def rounds_logits(self) -> bool:
        """Whether logits are rounded to the activation dtype: what `auto` comes to."""
        if self.logits_dtype == "auto":
            return self.affinity == "vllm"
        return self.logits_dtype == "activation"

    @model_validator(mode="after")
    def _sorted(self) -> VerifierSettings:
        if list(self.buckets) != sorted(set(self.buckets)) or not self.buckets or self.buckets[0] < 1:
            raise ValueError("verifier.buckets must be row counts above 0, in rising order, each once")
        return self
