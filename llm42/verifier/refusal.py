"""Windows that a verifier can never answer, told from the window alone: by whoever submits it, at once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy

from llm42.protocol import Failure, Window


def refusal_of(
    window: Window, max_len: int, vocab_size: int, fits: Callable[[Window], bool]
) -> Failure | None:
    """What is wrong with it; None: it can be computed. fits: whether the KV cache has room for it at all."""
    length = len(window.tokens) + len(window.candidates)
    if not window.tokens or not 0 < window.prompt_len <= len(window.tokens):
        return Failure(window.request_id, "invalid_window", "a window needs a prompt inside its tokens")
    if window.credit < 0 or window.max_len < 0 or (window.credit and (window.score or not window.max_len)):
        text = "credit needs max_len, and scored windows have none"
        return Failure(window.request_id, "invalid_window", text)
    length = max(length, window.max_len)
    if length > max_len:
        text = f"{length} tokens are beyond the context of {max_len}"
        return Failure(window.request_id, "context_length_exceeded", text)
    if not fits(window):
        text = f"{length} tokens do not fit the verifier's KV cache (raise verifier.kv_tokens)"
        return Failure(window.request_id, "context_length_exceeded", text)
    if not all(_all_within(vocab_size, x) for x in (window.tokens, window.candidates, window.stop_token_ids)):
        return Failure(window.request_id, "invalid_window", "a token id is outside the vocabulary")
    if not window.sampling.fits(vocab_size):
        text = "logit_bias or min_tokens names an id outside the vocabulary"
        return Failure(window.request_id, "invalid_window", text)
    return None


def _all_within(vocab_size: int, ids: Sequence[int]) -> bool:
    """Whether all are ids of the vocabulary. All of them, each time: windows come from other processes, and
    what an earlier one held says nothing of this one. In machine integers, because a request's tokens come
    again with each of its windows."""
    try:
        packed = array("I", ids)  # takes nothing negative, and nothing that is no integer
    except (OverflowError, TypeError):
        return False
    return not packed or int(numpy.frombuffer(packed, dtype=numpy.uintc).max()) < vocab_size
