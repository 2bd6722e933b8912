"""Settings of the fast path. What depends on the kind of engine is asked of the properties here, so that only
this file and llm42/engine/build.py know the kinds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from llm42.config.section import TEST_PLANT, PositiveShare, Section, Share
from llm42.host.cores import usable_cores


class VllmSettings(Section):
    """vLLM (`kind: vllm`). Of the other fields of `engine` it uses `gpus` and `resources`."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """null: the model's dtype. Candidates agree best when it is the same."""
    gpu_memory_utilization: PositiveShare = 0.6
    """Share of the GPU's memory for vLLM. A verifier on the same GPU needs the rest."""
    max_num_seqs: PositiveInt = 256
    """Requests decoded together."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens in one step; null: what `vllm serve` has on this device."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of a fast-path replica."""
    enforce_eager: bool = False
    """Without compilation and CUDA graphs: starts faster, runs slower."""
    custom_ops: tuple[str, ...] = ()
    """Operators that vLLM does not compile, such as "+rms_norm" (its compilation custom_ops)."""
    sampled_agreement: bool = False
    """Deterministic requests that do not decode greedily propose the canonical sampler's tokens, through a
    logits processor of ours. It slows such requests down and may change vLLM's model runner for all."""
    structured_outputs: bool = False
    """Best-effort requests may ask for JSON (response_format). On GPUs only; vLLM then loads the tokenizer
    too."""
    stall_s: PositiveFloat = 300.0
    """Seconds after which a vLLM that has requests and says nothing is taken for dead: its replica is
    replaced."""
    export_dir: str = ".cache/exports"
    """vLLM reads no GGUF files: where one is kept in the form that it reads."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM's AsyncEngineArgs; they override the above, and what the service depends on
    is refused."""


class CanonicalSettings(Section):
    """The canonical layout (`kind: canonical`). Of the other fields of `engine` it uses `resources`."""

    max_num_seqs: PositiveInt = 256
    """Requests of a replica that verifiers decode together."""


class EngineSettings(Section):
    """The fast path: what decodes, and proposes candidates to the verifier."""

    kind: Literal["torch", "vllm", "canonical"] = "torch"
    """torch: built in, needs nothing else. vllm: vLLM, for GPUs in production (pip install -e '.[vllm]').
    canonical: no fast path; the verifiers decode every request, best effort too, and have the GPUs."""
    vllm: VllmSettings = VllmSettings()
    canonical: CanonicalSettings = CanonicalSettings()
    kv_tokens: PositiveInt = 16384
    """KV cache of a fast-path replica, in tokens."""
    block_size: PositiveInt = 16
    """Tokens of a KV block."""
    max_batch: PositiveInt = 32
    """Requests decoded together."""
    prefill_chunk: PositiveInt = 256
    """Most prompt tokens in one step."""
    threads: NonNegativeInt = 0
    """CPU threads of a replica's engine; 0: half of the cores, at least one."""
    gpus: PositiveFloat = 0.9
    """GPUs that Ray reserves for a replica, when model.device is cuda (with tensor_parallel_size, of each
    GPU). A verifier fits beside it."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Other Ray resources that a replica needs, such as {fast: 0.01}: they decide which nodes it may be
    on."""
    corrupt_share: Annotated[Share, TEST_PLANT] = 0.0
    """Test plant: this share of the candidates is made wrong. Deterministic output does not change by it."""

    @property
    def decodes(self) -> bool:
        """Whether a replica has an engine. Without one verifiers decode all requests."""
        return not has_no_engine(self.kind)

    @property
    def places(self) -> int:
        """Requests that are decoded together for a replica."""
        most = {
            "torch": self.max_batch,
            "vllm": self.vllm.max_num_seqs,
            "canonical": self.canonical.max_num_seqs,
        }
        return most[self.kind]

    @property
    def gpus_per_replica(self) -> int:
        """GPUs that a replica computes on, when model.device is cuda; Ray reserves `gpus` of each."""
        return {"torch": 1, "vllm": self.vllm.tensor_parallel_size, "canonical": 0}[self.kind]

    @property
    def shares_weights(self) -> bool:
        """Whether it computes in the process that it is built in, with the weights and products it is given;
        else it has a process, weights and products of its own."""
        return self.kind == "torch"

    @property
    def draws_by_seed(self) -> bool:
        """Whether the seed that a best-effort request without one is given would repeat it."""
        return self.kind != "vllm"

    @property
    def takes_schemas(self) -> bool:
        """Whether it can constrain output to JSON."""
        return self.kind == "vllm" and self.vllm.structured_outputs

    @property
    def thread_count(self) -> int:
        """CPU threads: as configured, or half of the cores that this process may use, so that a verifier has
        room beside it; 0 without an engine."""
        return (self.threads or max(1, usable_cores() // 2)) if self.decodes else 0

    @model_validator(mode="after")
    def _something_to_corrupt(self) -> EngineSettings:
        if self.corrupt_share and not self.decodes:
            raise ValueError(
                "engine.corrupt_share makes candidates wrong, and engine.kind canonical has none: set it to 0"
            )
        return self


def has_no_engine(kind: object) -> bool:
    """Whether `engine.kind`, as a configuration has it, leaves all decoding to the verifiers."""
    return kind == "canonical"
