"""GGUF files through the `gguf` library: dequantised tensors under Hugging Face names.

llama.cpp stores the query and key rows of llama-architecture models interleaved (pairs side by side);
`GGUFSource` undoes that: llm42_kernels/rotary.py uses the half-split layout of Hugging Face checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from llm42.errors import UnsupportedModel
from llm42.models.config import ModelConfig
from llm42.models.gguf.config import ROPE_DIVISORS
from llm42.models.gguf.reader import open_gguf

_T = GGMLQuantizationType
PLAIN_TYPES = {_T.F32, _T.F16, _T.BF16}
QUANTISED_TYPES = {_T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K}

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hugging_face_name(name: str) -> str | None:
    """Our name of a GGUF tensor; None where there is none."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{suffix}"
    return None


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Interleaved rotary pairs -> half-split layout. rows [heads * D, ...], same shape back."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class GGUFSource:
    """weights.TensorSource over one GGUF file."""

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        """Raises ModelFileError, and UnsupportedModel for a type of tensor that is not read."""
        self.path, self.config = str(path), config
        self.quantised = False
        self._tensors: dict[str, Any] = {}
        for tensor in open_gguf(path).tensors:
            if tensor.name == ROPE_DIVISORS:
                continue  # part of the configuration
            if tensor.tensor_type not in PLAIN_TYPES | QUANTISED_TYPES:
                kind = tensor.tensor_type.name
                raise UnsupportedModel(f"{path}: tensor {tensor.name} has type {kind}: not supported", kind)
            self.quantised |= tensor.tensor_type in QUANTISED_TYPES
            self._tensors[hugging_face_name(tensor.name) or tensor.name] = tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes in row-major order (GGUF writes them reversed)."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def where(self, name: str) -> str:
        """The file."""
        return self.path

    def read(self, name: str) -> Tensor:
        """float32 values, dequantised by gguf.quants."""
        tensor = self._tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        result = torch.from_numpy(np.array(values, dtype=np.float32))
        if self.config.architecture == "llama" and ".self_attn." in name:
            if ".q_proj." in name:
                return unpermute(result, self.config.num_heads)
            if ".k_proj." in name:
                return unpermute(result, self.config.num_kv_heads)
        return result
