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
    """The canonical verifier: its tokens are the deterministic output."""

    kv_tokens: PositiveInt | None = 16384
    """KV cache of a verifier, in tokens. null: by model.device, 16384 on a CPU, 131072 on a GPU, where
    engine.kind canonical takes what is left under gpu_memory_utilization instead."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of the GPU's memory that may be in use, by whomever, once a verifier has started: where kv_tokens
    is to be what is left."""
    block_size: PositiveInt = Field(16, json_schema_extra=or_null)
    """Tokens of a KV block. null: by model.device, 16 on a CPU, 64 on a GPU."""
    buckets: tuple[int, ...] = Field((8, 16, 24, 32, 48, 64, 96, 128), json_schema_extra=or_null)
    """Step sizes, in rows. Certification keeps those that give the same bits on this machine. null: by
    model.device, [8, 16, 24, 32, 48, 64, 96, 128] on a CPU; on a GPU [1, 2, 4, 8, 16, 24, 32, 48, 64], from
    there by 32 to 256, by 64 to 512, and 1024."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads. Part of the fingerprint: another number may give other bits."""
    affinity: Literal["none", "vllm"] = "none"
    """Whose bits the canonical ones shall be, so that little is rolled back. vllm: those of vLLM's
    compiled decode on a Hopper GPU, which then runs without cuBLAS workspace as verifiers do. Where a few
    requests are decoded vLLM splits their contexts, and some of their tokens are rolled back. none: the
    fastest kernels."""
    logits_dtype: Literal["auto", "float32", "activation"] = "auto"
    """activation: logits are rounded to model.dtype before anything else, as vLLM does unless its
    head_dtype is float32. auto: activation with affinity vllm, else float32."""
    gpus: PositiveFloat = Field(0.1, json_schema_extra=or_null)
    """GPUs that Ray reserves for a verifier, when model.device is cuda. null: 0.1, beside a replica; all of
    one (1) with engine.kind canonical."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Other Ray resources that a verifier needs: they decide which nodes it may be on."""
    target_queue_s: PositiveFloat = 0.5
    """Seconds that windows may wait. Beyond it replicas admit less, and verifiers are added
    (server.max_verifiers)."""
    target_load: PositiveShare = 0.9
    """Share of a verifier's places (requests that it decodes by itself, against the rows of its largest step)
    and of its KV that may be in use. Beyond it new requests go to others; where it is so with all, replicas
    let fewer and fewer run who need one (but one each), and verifiers are added."""
    target_step_s: PositiveFloat = Field(5.0, json_schema_extra=or_null)
    """Seconds that a verifier's steps may take on average in which several requests are decoded: each gets a
    token per step. Beyond it, as with target_load, unless less than a quarter of the places and of the KV is
    in use. null: by model.device, 5 on a CPU, 0.25 on a GPU."""
    idle_s: PositiveFloat = 120.0
    """KV of a request that has sent no window for so many seconds is freed (its replica may have died)."""
    scale_down_s: PositiveFloat = 120.0
    """An added verifier is given up after so many seconds in which the others could have done its work too,
    well within these targets. It goes on with the requests that it has."""
    audit_share: Share = 0.01
    """This share of the computed rows is computed again by another verifier, from a cold cache, and compared
    bit by bit: with this probability a window alone, or the whole of an answer that a verifier decoded by
    itself, at its end."""
    max_waiting: PositiveInt = 256
    """Windows that may wait; beyond it the verifier says that it is overloaded. Requests that it decodes by
    itself are none of them once they have begun, also when they wait for KV again."""
    certificate_dir: str | None = ".cache/certificates"
    """Where certificates are kept, so that a restart need not certify again; null: never kept."""

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
