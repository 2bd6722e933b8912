"""Rotary frequencies: plain, linear, Llama 3 and YaRN scaling, as transformers defines them, but in float64.

Sources: `modeling_rope_utils` of transformers; YaRN: Peng et al., arXiv 2309.00071. PyTorch is imported where
it computes: a configuration is read in processes that compute nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """`kind` is transformers' rope_type; fields that a kind does not use keep their defaults."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """cos and sin are multiplied by it (YaRN); resolved when the configuration is read."""
    divisors: tuple[float, ...] = ()
    """Kind "divisors": one per frequency (GGUF's `rope_freqs.weight`, Llama 3 scaling precomputed)."""

    def longest_context(self, max_position: int) -> int:
        """Positions that the scaling reaches, where the configuration names `max_position`: formats spread
        the limit over two fields, of which the other is the factor. What vLLM derives too."""
        if self.kind == "linear":
            return max(max_position, int(max_position * self.factor))
        if self.kind == "yarn":
            return max(max_position, int(self.original_max_position * self.factor))
        return max_position

    def inv_freq(self, head_dim: int) -> Tensor:
        """Angular frequency per position, [head_dim / 2] float64."""
        import torch

        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        plain = 1.0 / torch.tensor(self.theta, dtype=torch.float64) ** exponents
        match self.kind:
            case "default":
                return plain
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain, head_dim)
            case "divisors":
                return plain / torch.tensor(self.divisors, dtype=torch.float64)
        raise AssertionError(f"rope kind {self.kind} passed validation but is not implemented")

    def inv_freq_float32(self, head_dim: int, device: str | torch.device) -> Tensor:
        """[head_dim / 2] float32, computed in float32 on `device` in the steps that vLLM takes; a kind other
        than "default" and "llama3" is computed in float64 and rounded."""
        import torch

        if self.kind not in ("default", "llama3"):
            return self.inv_freq(head_dim).float().to(device)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        plain = 1.0 / (self.theta**exponents)
        return plain if self.kind == "default" else self._llama3(plain)

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long wavelengths are divided by the factor, short ones kept, those between are blended."""
        import torch

        context, low, high = self.original_max_position, self.low_freq_factor, self.high_freq_factor
        wavelength = 2 * math.pi / plain
        smooth = (context / wavelength - low) / (high - low)
        blended = (1 - smooth) * plain / self.factor + smooth * plain
        scaled = torch.where(wavelength > context / low, plain / self.factor, plain)
        between = (wavelength >= context / high) & (wavelength <= context / low)
        return torch.where(between, blended, scaled)

    def _yarn(self, plain: Tensor, head_dim: int) -> Tensor:
        """A linear ramp over the dimensions between beta_fast and beta_slow turns in the original context."""
        import torch

        def dimension(rotations: float) -> float:
            ratio = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # as in the source: no division by zero
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor on cos and sin where the configuration names none."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)
