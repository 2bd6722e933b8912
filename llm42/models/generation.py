"""generation_config.json: end tokens are taken from it, sampling defaults are not, and what would have to
hold for every answer is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm42.models.families import token_ids
from llm42.models.files import read_json_if_there, require_known, words

FILE = "generation_config.json"

_DEFAULTS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": None, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_new_tokens": None,
}  # fmt: skip
"""What a request says by itself. A field that it leaves out has OpenAI's default on every server: a hidden
file must not change what a body means."""
_HARMLESS = words(
    "eos_token_id bos_token_id pad_token_id decoder_start_token_id do_sample max_length transformers_version"
    " use_cache _from_model_config cache_implementation cache_config return_legacy_cache num_return_sequences"
    " output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
    " return_unused_kwargs trust_remote_code max_time early_stopping length_penalty low_memory"
    " disable_compile"
    " prefill_chunk_size chat_format max_window_size top_a compile_config language task"
    " assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind"
    " num_assistant_tokens num_assistant_tokens_schedule is_assistant max_matching_ngram_size"
    " prompt_lookup_num_tokens"
)
"""Ids that are read elsewhere, bookkeeping, beam search without beams, and how other code runs."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "forced_decoder_ids": (None, []),
    "bad_words_ids": (None, []),
    "force_words_ids": (None, []),
    "sequence_bias": (None, {}, []),
    "constraints": (None, []),
    "stop_strings": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "diversity_penalty": (None, 0.0),
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "typical_p": (None, 1.0),
    "top_h": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "renormalize_logits": (None, False),
    "remove_invalid_values": (None, False),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}
"""Field -> the values at which it changes nothing."""


def end_ids(directory: Path) -> tuple[int, ...] | None:
    """The end tokens that the file names; None where it names none. Raises UnsupportedModel for a field that
    would have to hold for every answer and is not implemented."""
    file = directory / FILE
    values = read_json_if_there(file)
    require_known(values, str(file), _HARMLESS | _DEFAULTS.keys(), _NEUTRAL)
    value = values.get("eos_token_id")
    return None if value is None else token_ids(value)


def defaults_not_applied(directory: Path) -> dict[str, Any]:
    """Sampling defaults that the file recommends and that a request has to ask for."""
    values = read_json_if_there(directory / FILE)
    return {name: values[name] for name, plain in _DEFAULTS.items() if values.get(name) not in (None, plain)}
