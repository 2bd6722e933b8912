"""Hugging Face directories: shards, and each way the files can be wrong, file and tensor in the message."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llm42.checkpoint.load import load_model
from llm42.errors import LLM42Error, ModelFileError, UnsupportedModel
from llm42.models.weights import LoadedModel
from tests.unit.model_oracle import our_logits, save_tiny, tokens_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory, "llama")
    return directory


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "llama", max_shard_size="50KB")
    return tmp_path


def load(directory: Path) -> LoadedModel:
    return load_model(directory, "float32", "cpu", 64)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrites the weights."""
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def refuses(directory: Path, *words: str) -> None:
    """Loading fails, and the message holds every word."""
    with pytest.raises(ModelFileError) as caught:
        load(directory)
    for word in words:
        assert word in str(caught.value)


def test_shards_give_the_same_model(original: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    tokens = tokens_of(20)
    assert torch.equal(our_logits(load(original), tokens), our_logits(load(sharded), tokens))


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refuses(sharded, shard.name, INDEX)


def test_index_that_places_a_tensor_wrongly(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    right = index["weight_map"][DOWN]
    index["weight_map"][DOWN] = wrong = next(name for name in files if name != right)
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(sharded, wrong, DOWN)


def test_index_that_leads_out_of_the_directory(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][DOWN] = "../other.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(sharded, "other.safetensors")


def test_missing_tensor(copy: Path) -> None:
    change(copy, lambda tensors: tensors.pop(DOWN))  # type: ignore[arg-type, return-value]
    refuses(copy, WEIGHTS, DOWN, "missing")


def test_wrong_shape(copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({DOWN: tensors[DOWN][:, :-1].contiguous()}))
    refuses(copy, WEIGHTS, DOWN, "(48, 79)", "(48, 80)")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "x"]
)
def test_unexpected_tensor(copy: Path, name: str) -> None:
    change(copy, lambda tensors: tensors.update({name: torch.zeros(48)}))
    refuses(copy, WEIGHTS, name, "unexpected")


def test_an_old_rotary_buffer_is_allowed(copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(copy, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(copy)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_may_be_stored_when_it_equals_the_embedding(tmp_path: Path, equal: bool) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    change(tmp_path, lambda t: t.update({"lm_head.weight": t[name].clone() if equal else t[name] + 1}))
    if equal:
        model = load(tmp_path)
        assert model.weights.lm_head is model.weights.embed
    else:
        refuses(tmp_path, "lm_head.weight")


@pytest.mark.parametrize("share", [0.0, 0.005, 0.05, 0.5, 0.999])
def test_truncated_file(copy: Path, share: float) -> None:
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[: int(len(data) * share)])
    in_header = len(data) * share < 8 + int.from_bytes(data[:8], "little")
    refuses(copy, WEIGHTS, "truncated", "header" if in_header else "tensor ")


def refusal(directory: Path) -> str | None:
    """The message of a typed error; None: the files load. Any other exception fails the test."""
    try:
        load(directory)
    except LLM42Error as error:
        return str(error)
    return None


def test_damaged_headers_give_typed_errors(copy: Path) -> None:
    """Any byte of the header may be wrong: the file loads, or the error is ours."""
    good, generator, refused = (copy / WEIGHTS).read_bytes(), random.Random(5), 0
    header = 8 + int.from_bytes(good[:8], "little")
    for _ in range(200):
        data = bytearray(good)
        data[generator.randrange(header)] = generator.choice([0, 255, generator.randrange(256), *b"09"])
        (copy / WEIGHTS).write_bytes(data)
        message = refusal(copy)
        assert message is None or WEIGHTS in message
        refused += message is not None
    assert refused > 50


def test_garbage_instead_of_weights(copy: Path) -> None:
    (copy / WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not json at all!" + bytes(100))
    refuses(copy, WEIGHTS, "JSON")


def test_a_type_that_needs_a_dequantiser_is_refused(copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.float8_e4m3fn)}))
    with pytest.raises(UnsupportedModel, match=re.escape(DOWN)):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_in_half_precision(copy: Path, original: Path, dtype: torch.dtype) -> None:
    change(copy, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    assert torch.equal(load(copy).weights.embed, load(original).weights.embed.to(dtype).float())


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_config_that_cannot_be_read(copy: Path, content: str | None) -> None:
    (copy / "config.json").unlink()
    if content is not None:
        (copy / "config.json").write_text(content)
    refuses(copy, "config.json")


def test_nothing_there(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "nowhere", "no such")


def test_other_weight_formats_are_not_read(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "pytorch_model.bin")
    refuses(copy, WEIGHTS, "neither")


def test_more_positions_than_the_model_has(copy: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(copy, "float32", "cpu", 257)
    assert caught.value.field == "max_model_len"


def test_generation_config_names_the_end_of_text(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert load(copy).config.eos_token_ids == (5, 7)


def test_identity_follows_content_and_configuration(original: Path, copy: Path) -> None:
    identity = load(original).identity
    assert load(copy).identity == identity  # not the place
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 2e-5}))
    assert load(copy).identity != identity
    (copy / "config.json").write_text(json.dumps(config | {"initializer_range": 0.5}))
    assert load(copy).identity == identity
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS).write_bytes(data)
    assert load(copy).identity != identity
