"""A model's architecture in one frozen dataclass, whichever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm42.models.rope import RopeSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder needs to know. Hq = num_heads, Hk = num_kv_heads, D = head_dim, H = hidden_size."""

    architecture: str
    """"llama", "mistral", "qwen2" or "qwen3" (families.py)."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSettings
    max_position: int
    """As the file says it; `longest_context` counts the scaling in."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def longest_context(self) -> int:
        """Positions that the model can be run at."""
        return self.rope.longest_context(self.max_position)

    def inv_freq(self) -> Tensor:
        """Rotary frequencies, [D/2] float64."""
        return self.rope.inv_freq(self.head_dim)

    def inv_freq_float32(self, device: str | torch.device) -> Tensor:
        """The same as an engine computes them that works in float32 on the device, [D/2] float32."""
        return self.rope.inv_freq_float32(self.head_dim, device)

    @property
    def attention_factor(self) -> float:
        """Multiplies the rotary cos and sin; 1 unless YaRN."""
        return self.rope.attention_factor
