"""Fields that are not implemented: what may be ignored, and what is refused.

The rule: a field that would change the output is refused with its name; one that cannot change a token, or
holds its neutral value, is ignored. Nothing is dropped silently that could be noticed in the answer. Clients
of vLLM, SGLang, llama.cpp, OpenRouter and others send many fields with their defaults, on whichever route.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

HARMLESS = frozenset(
    {
        # who asks, and what for
        "user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "rid", "session_id",
        "custom_labels",
        # how soon, and where; what is kept of it
        "priority", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt",
        "id_slot", "slot_id", "n_cache_reuse", "keep_alive", "ttl", "data_parallel_rank", "routed_dp_rank",
        "disagg_prefill_dp_rank",
        # guesses of the output, which only make it faster
        "prediction", "ngram_corpus_id",
        # of slow tokenizers only
        "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Accepted and ignored: they cannot change a token."""

_NOTHING: tuple[Any, ...] = ({}, [], "")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # sampling, and where the output ends
    "best_of": (), "use_beam_search": (False,), "length_penalty": (1.0, 1), "early_stopping": (False,),
    "allowed_token_ids": ([],), "bad_words": ([],), "stop_regex": _NOTHING, "no_stop_trim": (False,),
    "skip_special_tokens": (True,), "logits_processors": ([],), "custom_logit_processor": ("",),
    "custom_params": ({},), "vllm_xargs": ({},), "repetition_detection": ({},), "watermarking": (False,),
    "mirostat": (0,), "typical_p": (1.0, 1), "tfs_z": (1.0, 1), "top_a": (0.0, 0), "repeat_penalty": (1.0, 1),
    "dynatemp_range": (0.0, 0), "xtc_probability": (0.0, 0), "dry_multiplier": (0.0, 0), "n_keep": (0,),
    "t_max_predict_ms": (0,), "options": ({},), "safe_prompt": (False,),
    # the prompt
    "suffix": ("",), "echo": (False,), "documents": ([],), "truncate_prompt_tokens": (-1,),
    "truncation_side": ("left", "right"), "context_length_exceeded_behavior": ("error",), "transforms": ([],),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"), "plugins": ([],),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "images_config": ({},), "prompt_embeds": _NOTHING,
    # the model and what stands before and behind it
    "lora_path": ("",), "models": ([],), "provider": ({},), "session_params": ({},),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},), "extra_body": ({},), "extra_headers": ({},),
    # the form of the answer
    "modalities": (["text"],), "verbosity": ("medium",), "reasoning": ({},), "detokenize": (True,),
    "structured_outputs": ({},), "guided_json": _NOTHING, "guided_regex": ("",), "guided_choice": ([],),
    "guided_grammar": ("",), "json_schema": _NOTHING, "regex": ("",), "ebnf": ("",), "grammar": ("",),
    "format": ("",), "include_reasoning": (True,), "separate_reasoning": (True, False),
    "stream_reasoning": (True, False), "top_logprobs": (0,), "n_probs": (0,), "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,), "return_hidden_states": (False,), "return_prompt_text": (False,),
    "return_routed_experts": (False,), "routed_experts_start_len": (0,), "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,), "return_mm_kwargs": (True, False), "return_tokens": (False,),
    "return_cached_tokens_details": (False,), "post_sampling_probs": (False,), "timings_per_token": (False,),
    "return_progress": (False,), "response_fields": ([],),
}  # fmt: skip
"""A route that does not implement one of these accepts it with these values only (or null), which change
nothing. A route that does, as completions do `echo` and chat does `tools`, takes more."""

_NAMES = {
    "max_new_tokens": "max_tokens", "n_predict": "max_tokens", "num_predict": "max_tokens",
    "random_seed": "seed", "repeat_penalty": "repetition_penalty", "min_new_tokens": "min_tokens",
    "stop_sequences": "stop", "n_probs": "logprobs", "bad_words": "logit_bias",
    "allowed_token_ids": "logit_bias", "guided_json": "response_format", "json_schema": "response_format",
    "structured_outputs": "response_format", "format": "response_format",
    "enable_thinking": "chat_template_kwargs", "thinking": "chat_template_kwargs",
    "reasoning_effort": "chat_template_kwargs", "documents": "chat_template_kwargs",
    "prompt_embeds": "prompt", "skip_special_tokens": "return_token_ids", "detokenize": "return_token_ids",
    "return_tokens_as_token_ids": "return_token_ids", "return_tokens": "return_token_ids",
}  # fmt: skip
"""The field that comes nearest to one of another server."""
ALIKE = 0.85
"""How alike (difflib's ratio) a field's name must be to one that is taken for it, misspelt."""


def is_neutral(name: str, value: Any) -> bool:
    """Whether this value of a field that its route does not implement may be ignored. 1 is not true, nor 0
    false."""
    if value is None or name in HARMLESS:
        return True
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in NEUTRAL.get(name, ()))


def refusal(
    extra: Mapping[str, Any], elsewhere: Collection[str] = (), fields: Collection[str] = ()
) -> tuple[str, str] | None:
    """(field, message) of the first of these fields that may not be ignored; None: all may.

    elsewhere: fields that another route takes; fields: those of this route.
    """
    for name, value in extra.items():
        if is_neutral(name, value):
            continue
        if name in elsewhere:
            return name, f"'{name}' is a field of another endpoint, and would change the output here."
        known = name in NEUTRAL
        said = (
            f"'{name}' is not supported with this value. It would"
            if known
            else f"Unknown field '{name}'. It might"
        )
        near = [_NAMES[name]] if name in _NAMES else get_close_matches(name, fields, 1, ALIKE)
        nearest = f" The nearest field here is '{near[0]}'." if near else ""
        return name, f"{said} change the output, so it is not ignored.{nearest}"
    return None
