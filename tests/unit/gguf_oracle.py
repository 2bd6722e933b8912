"""Writes small GGUF files from transformers models; dequantises one block at a time as ggml's C code does.

The scalar decoders follow the block layouts of ggml-quants.c and share nothing with gguf's vectorised ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

Values = list[np.float32]
f32 = np.float32


def _half(block: bytes, at: int) -> np.float32:
    return f32(np.frombuffer(block[at : at + 2], dtype=np.float16)[0])


def _nibbles(block: bytes) -> tuple[list[int], list[int]]:
    return [byte & 15 for byte in block], [byte >> 4 for byte in block]


def q4_0(block: bytes) -> Values:
    low, high = _nibbles(block[2:18])
    return [f32(q - 8) * _half(block, 0) for q in low + high]


def q4_1(block: bytes) -> Values:
    low, high = _nibbles(block[4:20])
    return [f32(q) * _half(block, 0) + _half(block, 2) for q in low + high]


def _five_bits(high_bits: bytes, quants: bytes) -> list[int]:
    bits = int.from_bytes(high_bits, "little")
    low, high = _nibbles(quants)
    return [q | (bits >> j & 1) << 4 for j, q in enumerate(low + high)]


def q5_0(block: bytes) -> Values:
    return [f32(q - 16) * _half(block, 0) for q in _five_bits(block[2:6], block[6:22])]


def q5_1(block: bytes) -> Values:
    return [f32(q) * _half(block, 0) + _half(block, 2) for q in _five_bits(block[4:8], block[8:24])]


def q8_0(block: bytes) -> Values:
    return [f32(q) * _half(block, 0) for q in np.frombuffer(block[2:34], dtype=np.int8)]


def _scale_min(j: int, q: bytes) -> tuple[int, int]:
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return q[j + 4] & 15 | (q[j - 4] >> 6) << 4, q[j + 4] >> 4 | (q[j] >> 6) << 4


def _k_halves(block: bytes, quants: bytes, extra: Callable[[int, int], int]) -> Iterator[np.float32]:
    """Q4_K and Q5_K: eight groups of 32; extra(group, l) is the fifth bit's value."""
    for group in range(8):
        scale, minimum = _scale_min(group, block[4:16])
        d, m = _half(block, 0) * f32(scale), _half(block, 2) * f32(minimum)
        for item in range(32):
            byte = quants[group // 2 * 32 + item]
            q = byte & 15 if group % 2 == 0 else byte >> 4
            yield d * f32(q + extra(group, item)) - m


def q4_k(block: bytes) -> Values:
    return list(_k_halves(block, block[16:144], lambda group, item: 0))


def q5_k(block: bytes) -> Values:
    high = block[16:48]
    return list(_k_halves(block, block[48:176], lambda group, item: 16 if high[item] >> group & 1 else 0))


def q6_k(block: bytes) -> Values:
    low, high, d = block[:128], block[128:192], _half(block, 208)
    scales = np.frombuffer(block[192:208], dtype=np.int8)
    out = [f32(0)] * 256
    for half in range(2):
        ql, qh, sc = low[64 * half :], high[32 * half :], scales[8 * half :]
        for item in range(32):
            nibbles = ql[item] & 15, ql[item + 32] & 15, ql[item] >> 4, ql[item + 32] >> 4
            for part, nibble in enumerate(nibbles):
                q = (nibble | (qh[item] >> 2 * part & 3) << 4) - 32
                out[128 * half + 32 * part + item] = d * f32(sc[item // 16 + 2 * part]) * f32(q)
    return out


DECODERS: dict[Kind, Callable[[bytes], Values]] = {
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q5_0: q5_0,
    Kind.Q5_1: q5_1,
    Kind.Q8_0: q8_0,
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
}
HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""K-quants, which gguf cannot quantise to: where their float16 scales lie in a block."""


def quantise(values: np.ndarray, kind: Kind) -> np.ndarray:
    """float32 [N, K] -> bytes [N, row bytes]. K-quants: random bits of `values`' shape."""
    if kind not in HALVES:
        return np.asarray(gguf.quants.quantize(values, kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(values.size)
    count = values.size // block
    data = generator.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = generator.uniform(1e-4, 2e-4, count).astype(np.float16) / np.float16(4)
        data[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return data.reshape(values.shape[0], -1)


def dequantise(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes [N, row bytes] -> float32 [N, K], block by block."""
    decode = DECODERS[kind]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = [
        [value for at in range(0, len(row), size) for value in decode(row[at : at + size].tobytes())]
        for row in data
    ]
    return np.array(rows, dtype=np.float32)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{NAMES[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k of llama models."""
    half = rows.shape[0] // heads // 2
    order = [h * 2 * half + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)]
    return rows[order]


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    """The `<architecture>.*` keys of a transformers configuration."""
    prefix = architecture + "."
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    ids = {
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    return {prefix + key: value for key, value in values.items()} | ids


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> None:
    """Writes `model` with its matrices in `kind`, and puts the rounded values back into it.

    metadata overrides keys (None removes one); extra tensors are float32; `drop` names GGUF tensors left out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata_of(model.config, architecture) | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, data, stored in _encoded(model, kind):
        if name not in drop:
            data = _llama_order(name, data, model.config) if architecture == "llama" else data
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_order(name: str, data: np.ndarray, config: Any) -> np.ndarray:
    if ".attn_q." in name:
        return interleaved(data, config.num_attention_heads)
    return interleaved(data, config.num_key_value_heads) if ".attn_k." in name else data


def _encoded(model: Any, kind: Kind) -> Iterator[tuple[str, np.ndarray, Kind]]:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy()
            if values.ndim == 1 or kind == Kind.F32:
                yield gguf_name(name), values, Kind.F32
                continue
            if kind in DECODERS:
                data = quantise(values, kind)
                rounded = dequantise(data, kind)
            else:
                dtype = torch.float16 if kind == Kind.F16 else torch.bfloat16
                narrow = parameter.to(dtype)
                data, rounded = narrow.view(torch.uint8).numpy(), narrow.float().numpy()
                data = data.view(np.float16) if kind == Kind.F16 else data
            yield gguf_name(name), data, kind
            parameter.copy_(torch.from_numpy(rounded))
