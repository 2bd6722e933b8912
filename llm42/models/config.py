"""A model's architecture in one frozen dataclass, whichever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass

from llm42.models.rope import RopeSettings


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
