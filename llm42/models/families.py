"""The allow-list: which config.json describes a model that llm42.models.decoder computes exactly.

A field that is neither used, nor known to leave the mathematics alone, nor at its neutral value, is refused
with UnsupportedModel. Nothing is ignored because it is unknown. Defaults of absent fields are those of
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models.config import ModelConfig
from llm42.models.files import kinds, words
from llm42.models.rope import RopeSettings, yarn_attention_factor

_USED = words(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters"
    " max_position_embeddings tie_word_embeddings bos_token_id eos_token_id layer_types architectures"
)
_HARMLESS = words(
    "torch_dtype dtype transformers_version initializer_range use_cache pad_token_id attention_dropout"
    " _name_or_path _attn_implementation_autoset max_window_layers output_attentions output_hidden_states"
    " return_dict id2label label2id problem_type is_llama_config transformers.js_config unsloth_version"
    " unsloth_fixed"
)
"""Training, bookkeeping and defaults of other code: without effect on a forward pass."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (False, None),
    "pretraining_tp": (None, 1),
    "alibi": (False, None),
    "use_mrope": (False, None),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
}
"""Field -> the values at which it changes nothing; any other value is refused."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is particular to one architecture."""

    class_name: str
    used: frozenset[str] = frozenset()
    """Fields read in addition to `_USED`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What an absent field means, where that is not its neutral value."""
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", used=frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family("MistralForCausalLM", defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", used=frozenset({"attention_bias"}), defaults={"head_dim": 128}, qk_norm=True
    ),
}
ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": words(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim"
        " truncate"
    ),
}
"""rope_type -> its fields in config.json."""


def read_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """config.json's content -> ModelConfig. `where` (the file) starts every message.

    Raises UnsupportedModel naming the field, or ModelFileError for absent, mistyped or contradictory values.
    """
    name = data.get("model_type")
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"{where}: model_type {name!r} is not supported; supported: {supported}", "model_type"
        )
    return _Reader(data, where, str(name), FAMILIES[str(name)]).config()


class _Reader:
    def __init__(self, data: Mapping[str, Any], where: str, name: str, family: Family) -> None:
        self.data, self.where, self.name, self.family = data, where, name, family

    def config(self) -> ModelConfig:
        self._check_fields()
        heads = self._integer("num_attention_heads")
        kv_heads = self._integer("num_key_value_heads", heads)
        head_dim = self._head_dim(heads)
        if heads % kv_heads:
            raise self._broken(
                "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}"
            )
        attention_bias = self._flag("attention_bias") if "attention_bias" in self.family.used else False
        max_position = self._integer("max_position_embeddings")
        return ModelConfig(
            architecture=self.name,
            vocab_size=self._integer("vocab_size"),
            hidden_size=self._integer("hidden_size"),
            intermediate_size=self._integer("intermediate_size"),
            num_layers=self._integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._number(self.data, "rms_norm_eps", 1e-6),
            rope=self._rope(max_position),
            max_position=max_position,
            tie_word_embeddings=self._flag("tie_word_embeddings"),
            qkv_bias=self.family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=self._flag("mlp_bias") if "mlp_bias" in self.family.used else False,
            qk_norm=self.family.qk_norm,
            bos_token_id=self.data.get("bos_token_id"),
            eos_token_ids=token_ids(self.data.get("eos_token_id")),
        )

    def _check_fields(self) -> None:
        """The allow-list itself."""
        used = _USED | self.family.used
        for key in [*self.data, *(key for key in self.family.defaults if key not in self.data)]:
            value = self.data.get(key, self.family.defaults.get(key))
            if key in used or key in _HARMLESS or self._is_unused_window(key):
                continue
            if key not in _NEUTRAL:
                raise self._unsupported(key, "is not a known field: it may change the model")
            if not any(value == allowed and type(value) in kinds(allowed) for allowed in _NEUTRAL[key]):
                raise self._unsupported(key, f"= {value!r} is not supported")
        classes = self.data.get("architectures")
        if classes is not None and classes != [self.family.class_name]:
            raise self._unsupported("architectures", f"= {classes!r} is not supported")
        layers = self.data.get("layer_types")
        if layers is not None and layers != ["full_attention"] * self._integer("num_hidden_layers"):
            raise self._unsupported("layer_types", "names layers other than full_attention")

    def _is_unused_window(self, key: str) -> bool:
        """Qwen writes a window's size even where use_sliding_window says that there is none."""
        return (
            key == "sliding_window"
            and self.name.startswith("qwen")
            and not self.data.get("use_sliding_window")
        )

    def _head_dim(self, heads: int) -> int:
        hidden = self._integer("hidden_size")
        default = self.family.defaults.get("head_dim") or (hidden // heads if hidden % heads == 0 else 0)
        head_dim = self._integer("head_dim", default)
        if head_dim % 2:
            raise self._broken("head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
        return head_dim

    def _rope(self, max_position: int) -> RopeSettings:
        old, new = self.data.get("rope_scaling"), self.data.get("rope_parameters")
        if old and new and old != new:
            raise self._broken("rope_scaling", "contradicts rope_parameters")
        key = "rope_parameters" if new else "rope_scaling"
        values = dict(new or old or {})
        kind = values.pop("rope_type", None) or values.get("type", "default")
        values.pop("type", None)
        if kind not in ROPE_FIELDS:
            raise self._unsupported(f"{key}.rope_type", f"= {kind!r} is not supported")
        theta = self._number(values, "rope_theta", self._number(self.data, "rope_theta", 10000.0))
        for name, value in values.items():
            neutral = name == "partial_rotary_factor" and value in (None, 1.0)
            if name not in ROPE_FIELDS[kind] | {"rope_theta"} and not neutral:
                raise self._unsupported(f"{key}.{name}", f"is not a known field of rope type {kind}")
        return self._scaled_rope(kind, theta, values, max_position)

    def _scaled_rope(
        self, kind: str, theta: float, values: dict[str, Any], max_position: int
    ) -> RopeSettings:
        if kind == "default":
            return RopeSettings(theta)
        factor = self._number(values, "factor")
        if kind == "linear":
            return RopeSettings(theta, kind, factor)
        original = int(self._number(values, "original_max_position_embeddings", max_position))
        if kind == "llama3":
            low, high = self._number(values, "low_freq_factor"), self._number(values, "high_freq_factor")
            if low == high:
                raise self._broken("high_freq_factor", "equals low_freq_factor")
            return RopeSettings(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        attention_factor = values.get("attention_factor")
        if attention_factor is None:
            attention_factor = yarn_attention_factor(
                factor, values.get("mscale"), values.get("mscale_all_dim")
            )
        return RopeSettings(
            theta,
            kind,
            factor,
            original,
            beta_fast=self._number(values, "beta_fast", 32.0),
            beta_slow=self._number(values, "beta_slow", 1.0),
            truncate=bool(values.get("truncate", True)),
            attention_factor=float(attention_factor),
        )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._broken(
                key, "is missing" if value is None else f"= {value!r} is not a positive integer"
            )
        return value

    def _number(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._broken(
                key, "is missing" if value is None else f"= {value!r} is not a positive number"
            )
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise self._broken(key, f"= {value!r} is not true or false")
        return value

    def _unsupported(self, key: str, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {key} {what} ({self.name})", key)

    def _broken(self, key: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key} {what}")


def token_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id of a configuration: absent, one id or a list."""
    if value is None:
        return ()
    return tuple(sorted(set(value))) if isinstance(value, list) else (int(value),)
