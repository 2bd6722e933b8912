"""How many KV blocks fit a GPU that a verifier has to itself: what weights and steps leave.

Weights are there already and are measured, with everything else that is in use. What a step needs is not
there yet; it is reckoned from shapes, generously. What gpu_memory_utilization leaves (a tenth of the GPU) is
for what is in neither. The number of blocks is in no bit: it may differ from start to start."""

from __future__ import annotations

import gc
import logging

import torch

from llm42.config import Settings
from llm42.models.config import ModelConfig
from llm42.models.weights import LoadedModel
from llm42.verifier.cuda.runner import PARTIAL_TOKENS, OutOfDeviceMemory
from llm42.verifier.cuda.sampler import ROWS_AT_ONCE

log = logging.getLogger(__name__)
GRAPHS = 1 << 30
"""Bytes of the driver for some 140 CUDA graphs, and what the allocator wastes. An allowance, not measured."""
SORT = 96
"""Bytes for each logit of the rows that are restricted together: values, order, weights, their sums and the
sort's own copies (kernels/llm42_kernels/sampling.py)."""


def kv_blocks(model: LoadedModel, settings: Settings, rows: int) -> int:
    """The number of blocks, asked of the device now: with the weights on it and no runner. rows: of the
    largest step. Raises OutOfDeviceMemory where one request of model.max_model_len would not fit."""
    v, c, longest, size = settings.verifier, model.config, settings.model.max_model_len, model.dtype.itemsize
    gc.collect()  # what certification has left
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    step = step_bytes(c, rows, longest, v.block_size, size)
    needs = block_bytes(c, v.block_size, size), -(-longest // v.block_size)
    blocks = blocks_left(total, free, v.gpu_memory_utilization, step, *needs)
    log.info("%d tokens of KV cache: %s of %s are free", blocks * v.block_size, _gib(free), _gib(total))
    return blocks


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Keys and values of one block in all layers. itemsize: of the activation dtype."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * itemsize


def step_bytes(config: ModelConfig, rows: int, max_len: int, block_size: int, itemsize: int) -> int:
    """At least what a runner takes beside weights and KV, for steps of `rows` rows."""
    c = config
    row = 6 * c.hidden_size + (3 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size
    logits = 3 * 4 * c.vocab_size  # float32, once more where they are rounded, and counts for penalties
    tables = 4 * -(-max_len // block_size)
    partials = 4 * PARTIAL_TOKENS * c.num_heads * (c.head_dim + 2)
    return rows * (row * itemsize + logits + tables) + partials + ROWS_AT_ONCE * c.vocab_size * SORT + GRAPHS


def blocks_left(total: int, free: int, share: float, step: int, block: int, least: int) -> int:
    """Blocks of `block` bytes in `share` of a GPU's `total` bytes, beside what is in use (all but `free`) and
    `step`. Raises OutOfDeviceMemory for fewer than `least`."""
    blocks = max(0, int(share * total) - (total - free) - step) // block
    if blocks < least:
        raise OutOfDeviceMemory(
            f"of this GPU's {_gib(total)}, {_gib(total - free)} are in use, and a step takes {_gib(step)}:"
            f" under verifier.gpu_memory_utilization {share:g} that leaves {blocks} KV blocks of"
            f" {_gib(block)}, but one request of model.max_model_len needs {least}. Lower model.max_model_len"
            " or the largest of verifier.buckets, raise the share, or end what else is on this GPU"
        )
    return blocks


def _gib(count: int) -> str:
    """Bytes in GiB, for messages."""
    return f"{count / 2**30:.3g} GiB"
