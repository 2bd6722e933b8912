"""Bodies that are cheap to send and were dear to read: what the event loop does meanwhile is measured in
test_loop_gaps.py and benchmarks/service/loop_gaps.py."""

from __future__ import annotations

import json
from collections.abc import Iterator

CHAT, TEXT, AUDIT = "/v1/chat/completions", "/v1/completions", "/v1/audit"


def _repeated(piece: str, size: int) -> str:
    return ",".join([piece] * (size // (len(piece) + 1)))


def _numbered(form: str, size: int) -> str:
    return ",".join(form % i for i in range(size // (len(form) + 4)))


def _field(name: str, value: str) -> str:
    return f'"{name}":{value}'


def _chat(model: str, more: str, messages: str = '[{"role":"user","content":"Hi"}]') -> str:
    return f'{{"model":{json.dumps(model)},"max_tokens":1,"messages":{messages},{more}}}'


def _text(model: str, more: str) -> str:
    return f'{{"model":{json.dumps(model)},"max_tokens":1,{more}}}'


def bodies(model: str, size: int) -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body) of about `size` bytes each."""
    lists, objects = f"[{_repeated('[]', size)}]", f"[{_repeated('{}', size)}]"
    ids, fields = f"[{_repeated('7', size)}]", _numbered('"k%d":0', size)
    deep = "[" * 90 + "]" * 90
    message = '{"role":"user","content":"a","name":"b"}'
    part = '{"type":"text","text":"a"}'
    call = '{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}'
    named = "{" + fields + "}"
    made: dict[str, tuple[str, str]] = {
        "empty lists in metadata": (CHAT, _chat(model, _field("metadata", lists))),
        "deep lists in metadata": (CHAT, _chat(model, _field("metadata", f"[{_repeated(deep, size)}]"))),
        "empty objects in user": (TEXT, _text(model, f'"prompt":"Hi",{_field("user", objects)}')),
        "unknown fields": (CHAT, _chat(model, fields)),
        "unknown fields of completions": (TEXT, _text(model, f'"prompt":"Hi",{fields}')),
        "a prompt of ids": (TEXT, _text(model, _field("prompt", ids))),
        "prompts of empty lists": (TEXT, _text(model, _field("prompt", lists))),
        "prompts of texts": (TEXT, _text(model, _field("prompt", f"[{_repeated(chr(34) * 2, size)}]"))),
        "floats as a prompt": (TEXT, _text(model, _field("prompt", f"[1,{_repeated('1e-3', size)}]"))),
        "a text of spaces": (TEXT, _text(model, _field("prompt", json.dumps(" " * size)))),
        "a text of accents": (TEXT, _text(model, _field("prompt", '"' + "\\u00e9" * (size // 6) + '"'))),
        "a text of line ends": (TEXT, _text(model, _field("prompt", '"' + "\\n" * (size // 2) + '"'))),
        "logit_bias": (CHAT, _chat(model, _field("logit_bias", "{" + _numbered('"%d":0', size) + "}"))),
        "stop strings": (CHAT, _chat(model, _field("stop", f"[{_repeated(chr(34) + 'a' + chr(34), size)}]"))),
        "stop ids": (CHAT, _chat(model, _field("stop_token_ids", ids))),
        "messages": (CHAT, _chat(model, '"n":1', f"[{_repeated(message, size)}]")),
        "parts of a message": (
            CHAT, _chat(model, '"n":1', f'[{{"role":"user","content":[{_repeated(part, size)}]}}]')
        ),
        "tool calls": (
            CHAT, _chat(model, '"n":1', f'[{{"role":"assistant","tool_calls":[{_repeated(call, size)}]}}]')
        ),
        "fields of a message": (CHAT, _chat(model, '"n":1', f'[{{"role":"user","content":"a",{fields}}}]')),
        "a tool's schema": (
            CHAT,
            _chat(
                model,
                '"tools":[{"type":"function","function":{"name":"f","parameters":' + named + "}}]",
            ),
        ),
        "an answer's schema": (
            CHAT,
            _chat(
                model,
                '"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":' + named + "}}",
            ),
        ),
        "template variables": (CHAT, _chat(model, _field("chat_template_kwargs", named))),
        "tool_choice": (CHAT, _chat(model, _field("tool_choice", named))),
        "empty records": (AUDIT, f'{{"records":{objects}}}'),
        "records of lists": (AUDIT, f'{{"records":[{{"request":{lists}}}]}}'),
        "manifests": (AUDIT, f'{{"records":[{{}}],"manifests":{objects}}}'),
        "unknown fields of an audit": (AUDIT, "{" + fields + "}"),
        "a text to tokenize": ("/tokenize", f'{{"prompt":"{"é" * (size // 2)}"}}'),
        "a text in words to tokenize": ("/tokenize", f'{{"prompt":{json.dumps("one two " * (size // 8))}}}'),
        "token texts": (
            "/tokenize", f'{{"return_token_strs":true,"prompt":{json.dumps("q9" * (size // 2))}}}'
        ),
        "messages to tokenize": ("/tokenize", f'{{"messages":[{_repeated(message, size)}]}}'),
        "ids to detokenize": ("/detokenize", f'{{"tokens":{ids}}}'),
        "unknown fields to detokenize": ("/detokenize", "{" + fields + "}"),
        "no JSON": (CHAT, "[" * size),
        "an object that does not end": (CHAT, "{" + fields),
        "a list": (CHAT, lists),
    }  # fmt: skip
    for name, (path, body) in made.items():
        yield name, path, body.encode()
