"""Chat templates: Jinja in a sandbox, with a fixed date: a prompt must not depend on the day of rendering."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm42.models.errors import ModelFileError
from llm42.protocol import RequestRejected

FIXED_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
"""What templates that ask for today's date get unless the request says a date: a reply must be reproducible
tomorrow. It is the date that Llama 3's own template falls back to."""


_END_OF_FINAL = "\ue000end of the final message\ue000"
"""Marks where a message ends that is to be continued; private-use characters, which no message holds."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text to train on; here it is just its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """The nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `special`: the token strings that templates may use (bos_token, ...)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = FIXED_DATE.strftime
        self.source, self._special = source, dict(special)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template cannot be parsed: line {error.lineno}: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        date: datetime.date | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """messages: OpenAI's, content a string or a list of text parts. date: today's, for templates that ask
        for it (default: FIXED_DATE). continue_final_message: the text ends where the last message's content
        does. kwargs: further variables of the template. Raises RequestRejected.
        """
        plain = [_plain_message(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            plain[-1] = plain[-1] | {"content": plain[-1]["content"] + _END_OF_FINAL}
        variables = (
            self._special | kwargs | {"messages": plain, "add_generation_prompt": add_generation_prompt}
        )
        if date is not None:
            midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
            variables["strftime_now"] = midnight.strftime
        text = self._render(variables)
        if not continue_final_message:
            return text
        if text.count(_END_OF_FINAL) != 1:
            raise RequestRejected(
                "the model's chat template changes the last message, so that it cannot be continued",
                "continue_final_message",
            )
        return text[: text.index(_END_OF_FINAL)]

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(**variables)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise RequestRejected(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Without None values; a list of text parts becomes one string (joined by newlines)."""
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise RequestRejected(f"messages[{index}].role must be a string", f"messages[{index}].role")
    content = plain.setdefault("content", "")
    if isinstance(content, list):
        where = f"messages[{index}].content"
        for part in content:
            if (
                not isinstance(part, Mapping)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise RequestRejected(f"{where}: only parts of type text are supported", where)
        plain["content"] = "\n".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise RequestRejected(f"messages[{index}].content must be a string", f"messages[{index}].content")
    return plain


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
