"""Chat templates: Jinja in a sandbox, with a fixed date: a prompt must not depend on the day of rendering."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jinja2

from llm42.errors import RequestRejected
from llm42.text.template_dates import strftime
from llm42.text.template_sandbox import Sandbox, Unrepeatable

FIXED_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
"""What templates that ask for today's date get unless the request says a date: a reply must be reproducible
tomorrow. It is the date that Llama 3's own template falls back to."""


_END_OF_FINAL = "\ue000end of the final message\ue000"
"""Marks where a message ends that is to be continued; private-use characters, which no message holds."""


class ChatTemplate:
    """One compiled template. `special`: the token strings that templates may use (bos_token, ...)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source, self._special = source, dict(special)
        self._template, self.variables = Sandbox().compiled(source)

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
        today = FIXED_DATE.date() if date is None else date
        midnight = datetime.datetime.combine(today, datetime.time(), datetime.UTC)
        variables["strftime_now"] = partial(strftime, midnight)
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
        except Unrepeatable as error:
            raise RequestRejected(
                f"the model's chat template is not reproducible with these messages: {error}", "messages"
            ) from error
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
