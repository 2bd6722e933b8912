"""Requests that an engine can never run are refused before it takes them."""

from __future__ import annotations

from llm42.errors import RequestRejected
from llm42.protocol import Request


def require_room(request: Request, positions: int, kv_tokens: int | None = None) -> None:
    """Raises RequestRejected for more than the context (prompt plus output) or the engine's KV cache."""
    needed = len(request.prompt) + request.max_tokens
    if needed > positions:
        text = f"need {needed} positions; this server has {positions} (model.max_model_len)"
    elif kv_tokens is not None and needed > kv_tokens:
        text = f"need {needed} tokens of KV cache; this server has {kv_tokens} (engine.kv_tokens)"
    else:
        return
    raise RequestRejected(f"prompt and max_tokens {text}", "max_tokens", "context_length_exceeded")


def require_known_ids(request: Request, vocab_size: int) -> None:
    """Raises RequestRejected for an id that the model has no row for.

    The HTTP side checks them too; whoever forgets to must not bring an engine down, and others' requests
    with it.
    """
    if not all(0 <= token < vocab_size for token in (*request.prompt, *request.output)):
        text = f"prompt: a token id is outside the model's vocabulary (0 to {vocab_size - 1})"
        raise RequestRejected(text, "prompt")
    if not request.sampling.fits(vocab_size):
        text = f"logit_bias: an id is outside the model's vocabulary (0 to {vocab_size - 1})"
        raise RequestRejected(text, "logit_bias")
