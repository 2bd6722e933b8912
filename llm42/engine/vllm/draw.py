"""A vLLM logits processor that makes deterministic requests propose the canonical sampler's tokens.

vLLM loads it in its engine process when `engine.vllm.sampled_agreement` is on. A row that asks for it
(sampling.py) is replaced by one in which only the drawn token is possible, so vLLM's argmax picks it:
the candidate is the canonical token whenever the logits lead to it. Other rows are not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from llm42.engine.vllm.agreement import History, leave_only_drawn, warm_up
from llm42.engine.vllm.sampling import draw_of
from llm42.sampling import Draw


class CanonicalDraw(AdapterLogitsProcessor):  # type: ignore[misc, unused-ignore]
    """The canonical draw, for the rows that ask for it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        warm_up(vllm_config.model_config.get_vocab_size(), torch.device(device))

    def is_argmax_invariant(self) -> bool:
        """It changes the argmax: that is its purpose."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[..., Draw] | None:
        """What vLLM keeps of a request, with its prompt and its growing output; None if it does not ask."""
        asked = draw_of(params.extra_args)
        if asked is None:
            return None
        sampling, prompt_len = asked

        # vLLM counts three parameters, and fills in the first two
        def row(prompt: list[int], output: list[int], _logits: torch.Tensor | None = None) -> Draw:
            return Draw(sampling, History(prompt, output), prompt_len)

        return row

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """All rows of a step at once. logits [R, V]; returned with only the drawn ids left possible."""
        if self.req_info:
            draws = [request() for request in self.req_info.values()]
            leave_only_drawn(logits, list(self.req_info), draws)
        return logits
