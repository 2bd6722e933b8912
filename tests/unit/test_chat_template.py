"""Chat templates: equal to transformers, reproducible, sandboxed, errors as the client's."""

from __future__ import annotations

from typing import Any

import pytest

from llm42.errors import RequestRejected
from llm42.text.chat_template import ChatTemplate
from llm42.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "What is 2 + 2? <b>&\"'</b> 日本"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 3 + 3?", "name": None}],
]
LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- generation %}{{ message.role + ": " + message.content | trim }}{% endgeneration %}
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
Today: {{ date_string }}{% if add_generation_prompt %} >{% endif %}"""


@pytest.mark.parametrize("messages", CHATS, ids=len)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_equals_transformers(
    messages: list[dict[str, Any]], prompt: bool, ours: Tokenizer, theirs: Any
) -> None:
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_a_template_with_everything_equals_transformers(ours: Tokenizer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"tools": [{"name": "f", "text": "<ü>"}], "date_string": "01 Feb 2025", "bos_token": "<s>"}
    messages = [*CHATS[1], {"role": "tool", "content": "hidden"}]
    rendered, _ = render_jinja_template(
        [messages], chat_template=LLAMA_LIKE, add_generation_prompt=True, **variables
    )
    template = ChatTemplate(LLAMA_LIKE, {"bos_token": "<s>"})
    assert (
        template.render(messages, True, **{k: v for k, v in variables.items() if k != "bos_token"})
        == rendered[0]
    )


def test_today_is_always_the_same_day() -> None:
    assert "Today: 26 Jul 2024 >" in ChatTemplate(LLAMA_LIKE, {"bos_token": ""}).render([USER], True)


def test_text_parts_are_joined(ours: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = ours.apply_chat_template([{"role": "user", "content": "a\nb"}])
    assert ours.apply_chat_template([{"role": "user", "content": parts}]) == joined


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content"),
        ({"content": "a"}, "messages[1].role"),
        ({"role": 3, "content": "a"}, "messages[1].role"),
    ],
)
def test_messages_that_are_no_text_name_the_parameter(
    message: dict[str, Any], param: str, ours: Tokenizer
) -> None:
    with pytest.raises(RequestRejected) as caught:
        ours.apply_chat_template([USER, message])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no.such }}", "no such"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_what_a_template_refuses_is_a_rejected_request(source: str, word: str) -> None:
    with pytest.raises(RequestRejected, match=r"chat template") as caught:
        ChatTemplate(source, {}).render([USER], True)
    assert caught.value.param == "messages"
    assert word.split()[0] in str(caught.value)


def test_a_model_without_a_template(ours: Tokenizer) -> None:
    with pytest.raises(RequestRejected, match="/v1/completions"):
        Tokenizer(ours.backend, [2]).apply_chat_template([USER])
