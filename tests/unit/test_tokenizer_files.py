"""A tokenizer's files are honoured or refused by name: nothing that could change an id is passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from llm42.config import Settings
from llm42.errors import ModelFileError, RequestRejected, UnsupportedModel
from llm42.fingerprint.request import request_facts
from llm42.text.gguf_tokenizer import build_tokenizer
from llm42.text.templates import gguf_templates
from llm42.text.tokenizer import Tokenizer
from tests.support import SPECIAL, tiny_tokenizer

Make = Callable[..., Path]
NAMES = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[1]}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(change: Callable[[dict[str, Any]], Any] = lambda _: None, **config: Any) -> Path:
        """A small tokenizer's directory. change: of tokenizer.json; keywords: tokenizer_config.json."""
        data = json.loads(tiny_tokenizer().to_str())
        change(data)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMES | config))
        return tmp_path

    return write


def refused(place: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        Tokenizer.load(place)
    assert str(place) in str(caught.value)
    assert caught.value.field in str(caught.value)
    return caught.value.field


def theirs(place: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(place)


# -- tokenizer.json --


@pytest.mark.parametrize("key", ["dropout", "nbest_size", "alpha"])
def test_encoding_at_random_is_refused(make: Make, key: str) -> None:
    assert refused(make(lambda data: data["model"].update({key: 0.1}))) == f"model.{key}"
    for neutral in (None, 0, 0.0):
        Tokenizer.load(make(lambda data, value=neutral: data["model"].update({key: value})))


def _part(name: str, **content: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data[name] = content

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d["model"].update(future=1), "model.future"),
        (lambda d: d["model"].update(type="WordPiece"), "model.type"),
        (lambda d: d.update(future=1), "future"),
        (lambda d: d["added_tokens"][0].update(future=1), "added_tokens[].future"),
        (lambda d: d["pre_tokenizer"].update(future=1), "pre_tokenizer.future"),
        (
            _part("normalizer", type="Sequence", normalizers=[{"type": "NFC", "x": 1}]),
            "normalizer.normalizers[0].x",
        ),
        (
            _part(
                "post_processor",
                type="TemplateProcessing",
                single=[
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}},
                ],
                pair=[],
                special_tokens={SPECIAL[0]: {"id": SPECIAL[0], "ids": [0], "tokens": [SPECIAL[0]]}},
            ),
            "post_processor",
        ),
    ],
)
def test_what_the_library_would_drop_is_refused(make: Make, change: Any, field: str) -> None:
    assert refused(make(change)) == field


def test_old_spellings_are_read(make: Make) -> None:
    old = {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True, "str_rep": "\u2581"}

    def change(data: dict[str, Any]) -> None:
        data["pre_tokenizer"] = old
        data["model"]["byte_fallback"] = True
        data["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}

    Tokenizer.load(make(change))


def test_an_added_token_with_another_id_is_refused(make: Make) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": 600, "content": "<|new|>", "special": True, **flags}
    with pytest.raises(ModelFileError, match=r"<\|new\|>.*600.*512"):
        Tokenizer.load(make(lambda data: data["added_tokens"].append(token)))


def test_holes_count_towards_the_size(make: Make) -> None:
    def change(data: dict[str, Any]) -> None:
        token = next(t for t, i in data["model"]["vocab"].items() if i == 300)
        data["model"]["vocab"][token] = 519

    tokenizer = Tokenizer.load(make(change))
    assert tokenizer.vocab_size == 520
    assert tokenizer.decode([300, 519, 515]) == tokenizer.decode([519]) != ""
    assert Tokenizer.load(make(change), vocab_size=640).vocab_size == 640
    with pytest.raises(ModelFileError, match=r"ids to 519.*512 rows"):
        Tokenizer.load(make(change), vocab_size=512)


# -- tokenizer_config.json --


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_eos_token", True),
        ("split_special_tokens", True),
        ("do_lower_case", True),
        ("fix_mistral_regex", True),
        ("auto_map", {"AutoTokenizer": ["own.py", None]}),
        ("sp_model_kwargs", {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}),
        ("tokenize_chinese_chars", True),
        ("add_prefix_space", True),
        ("eos_token", "<|missing|>"),
        ("additional_special_tokens", ["<|missing|>"]),
    ],
)
def test_settings_that_are_not_honoured_are_refused(make: Make, key: str, value: Any) -> None:
    assert refused(make(**{key: value})) == key


def test_settings_that_leave_the_ids_alone_are_accepted(make: Make) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30, "legacy": False,
        "clean_up_tokenization_spaces": True, "padding_side": "left", "add_prefix_space": False,
        "split_special_tokens": False, "add_eos_token": False, "sp_model_kwargs": {}, "pad_token": None,
        "extra_special_tokens": {}, "use_default_system_prompt": False,
    }  # fmt: skip
    plain = Tokenizer.load(make())
    assert Tokenizer.load(make(**settings)).encode("the tea!") == plain.encode("the tea!")


def with_begin(data: dict[str, Any]) -> None:
    """tokenizer.json puts the begin token in front."""
    single = [{"SpecialToken": {"id": SPECIAL[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    named = {SPECIAL[1]: {"id": SPECIAL[1], "ids": [1], "tokens": [SPECIAL[1]]}}
    _part("post_processor", type="TemplateProcessing", single=single, pair=[], special_tokens=named)(data)


@pytest.mark.parametrize(("change", "added"), [(with_begin, (1,)), (lambda _: None, ())])
def test_the_begin_token_is_as_transformers_has_it(make: Make, change: Any, added: tuple[int, ...]) -> None:
    """What tokenizer.json does; settings that contradict it are refused."""
    for place in (make(change), make(change, add_bos_token=bool(added))):
        ours = Tokenizer.load(place)
        assert ours.begin_ids == added
        assert ours.encode("tea", add_special=True) == theirs(place).encode("tea")
    assert refused(make(change, add_bos_token=not added)) == "add_bos_token"


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_flags_of_added_tokens_are_as_transformers_has_them(make: Make, flag: str) -> None:
    """tokenizer_config.json wins over tokenizer.json."""
    entry = {"content": SPECIAL[0], "special": True, "lstrip": False, "rstrip": False, "single_word": False}
    place = make(added_tokens_decoder={"0": entry | {"normalized": False} | {flag: True}})
    text = f"tea  {SPECIAL[0]}  tea{SPECIAL[0]}tea"
    assert Tokenizer.load(place).encode(text) == theirs(place).encode(text, add_special_tokens=False)
    if flag in ("lstrip", "rstrip", "single_word"):
        assert Tokenizer.load(place).encode(text) != Tokenizer.load(make()).encode(text)


def test_an_added_token_that_only_the_settings_know_is_honoured_where_its_id_is(make: Make) -> None:
    entry = {"content": "<|call|>", "special": True, "normalized": False}
    place = make(added_tokens_decoder={"512": entry})
    assert Tokenizer.load(place).encode("a<|call|>") == theirs(place).encode(
        "a<|call|>", add_special_tokens=False
    )
    assert Tokenizer.load(place).encode("a<|call|>")[-1] == 512
    with pytest.raises(ModelFileError, match=r"added_tokens_decoder\.600"):
        Tokenizer.load(make(added_tokens_decoder={"600": entry}))


def test_a_named_token_is_special(make: Make) -> None:
    pair = next(t for t, i in json.loads(tiny_tokenizer().to_str())["model"]["vocab"].items() if i == 300)
    place = make(additional_special_tokens=[pair])
    assert Tokenizer.load(place).decode([300, 301]) == theirs(place).decode(
        [300, 301], skip_special_tokens=True
    )
    assert Tokenizer.load(place).decode([300]) == ""


def test_special_tokens_map_names_what_the_settings_do_not(make: Make) -> None:
    place = make(eos_token=None)
    (place / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": SPECIAL[0]}}))
    assert Tokenizer.load(place).special == {"bos_token": SPECIAL[1], "pad_token": SPECIAL[0]}


# -- chat templates --


def asked(tokenizer: Tokenizer, tools: bool = False) -> str:
    given = {"tools": [{"name": "f"}]} if tools else {}
    return tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], **given)


def test_forms_of_chat_templates(make: Make, tmp_path: Path) -> None:
    place = make()
    with pytest.raises(RequestRejected, match=r"no chat template.*model\.chat_template"):
        asked(Tokenizer.load(place))
    (place / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert asked(Tokenizer.load(place)) == "processor"
    assert asked(Tokenizer.load(make(chat_template="one"))) == "one"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    several = Tokenizer.load(make(chat_template=named))
    assert (asked(several), asked(several, tools=True)) == ("plain", "with [{'name': 'f'}]")
    only = Tokenizer.load(make(chat_template=named[1:]))
    assert asked(only, tools=True).startswith("with")
    with pytest.raises(RequestRejected, match="no chat template"):
        asked(only)
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").write_text("file {{ tools }}")
    (place / "chat_template.jinja").write_text("file")
    files = Tokenizer.load(place)
    assert (asked(files), asked(files, tools=True)) == ("file", "file [{'name': 'f'}]")
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    setting = Tokenizer.load(place, own)
    assert (asked(setting), asked(setting, tools=True)) == ("mine", "mine")
    assert len({t.identity for t in (several, only, files, setting)}) == 4
    with pytest.raises(ModelFileError, match=r"missing\.jinja"):
        Tokenizer.load(place, tmp_path / "missing.jinja")


def test_the_tool_template_is_a_fact_of_the_request_side(make: Make) -> None:
    """A difference in it alone is seen between an ingress and a verifier."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "a"}]
    other = [named[0], named[1] | {"template": "b"}]
    one, two = (
        request_facts(Settings(), Tokenizer.load(make(chat_template=templates)))
        for templates in (named, other)
    )
    assert [key for key in one if one[key] != two[key]] == ["chat_template"]


def test_the_tool_template_is_checked_at_load_too(make: Make) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ lipsum() }}"}]
    with pytest.raises(UnsupportedModel, match="lipsum"):
        Tokenizer.load(make(chat_template=named))


def test_gguf_names_templates_as_well() -> None:
    data = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": [],
    }
    assert gguf_templates(data) == {"default": "a", "tool_use": "b"}


# -- the end of a turn --

TURNS = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "eos", "found"),
    [
        (TURNS, "<|begin|>", (0,)),
        (TURNS, "<|end|>", ()),
        (TURNS.replace("<|end|>", "  <|end|>"), "<|begin|>", (0,)),
        (TURNS.replace("<|end|>", ""), "<|begin|>", ()),
        (TURNS.replace("<|end|>", " the end"), "<|begin|>", ()),
        ("{{ raise_exception('no') }}", "<|begin|>", ()),
        (None, "<|begin|>", ()),
    ],
)
def test_the_templates_own_end_of_turn(
    make: Make, template: str | None, eos: str, found: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.load(make(eos_token=eos, bos_token=None, chat_template=template))
    assert tokenizer.turn_end_ids == found
    assert tokenizer.eos_token_ids == (tokenizer.backend.token_to_id(eos),)


# -- GGUF --

GGUF = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "<s>"], "merges": [], "token_type": [1, 1, 3]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_eos_token", True),
        ("add_sep_token", True),
        ("remove_extra_whitespaces", True),
        ("treat_whitespace_as_suffix", True),
        ("precompiled_charsmap", [1]),
        ("future", 1),
        ("add_bos_token", True),
        ("token_type", [1, 1, 9]),
    ],
)
def test_gguf_keys_that_are_not_honoured_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        build_tokenizer("x", {f"tokenizer.ggml.{k}": v for k, v in (GGUF | {key: value}).items()})
    assert caught.value.field == f"tokenizer.ggml.{key}"


def test_gguf_keys_that_leave_the_ids_alone_are_accepted() -> None:
    more = {"token_type_count": 1, "fim_pre_token_id": 0, "add_sep_token": False, "bos_token_id": 2}
    build_tokenizer(
        "x", {f"tokenizer.ggml.{k}": v for k, v in (GGUF | more | {"add_bos_token": True}).items()}
    )
