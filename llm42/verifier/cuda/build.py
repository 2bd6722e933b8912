"""The CUDA half of llm42/verifier/build.py: certification and runner of a model on a GPU.

The process must start with the environment of llm42_kernels.cublas.CUBLAS_ENVIRONMENT. Memory: weights, KV
(verifier.kv_tokens), logits of the largest bucket and a work area. Beside vLLM on one GPU start the verifier
first: vLLM's gpu_memory_utilization counts what is already in use, so that it takes the rest and no more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from llm42.cache import BlockPool, KVCache
from llm42.config import Settings
from llm42.models.weights import LoadedModel
from llm42.verifier.certify.cpu import Certificate, Progress
from llm42.verifier.runner import Runner
from llm42_kernels import cuda
from llm42_kernels.rotary import cos_sin_table_rounded

log = logging.getLogger(__name__)


def on_cuda(model: LoadedModel) -> bool:
    """Whether the model's weights are on a GPU."""
    return model.device.startswith("cuda")


def certify_on_cuda(
    settings: Settings, model: LoadedModel, plants: Iterable[str], progress: Progress
) -> Certificate:
    """Raises CertificationFailed, CublasEnvironmentError; ValueError for an unknown plant."""
    from llm42.verifier.certify.cuda import CudaSettings, certify_cuda

    v = settings.verifier
    cuda_settings = CudaSettings(
        v.buckets,
        v.block_size,
        settings.model.max_model_len,
        v.affinity,
        v.rounds_logits,
    )
    return certify_cuda(with_affinity(settings, model), cuda_settings, plants, progress)


def with_affinity(settings: Settings, model: LoadedModel) -> LoadedModel:
    """The model with the rotary table that `verifier.affinity` asks for; weights are shared."""
    if settings.verifier.affinity == "none":
        return model
    c, positions = model.config, settings.model.max_model_len
    inv_freq = c.inv_freq_float32(model.device)
    table = cos_sin_table_rounded(inv_freq, positions, c.attention_factor, model.dtype)
    return replace(model, weights=replace(model.weights, cos_sin=table))


def cuda_runner(
    settings: Settings, model: LoadedModel, certificate: Certificate, name: str
) -> tuple[Runner, BlockPool]:
    """The runner with the certified providers, and its block pool. Raises OutOfDeviceMemory."""
    from llm42.verifier.cuda.runner import ATTENTION, CudaRunner, memory_advice

    v, c = settings.verifier, model.config
    if v.block_size % 64:
        log.warning("verifier.block_size %d: multiples of 64 make attention faster on a GPU", v.block_size)
    blocks = -(-v.kv_tokens // v.block_size)
    ops = cuda.cuda_operators({op: p for op, p in certificate.providers.items() if op in cuda.PROVIDERS})
    with memory_advice():
        kv = KVCache(
            c.num_layers, blocks, v.block_size, c.num_kv_heads, c.head_dim, model.dtype, model.device
        )
    shape_of = ATTENTION[certificate.providers["attention"]]
    runner = CudaRunner(
        with_affinity(settings, model), ops, kv, certificate.buckets, settings.model.max_model_len,
        shape=shape_of(c.num_heads, c.num_kv_heads, c.head_dim, v.block_size),
        round_logits=v.rounds_logits,
    )  # fmt: skip
    return runner, BlockPool(blocks, v.block_size, root=name.encode())
