"""Settings of the fast path. What depends on the kind of engine is asked of the properties here, so that only
this file and llm42/engine/build.py know the kinds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from llm42.config.section import TEST_PLANT, PositiveShare, Section, Share
from llm42.host.cores import usable_cores


class VllmSettings(Section):
    """vLLM as the fast path (`kind: vllm`). Of the other fields of `engine` it uses only `gpus` and
    `resources`."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """vLLM's activation dtype. null: model.dtype. Another dtype than the model's causes more rollbacks."""
    gpu_memory_utilization: PositiveShare = 0.6
    """Share of the GPU's memory that vLLM takes (0 to 1). A verifier on the same GPU needs the rest: lower it
    when the verifier runs out of memory, raise it where vLLM has the GPU to itself."""
    max_num_seqs: PositiveInt = 256
    """Most requests of a replica that vLLM decodes together; others wait. Lower it when the KV cache is
    full."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens in one step of vLLM. null: the default of `vllm serve` on this device."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that one fast-path replica is spread over. Raise it for a model that does not fit on one GPU."""
    enforce_eager: bool = False
    """true: vLLM runs without compilation and CUDA graphs, so it starts faster and decodes more slowly."""
    custom_ops: tuple[str, ...] = ()
    """Operators that vLLM does not compile, such as "+rms_norm" (custom_ops of its compilation settings)."""
    sampled_agreement: bool = False
    """true: for deterministic requests that do not decode greedily, a logits processor in vLLM draws as the
    canonical sampler does, so fewer tokens are rolled back. It slows such requests down and may change vLLM's
    model runner for all requests."""
    structured_outputs: bool = False
    """true: best-effort requests may ask for JSON (response_format). On GPUs only; vLLM then loads the
    tokenizer too."""
    stall_s: PositiveFloat = 300.0
    """Seconds without output after which a vLLM that has requests is taken for dead and its replica is
    replaced. Raise it if a single step may take longer."""
    export_dir: str = ".cache/exports"
    """Directory for exported models: vLLM reads no GGUF files, so a GGUF model is converted once and kept
    here."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for vLLM's AsyncEngineArgs, name -> value. They override the settings above. Those
    that the service depends on are refused."""


class CanonicalSettings(Section):
    """The canonical layout (`kind: canonical`). Of the other fields of `engine` it uses only `resources`."""

    max_num_seqs: PositiveInt = 256
    """Most requests of one replica that verifiers decode together; others wait."""


class EngineSettings(Section):
    """The fast path: it decodes, and proposes candidates to the verifier."""

    kind: Literal["torch", "vllm", "canonical"] = "torch"
    """Which engine decodes. torch: the built-in one, for CPUs and trials. vllm: vLLM, for GPUs in production
    (pip install -e '.[vllm]'). canonical: no fast path; verifiers decode every request, best effort too, and
    have the GPUs."""
    vllm: VllmSettings = VllmSettings()
    canonical: CanonicalSettings = CanonicalSettings()
    kv_tokens: PositiveInt = 16384
    """KV cache of a fast-path replica, in tokens (kind torch). Raise it for longer or more requests at a
    time; it costs memory."""
    block_size: PositiveInt = 16
    """Tokens in a KV block (kind torch)."""
    max_batch: PositiveInt = 32
    """Most requests of a replica that are decoded together (kind torch); others wait."""
    prefill_chunk: PositiveInt = 256
    """Most prompt tokens in one step (kind torch). Lower it if long prompts delay the tokens of other
    requests."""
    threads: NonNegativeInt = 0
    """CPU threads of a replica's engine. 0: half of the cores, at least one. Set it in containers, which see
    all cores of their machine."""
    gpus: PositiveFloat = 0.9
    """GPUs that Ray reserves for a replica where model.device is cuda (with tensor_parallel_size: of each of
    its GPUs). The default leaves a place for a verifier on the same GPU."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Other Ray resources that a replica needs, name -> amount, such as {fast: 0.01}. They decide on which
    nodes replicas may be placed."""
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
