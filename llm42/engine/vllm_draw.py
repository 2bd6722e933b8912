"""A vLLM logits processor that makes deterministic requests propose the canonical sampler's tokens.

vLLM loads it in its engine process when `engine.vllm.sampled_agreement` is on. A row that asks for it
(vllm_sampling.py) is replaced by one in which only the drawn token is possible, so vLLM's argmax picks it.
The draw is llm42.sampling.draw itself: the candidate is the canonical token whenever the logits lead to it.

Cost: one draw, and one wait for the device, per such row and step, in vLLM's step. Other rows are not
touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from llm42.engine.vllm_sampling import draw_of
from llm42.sampling import draw

Row = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


class CanonicalDraw(AdapterLogitsProcessor):  # type: ignore[misc, unused-ignore]
    """The canonical draw, for the rows that ask for it."""

    def is_argmax_invariant(self) -> bool:
        """It changes the argmax: that is its purpose."""
        return False

    def new_req_logits_processor(self, params: Any) -> Row | None:
        """None for a request that does not ask."""
        asked = draw_of(params.extra_args)
        if asked is None:
            return None
        sampling, prompt_len = asked

        def row(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = draw(logits.float(), sampling, [*prompt, *output], prompt_len)
            if token is not None:  # NaN: any proposal will do, the verifier reports it
                logits.fill_(float("-inf"))
                logits[token] = 0.0
            return logits

        return row
