"""The configuration in a GGUF file's metadata. Needs the head of the file only, and no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models.config import ModelConfig
from llm42.models.gguf.reader import contents, open_gguf
from llm42.models.rope import RopeSettings, yarn_attention_factor

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture -> ours. llama.cpp writes Mistral models as "llama"."""
ROPE_DIVISORS = "rope_freqs.weight"


def read_config(path: str | Path) -> ModelConfig:
    """The file's architecture. Raises UnsupportedModel for anything that is not implemented, and
    ModelFileError for a file that is broken or lacks something."""
    reader = open_gguf(path)
    try:
        return _Fields(str(path), reader).config()
    except ModelFileError as error:
        place = "" if str(path) in str(error) else f"{path}: "
        raise ModelFileError(f"{place}{error}") from error


_IGNORED = {
    "vocab_size",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.factor",
}


_WHOLE = {"general.type": "model", "split.count": 1}
"""What says that a file is a whole model; other keys outside the architecture's are information."""
SAMPLING = "general.sampling."
"""Keys with recommended sampling parameters begin so."""


class _Fields:
    """Reads `<architecture>.*` keys and remembers which were understood."""

    def __init__(self, path: str, reader: GGUFReader) -> None:
        self.path, self.reader = path, reader
        name = str(self._raw("general.architecture") or "")
        if name not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedModel(
                f"{path}: architecture {name!r} is not supported; supported: {supported}",
                "general.architecture",
            )
        for key, allowed in _WHOLE.items():
            if (value := self._raw(key)) not in (None, allowed):
                raise UnsupportedModel(f"{path}: {key} = {value!r} is not supported (only {allowed!r})", key)
        self.architecture, self._prefix, self._understood = ARCHITECTURES[name], name + ".", set[str]()

    def _raw(self, key: str) -> Any:
        field = self.reader.get_field(key)
        return None if field is None else contents(key, field)

    def get(self, key: str, default: Any = None) -> Any:
        self._understood.add(key)
        value = self._raw(self._prefix + key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"{self.path}: metadata {self._prefix}{key} is missing")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; per-layer arrays are not supported."""
        value = self.need(key) if default is None else self.get(key, default)
        name = self._prefix + key
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.path}: {name} differs between layers: not supported", name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFileError(f"{self.path}: metadata {name} = {value!r} is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            name = self._prefix + key
            raise ModelFileError(f"{self.path}: metadata {name} = {value!r} is not a positive number")
        return float(value)

    def must_be(self, key: str, allowed: Any) -> None:
        value = self.get(key, allowed)
        if value != allowed:
            name = self._prefix + key
            raise UnsupportedModel(
                f"{self.path}: {name} = {value!r} is not supported (only {allowed!r})", name
            )

    def config(self) -> ModelConfig:
        names = {tensor.name: tensor for tensor in self.reader.tensors}
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        kv_heads = self.size("attention.head_count_kv", heads)
        head_dim = self.size("attention.key_length", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            what = f"{heads} heads, {kv_heads} key-value heads and head size {head_dim}"
            raise ModelFileError(f"{self.path}: {what} do not fit together")
        for key in ("attention.value_length", "rope.dimension_count"):
            self.must_be(key, head_dim)
        for key in ("expert_count", "expert_used_count"):
            self.must_be(key, 0)
        embedding = names.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelFileError(f"{self.path}: tensor token_embd.weight is missing, or no matrix")
        config = ModelConfig(
            architecture=self.architecture,
            vocab_size=int(embedding.shape[1]),
            hidden_size=hidden,
            intermediate_size=self.size("feed_forward_length"),
            num_layers=self.size("block_count"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(names, head_dim),
            max_position=self.size("context_length"),
            tie_word_embeddings="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            o_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
            qk_norm="blk.0.attn_q_norm.weight" in names,
            bos_token_id=self._raw("tokenizer.ggml.bos_token_id"),
            eos_token_ids=eos_token_ids(self._raw),
        )
        self._refuse_unknown()
        return config

    def _rope(self, names: dict[str, Any], head_dim: int) -> RopeSettings:
        theta = self.number("rope.freq_base", 10000.0)
        # llama.cpp reads a factor without a type as linear scaling
        unnamed = "none" if self.get("rope.scaling.factor") is None else "linear"
        kind = str(self.get("rope.scaling.type", unnamed))
        if ROPE_DIVISORS in names:
            if kind != "none":
                raise UnsupportedModel(
                    f"{self.path}: {ROPE_DIVISORS} together with scaling {kind}", ROPE_DIVISORS
                )
            divisors = tuple(float(value) for value in names[ROPE_DIVISORS].data)
            if len(divisors) != head_dim // 2:
                raise ModelFileError(
                    f"{self.path}: tensor {ROPE_DIVISORS} has {len(divisors)} values, not {head_dim // 2}"
                )
            return RopeSettings(theta, "divisors", divisors=divisors)
        if kind == "none":
            return RopeSettings(theta)
        if kind not in ("linear", "yarn"):
            field = self._prefix + "rope.scaling.type"
            raise UnsupportedModel(f"{self.path}: {field} = {kind!r} is not supported", field)
        factor = self.number("rope.scaling.factor")
        if kind == "linear":
            return RopeSettings(theta, "linear", factor)
        original = self.size("rope.scaling.original_context_length")
        return RopeSettings(
            theta, "yarn", factor, original, attention_factor=yarn_attention_factor(factor, None, None)
        )

    def _refuse_unknown(self) -> None:
        for key in self.reader.fields:
            if (
                key.startswith(self._prefix)
                and key.removeprefix(self._prefix) not in self._understood | _IGNORED
            ):
                raise UnsupportedModel(
                    f"{self.path}: metadata {key} is not known: it may change the model", key
                )


def eos_token_ids(get: Any) -> tuple[int, ...]:
    """End-of-text and end-of-turn ids named by the metadata; get(key) -> value or None."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    found = [get(key) for key in keys]
    return tuple(sorted({int(value) for value in found if value is not None}))
