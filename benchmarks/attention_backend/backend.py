"""An attention backend for vLLM (0.26, 0.27) that runs our kernels: registered as CUSTOM, nothing is patched.

`attention_config={"backend": "CUSTOM"}` selects it; `additional_config={"llm42_small_tile": "tma"}` changes
how decoding rows load their context. The KV cache has the verifier's own layout, keys and values apart, in
blocks of 64 or more. Decoding steps run in vLLM's full CUDA graphs, others between its piecewise ones.

vLLM's processes find it by an entry point in the group `vllm.general_plugins` that names `register`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from benchmarks.attention_backend.step import Step, StepAttention, shape_of, split_cache

BLOCK = 64
OPTION = "llm42_small_tile"


def register() -> None:
    """Makes `CUSTOM` this backend, in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.OrderedBackend")


class OrderedBackend(AttentionBackend):
    """Our attention: the order of a row's sum follows from its position alone."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name that vLLM's layers look up in the registry."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """What the kernels' tensor maps need."""
        return [MultipleOf(BLOCK)]

    @staticmethod
    def get_impl_cls() -> type[OrderedImpl]:
        """One per layer."""
        return OrderedImpl

    @staticmethod
    def get_builder_cls() -> type[OrderedBuilder]:
        """One per group of layers."""
        return OrderedBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values apart, as in the verifier."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Sizes with tensor-map tiles."""
        return [64, 128]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes: it is what this backend is for."""
        return True


@dataclass
class OrderedMetadata(AttentionMetadata):
    """A step, and who runs it."""

    step: Step
    runner: StepAttention


class OrderedBuilder(AttentionMetadataBuilder[OrderedMetadata]):
    """Plans each step on the host, which knows all lengths exactly where nothing is speculated."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.speculative_config is not None:
            raise ValueError("the lengths of speculated sequences are not known on the host")
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        small = (vllm_config.additional_config or {}).get(OPTION, "hopper")
        scheduler = vllm_config.scheduler_config
        shape = shape_of(
            heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, kv_cache_spec.block_size, small
        )
        self._runner = StepAttention(
            shape, torch.device(device), scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OrderedMetadata:
        """Items of the step's rows; padding has none."""
        common = common_attn_metadata
        ends = common.seq_lens_cpu_upper_bound
        assert ends is not None, "vLLM's model runner gave no lengths on the host"
        return self._metadata(common, ends[: common.num_reqs].numpy())

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> OrderedMetadata:
        """No items: what a replay has to do stands in the buffers then."""
        return self._metadata(common_attn_metadata, np.zeros(common_attn_metadata.num_reqs, np.int32))

    def _metadata(self, common: CommonAttentionMetadata, ends: Any) -> OrderedMetadata:
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        decode = common.max_query_len == 1
        return OrderedMetadata(
            self._runner.plan(starts, ends, common.block_table_tensor, decode), self._runner
        )


class OrderedImpl(AttentionImpl[OrderedMetadata]):
    """One layer's attention and its writes to the cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        given = [alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name, *more.values()]
        if any(x not in (None, 0, False) for x in given) or attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"only plain causal attention: {given}, {attn_type}")
        if abs(self.scale - head_size**-0.5) > 1e-9:
            raise NotImplementedError(f"a softmax scale of {scale} at head size {head_size}")
        self._sources: tuple[int, Any] = (0, None)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: OrderedMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output [T, Hq, D], padding included, which is left as it is."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        runner = attn_metadata.runner
        if self._sources[0] != kv_cache.data_ptr():
            self._sources = (kv_cache.data_ptr(), runner.attention.sources(*split_cache(kv_cache)))
        if not query.is_contiguous():
            query = query.contiguous()
        runner.run(attn_metadata.step, query, output, self._sources[1])
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """vLLM's own write."""
        from vllm import _custom_ops as ops

        keys, values = kv_cache.unbind(0)
        ops.reshape_and_cache_flash(
            key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )
