"""The canonical draw on the fast path's own logits: which token a sampled request proposes.

Needs no vLLM, so it is tested without; vllm_draw.py puts it into vLLM's step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm42.sampling import Draw, draw


def leave_only_drawn(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    """Changes `rows` of logits [R, V] so that each one's canonical token alone is possible.

    draws[i] describes rows[i]. On CUDA all rows are drawn together, by the verifier's kernels and without
    waiting for the device. A row with NaN proposes any token: the verifier reports it.
    """
    if logits.is_cuda:
        _together(logits, rows, draws)
        return
    for row, asked in zip(rows, draws, strict=True):
        token = draw(logits[row].float(), asked.params, asked.history, asked.prompt_len)
        if token is not None:
            logits[row] = float("-inf")
            logits[row, token] = 0.0


def _together(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    from llm42.verifier.cuda_sampler import ROWS_AT_ONCE, draw_tokens

    for begin in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        index = torch.tensor(rows[part])
        if logits.is_cuda:
            index = index.pin_memory().to(logits.device, non_blocking=True)
        token = draw_tokens(logits[index].float(), draws[part])
        logits.index_fill_(0, index, float("-inf"))
        logits[index, token.long()] = 0.0
