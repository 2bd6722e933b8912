"""The canonical draw on the fast path's own logits: which token a sampled request proposes.

Needs no vLLM, so it is tested without; draw.py puts it into vLLM's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llm42.protocol import SamplingParams
from llm42.sampling import Draw, draw

ROWS_AT_ONCE = 16
"""Rows sorted together: vLLM has left little memory when it comes to sampling (100 MB at 128k tokens)."""


class History(Sequence[int]):
    """Prompt and output as one sequence, without a copy: most draws need no more than its length."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._prompt, self._output = prompt, output

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __iter__(self) -> Iterator[int]:
        yield from self._prompt
        yield from self._output

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]


def leave_only_drawn(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    """Changes `rows` of logits [R, V] so that each one's canonical token alone is possible.

    draws[i] describes rows[i]. On CUDA many rows are drawn together, by the verifier's kernels and without
    waiting for the device. A row with NaN proposes any token: the verifier reports it.
    """
    if logits.is_cuda:
        draw_together(logits, rows, draws)
        return
    for row, asked in zip(rows, draws, strict=True):
        token = draw(logits[row].float(), asked.params, list(asked.history), asked.prompt_len)
        if token is not None:
            logits[row] = float("-inf")
            logits[row, token] = 0.0


def draw_together(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    """leave_only_drawn by the verifier's kernels. logits [R, V] on CUDA, or in Triton's interpreter; rows and
    draws of one length."""
    from llm42.verifier.cuda.sampler import device_tensor, draw_tokens

    possible = logits.new_zeros(())  # on the device: a number would be copied there, which waits for it
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        index = device_tensor(rows[part], logits)
        token = draw_tokens(logits[index].float(), draws[part])
        logits.index_fill_(0, index, float("-inf"))
        logits.index_put_((index, token.long()), possible)


def warm_up(vocab: int, device: torch.device) -> None:
    """Compiles what `leave_only_drawn` launches on a CUDA device, so that no request's step waits for it."""
    if device.type == "cuda":
        asked = [SamplingParams(temperature=1.0, top_p=share) for share in (1.0, 0.9)]
        draw_together(torch.zeros(2, vocab, device=device), [0, 1], [Draw(p, [0], 1) for p in asked])
