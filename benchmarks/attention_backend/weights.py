"""Weights for an engine that was started without: equal in every engine, and of a size at which logits mean
something."""

from __future__ import annotations

from typing import Any

import torch


def fill(worker: Any) -> int:
    """Runs in vLLM's worker. Norms 1, the rest normal with deviation 0.02, from one seed; returns the number
    of parameters."""
    model, count = worker.get_model(), 0
    generator = torch.Generator("cuda").manual_seed(42)
    with torch.inference_mode():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
            count += weight.numel()
    torch.cuda.synchronize()
    return count
