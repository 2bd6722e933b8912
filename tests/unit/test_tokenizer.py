"""The tokenizer against transformers and a plain BPE written here; the detokenizer against decode."""

from __future__ import annotations

import copy
import json
import random
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from llm42.errors import ModelFileError, RequestRejected, UnsupportedModel
from llm42.models.gguf.reader import metadata, open_gguf
from llm42.text.detokenizer import Detokenizer
from llm42.text.gguf_tokenizer import build_tokenizer
from llm42.text.tokenizer import Tokenizer
from tests.support import smollm2_file

PATH = smollm2_file()
TEXTS = [
    "Hello, world!",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\r\n",
    "naïve café — 日本語のテキスト, русский текст, العربية, हिन्दी, ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end",
    "\t\ttabs  \n \n x   ",
    "1234567890 3.14159 2026-01-02 0x1F",
    "it's we'll I'VE don't they're",
    'https://example.org/a?b=c&d=%20#e {"k": [1, 2.5e-3, null]}',
    "a" * 300,
    "",
    " ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_transformers(text: str, ours: Tokenizer, theirs: Any) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special=True) == ids  # this model wants no beginning-of-text token
    assert ours.decode(ids, skip_special=False) == text
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


class PlainBPE:
    """SmolLM2's tokenizer as its tokenizer.json has it: numerals alone, GPT-2's pattern, merges."""

    GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, data: dict[str, Any]) -> None:
        self.ids = {token: index for index, token in enumerate(data["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(data["tokenizer.ggml.merges"])}
        spelling = bytes_to_unicode()
        self.spell = lambda text: [spelling[byte] for byte in text.encode()]

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        words = [word for piece in pieces for word in self.GPT2.findall(piece)]
        return [self.ids[token] for word in words for token in self.merge(self.spell(word))]

    def merge(self, parts: list[str]) -> list[str]:
        while True:
            pairs = [(self.ranks.get(pair), at) for at, pair in enumerate(pairwise(parts))]
            ranked = [(rank, at) for rank, at in pairs if rank is not None]
            if not ranked:
                return parts
            at = min(ranked)[1]
            parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


@lru_cache(maxsize=1)
def plain() -> PlainBPE:
    return PlainBPE(metadata(open_gguf(PATH)))


ALPHABET = st.sampled_from(
    [*"abcdefghijklmnopqrstuvwxyzABCXYZ", *"0123456789½²٣", *" \n\t.,'\"<>|_", *"éßñ日本語🙂👩\u200d"]
)
WORDS = st.lists(st.one_of(st.text(ALPHABET), st.sampled_from(["  12", " the", "'ll", "    ", "\n\n", " ½"])))


@settings(max_examples=300, deadline=None)
@given(WORDS.map("".join))
def test_ids_equal_those_of_a_plain_bpe(text: str) -> None:
    tokenizer = loaded()
    ids = tokenizer.encode(text)
    if not set(ids) & tokenizer.special_ids:
        assert ids == plain().encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text


@lru_cache(maxsize=1)
def loaded() -> Tokenizer:
    return Tokenizer.load(PATH)


def test_numerals_stand_alone(ours: Tokenizer) -> None:
    """Here transformers' reading of this GGUF leaves the model's own tokenizer.json (no rule "smollm")."""
    assert ours.encode("  12") == plain().encode("  12")
    assert [ours.decode([token]) for token in ours.encode("  12")] == ["  ", "1", "2"]


# -- detokenisation --


def pushed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> str:
    detokenizer, out, start = Detokenizer(tokenizer, skip), "", 0
    for cut in [*sorted(cuts), len(ids)]:
        out += detokenizer.push(ids[start:cut])
        start = cut
    return out + detokenizer.flush()


IDS = st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 280), st.sampled_from([0, 1, 2, 60000])))


@settings(max_examples=300, deadline=None)
@given(IDS, st.lists(st.integers(0, 20)), st.booleans())
def test_pushes_join_to_the_librarys_decoding(ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = loaded()
    expected = tokenizer.backend.decode([i for i in ids if i < 49152], skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected
    assert pushed(tokenizer, ids, [cut for cut in cuts if cut <= len(ids)], skip) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("aé日🙂\u0301 "), max_size=30))
def test_whole_characters_come_at_once_and_parts_never(text: str) -> None:
    tokenizer = loaded()
    detokenizer, shown, held = Detokenizer(tokenizer), "", b""
    for token in tokenizer.encode(text):
        held += tokenizer.token_bytes(token)
        shown += detokenizer.push([token])
        assert "\ufffd" not in shown
        assert shown == held.decode("utf-8", "ignore")  # all whole characters so far, not one fewer
    assert shown == text
    assert detokenizer.flush() == ""


def test_control_decoding_token_by_token_breaks_characters(ours: Tokenizer) -> None:
    ids = ours.encode("👩‍👩‍👧‍👦")
    assert "".join(ours.decode([token]) for token in ids) != ours.decode(ids)
    assert ours.token_text(ids[-1]) == ours.decode(ids[-1:])


def test_bytes_that_are_no_text_become_replacement_characters(ours: Tokenizer) -> None:
    table = {ours.token_bytes(token): token for token in range(49152)}
    ids = [table[bytes([byte])] for byte in (0xF0, 0x9F, 0x41, 0x80, 0xE6, 0x97)]
    assert ours.decode(ids) == ours.backend.decode(ids) == "\ufffdA\ufffd\ufffd"
    detokenizer = Detokenizer(ours)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "\ufffdA", "\ufffd", "", ""]
    branch = copy.copy(detokenizer)
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")
    assert branch.push([table[b"\xa5"]]) == "日"  # a copy goes its own way


def test_what_is_held_does_not_grow(ours: Tokenizer) -> None:
    detokenizer = Detokenizer(ours)
    generator = random.Random(3)
    for _ in range(2000):
        detokenizer.push([generator.randrange(17, 49152)])
        assert len(detokenizer._held) < 4


# -- SentencePiece with byte fallback --

PIECES = [
    "▁",
    "▁the",
    "▁cat",
    "th",
    "the",
    "▁th",
    "ca",
    "cat",
    "▁c",
    "at",
    "▁ca",
    "日",
    "本",
    "日本",
    *"thecasn.!",
]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SPM_KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
SPM_SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))]


@pytest.fixture(scope="module")
def spm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(SPM_TOKENS)
    writer.add_token_scores(SPM_SCORES)
    writer.add_token_types(SPM_KINDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("text", ["the cat", "the cats sat.", "日本 the 🙂!", "a\nb", "é</s>", ""])
def test_sentencepiece_equals_transformers(text: str, spm_path: Path) -> None:
    ours = Tokenizer.load(spm_path)
    theirs = transformers.AutoTokenizer.from_pretrained(spm_path.parent, gguf_file=spm_path.name)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special=True) == [1, *ids]
    assert ours.decode(ids, skip_special=False) == text
    assert ours.eos_token_ids == (2,)


def test_sentencepiece_keeps_leading_spaces(spm_path: Path) -> None:
    """SentencePiece puts its space in front of any text; transformers' reading of GGUF drops one here."""
    ours = Tokenizer.load(spm_path)
    ids = ours.encode("  the")
    assert [SPM_TOKENS[token] for token in ids] == ["▁", "▁", "▁the"]
    assert ours.decode(ids) == "  the"


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 290), st.sampled_from([3 + byte for byte in "日é🙂".encode()]))),
    cuts=st.lists(st.integers(0, 20)),
    skip=st.booleans(),
)
def test_byte_fallback_pushes_join_to_the_librarys_decoding(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = spm()
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected
    assert pushed(tokenizer, ids, [cut for cut in cuts if cut <= len(ids)], skip) == expected


@lru_cache(maxsize=1)
def spm() -> Tokenizer:
    keys = {"model": "llama", "tokens": SPM_TOKENS, "scores": SPM_SCORES, "token_type": SPM_KINDS}
    data = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer(build_tokenizer("x", data), [2])


# -- files --


def as_directory(tokenizer: Tokenizer, place: Path, **settings: Any) -> Path:
    place.mkdir(exist_ok=True)
    tokenizer.backend.save(str(place / "tokenizer.json"))
    template = tokenizer.chat_template.source if tokenizer.chat_template else None
    config = {**tokenizer.special, "chat_template": template} | settings
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "config.json").write_text(json.dumps({"eos_token_id": [2]}))
    return place


def test_a_directory_gives_the_same_tokenizer(ours: Tokenizer, tmp_path: Path) -> None:
    other = Tokenizer.load(as_directory(ours, tmp_path))
    for text in TEXTS:
        assert other.encode(text) == ours.encode(text)
    assert (other.eos_token_ids, other.vocab_size) == (ours.eos_token_ids, 49152)
    assert other.identity == ours.identity


def test_identity_follows_vocabulary_template_and_ends(ours: Tokenizer, tmp_path: Path) -> None:
    place = as_directory(ours, tmp_path, chat_template="{{ messages }}")
    seen = {ours.identity, Tokenizer.load(place).identity}
    (place / "chat_template.jinja").write_text("other")
    seen.add(Tokenizer.load(place).identity)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert Tokenizer.load(place).eos_token_ids == (0, 2)
    seen.add(Tokenizer.load(place).identity)
    data = json.loads((place / "tokenizer.json").read_text())
    data["model"]["merges"] = data["model"]["merges"][:-1]
    (place / "tokenizer.json").write_text(json.dumps(data))
    seen.add(Tokenizer.load(place).identity)
    assert len(seen) == 5


def test_files_that_cannot_be_read(ours: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    place = as_directory(ours, tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelFileError, match="chat template"):
        Tokenizer.load(place)
    (place / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(place)


@pytest.mark.parametrize(
    ("key", "value"), [("pre", "bloom"), ("pre", None), ("model", "bert"), ("add_eos_token", True)]
)
def test_a_gguf_tokenizer_outside_the_list_is_refused(key: str, value: Any) -> None:
    good = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b"], "merges": []}
    build_tokenizer("x", {f"tokenizer.ggml.{k}": v for k, v in good.items()})
    with pytest.raises(UnsupportedModel) as caught:
        build_tokenizer("x", {f"tokenizer.ggml.{k}": v for k, v in (good | {key: value}).items()})
    assert caught.value.field == f"tokenizer.ggml.{key}"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_other_pre_tokenizers_split_as_transformers_does(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    letters = sorted(bytes_to_unicode().values())
    data = {"model": "gpt2", "pre": pre, "tokens": letters, "merges": []}
    backend = build_tokenizer("x", {f"tokenizer.ggml.{key}": value for key, value in data.items()})
    spelling = bytes_to_unicode()
    for text in TEXTS:
        words = [match.group() for match in regex.finditer(SPLITS[pre], text)]
        expected = ["".join(spelling[byte] for byte in word.encode()) for word in words]
        assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == expected


def test_beginning_of_text() -> None:
    data = {"model": "gpt2", "pre": "llama-bpe", "tokens": ["a", "<s>"], "merges": [], "token_type": [1, 3]}
    for flag, expected in ((None, [1, 0]), (True, [1, 0]), (False, [0])):
        keys = data | {"bos_token_id": 1} | ({} if flag is None else {"add_bos_token": flag})
        backend = build_tokenizer("x", {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
        tokenizer = Tokenizer(backend, [])
        assert tokenizer.encode("a", add_special=True) == expected
        assert tokenizer.encode("a") == [0]


def test_a_lone_surrogate_is_the_clients_mistake(ours: Tokenizer) -> None:
    with pytest.raises(RequestRejected):
        ours.encode("a\ud800b")
