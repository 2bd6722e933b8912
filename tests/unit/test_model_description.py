"""What a model's files say besides weights: the context that a scaling reaches, generation_config.json; and
reading them needs neither weights nor PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm42.checkpoint.description import check_model, notes, read_config
from llm42.checkpoint.load import load_model
from llm42.config import ModelSettings
from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models import families
from tests.support import CONFIG, smollm2_file, write_model
from tests.unit.gguf_oracle import write_gguf
from tests.unit.model_oracle import tiny_model

SMOLLM2 = smollm2_file()
TEMPLATE = "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def change(file: Path, **values: Any) -> None:
    data = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(data | values))


# -- the context --

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("named", "scaling", "longest"),
    [
        (2048, YARN, 8192),
        (8192, YARN, 8192),
        (16384, YARN, 16384),
        (2048, YARN | {"factor": 1.5}, 3072),
        (2048, {"rope_type": "yarn", "factor": 4.0}, 8192),
        (2048, {"rope_type": "linear", "factor": 4.0}, 8192),
        (2048, {"type": "linear", "factor": 2.5}, 5120),
        (2048, LLAMA3, 2048),
        (2048, None, 2048),
    ],
)
def test_the_context_is_what_the_scaling_reaches(named: int, scaling: Any, longest: int) -> None:
    config = families.read_config(
        CONFIG | {"max_position_embeddings": named, "rope_scaling": scaling}, "here"
    )
    assert (config.max_position, config.longest_context) == (named, longest)


@pytest.mark.parametrize(
    ("metadata", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 256}, 1024),
        ({"type": "linear", "factor": 2.0}, 512),
        ({"factor": 2.0}, 512),
        ({"type": "none", "factor": 2.0}, 256),
        ({}, 256),
    ],
)
def test_a_gguf_files_context_too(metadata: dict[str, Any], longest: int, tmp_path: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=256)
    path = tmp_path / "tiny.gguf"
    named = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    write_gguf(path, model, "llama", metadata=named)
    assert read_config(path).longest_context == longest
    with pytest.raises(
        UnsupportedModel, match=rf"max_model_len {longest + 1} .* {longest} .*context_length 256"
    ):
        load_model(path, "float32", "cpu", longest + 1)


def test_a_scaled_model_runs_to_its_end(place: Path) -> None:
    change(place / "config.json", rope_scaling=YARN | {"original_max_position_embeddings": 1024})
    assert load_model(place, "float32", "cpu", 4096).weights.cos_sin.shape[0] == 4096
    with pytest.raises(UnsupportedModel) as caught:
        load_model(place, "float32", "cpu", 4097)
    text = str(caught.value)
    assert (
        "4097 is beyond the model's 4096 positions (max_position_embeddings 1024, with its yarn scaling by 4)"
        in text
    )
    assert "lower model.max_model_len" in text


# -- generation_config.json --


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [5]),
        ("begin_suppress_tokens", [5]),
        ("forced_bos_token_id", 5),
        ("forced_eos_token_id", [5]),
        ("bad_words_ids", [[5]]),
        ("sequence_bias", {"5": 1.0}),
        ("stop_strings", ["x"]),
        ("min_new_tokens", 5),
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("guidance_scale", 1.5),
        ("watermarking_config", {}),
        ("some_future_field", 1),
    ],
)
def test_what_would_bind_every_answer_is_refused(place: Path, key: str, value: Any) -> None:
    change(place / "generation_config.json", **{key: value})
    with pytest.raises(UnsupportedModel, match=rf"generation_config\.json: {key}") as caught:
        check_model(ModelSettings(path=str(place), max_model_len=256))
    assert caught.value.field == key


def test_recommended_sampling_is_named_and_not_applied(place: Path) -> None:
    change(place / "generation_config.json", temperature=0.6, top_p=0.9, top_k=None, repetition_penalty=1.0)
    change(
        place / "generation_config.json", do_sample=True, eos_token_id=[0, 7], suppress_tokens=[], num_beams=1
    )
    tokenizer = check_model(ModelSettings(path=str(place), max_model_len=256))
    assert tokenizer.eos_token_ids == read_config(place).eos_token_ids == (0, 7)
    (note,) = notes(place, tokenizer)
    assert "{'temperature': 0.6, 'top_p': 0.9}: not applied" in note


# -- the whole --


def test_an_end_of_turn_that_the_files_do_not_name_is_told(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(place / "tokenizer_config.json", chat_template=TEMPLATE, eos_token="<|begin|>")
    change(place / "config.json", eos_token_id=1)
    check_model(ModelSettings(path=str(place), max_model_len=256))
    assert "ends an answer with '<|end|>' (id 0), which is not among the end tokens [1]" in caplog.text


def test_a_good_model_is_nothing_to_talk_about(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(place / "tokenizer_config.json", chat_template=TEMPLATE)
    for path in (place, SMOLLM2):
        check_model(ModelSettings(path=str(path), max_model_len=256))
    assert not caplog.records


def test_a_part_of_a_gguf_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for key, value in (("split.count", 3), ("general.type", "adapter")):
        write_gguf(path, tiny_model("llama"), "llama", metadata={key: value})
        with pytest.raises(UnsupportedModel, match=key) as caught:
            read_config(path)
        assert caught.value.field == key


def test_a_tokenizer_larger_than_the_model_is_refused(place: Path) -> None:
    change(place / "config.json", vocab_size=500)
    with pytest.raises(ModelFileError, match="ids to 511, the model 500 rows"):
        check_model(ModelSettings(path=str(place), max_model_len=256))


PROGRAM = """
import sys, time
from llm42.config import ModelSettings
from llm42.checkpoint.description import check_model
check_model(ModelSettings(path=sys.argv[1], max_model_len=256))
assert "torch" not in sys.modules, "reading a description loads PyTorch"
"""


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_reading_needs_neither_weights_nor_torch(kind: str, place: Path) -> None:
    (place / "model.safetensors").unlink()
    path = SMOLLM2 if kind == "gguf" else place
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
