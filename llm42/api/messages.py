"""Chat messages and tools as the OpenAI dialect writes them, and what a chat template gets to see of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from llm42.api.body_limits import ClosedPart, Part

MAX_MESSAGES = 4096
MAX_TOOLS = 128


BEYOND_TEMPLATES = {
    "prefix": ": use continue_final_message",
    "partial": ": use continue_final_message",
    "function_call": ": use tool_calls",
    **dict.fromkeys(("audio", "images", "image", "image_url", "videos", "files"), ": only text is read"),
}
"""Keys of a message that mean something whether or not the chat template reads them; what to do instead."""


class TextPart(Part):
    """A text part of a message's content; other kinds of part are refused."""

    type: Literal["text"]
    text: str


class CalledFunction(Part):
    """What a tool call calls; `arguments` is JSON in a string. Templates see nothing else of it."""

    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_json(self) -> CalledFunction:
        if not isinstance(_json_of(self.arguments), dict):
            raise ValueError("a tool call's 'arguments' must be a JSON object in a string")
        return self


class ToolCall(Part):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, which is what templates write out again."""
        called = {"name": self.function.name, "arguments": _json_of(self.function.arguments)}
        made: dict[str, Any] = {"type": self.type, "function": called}
        return made if self.id is None else made | {"id": self.id}


class Message(Part):
    """One chat message. Keys that are not here go to the chat template as they are: one that it reads takes
    effect, and one that it does not read cannot change a token. Empty ones are left out."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _nothing_dropped(self) -> Message:
        for key in self._further():
            if key in BEYOND_TEMPLATES:
                raise ValueError(f"a message's '{key}' is not supported{BEYOND_TEMPLATES[key]}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the assistant has 'tool_calls'")
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs 'content'")
        return self

    @property
    def text(self) -> str:
        """The content; parts are joined by newlines, as vLLM does."""
        if isinstance(self.content, list):
            return "\n".join(p.text for p in self.content)
        return self.content or ""

    def for_template(self, further: bool = True) -> dict[str, Any]:
        """What the chat template sees: "developer" is "system", content is plain text, the rest only if
        given. further: keys that are not fields here, too."""
        made: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        made |= {key: value for key, value in optional.items() if value is not None}
        return made | self._further() if further else made

    def _further(self) -> dict[str, Any]:
        return {key: value for key, value in (self.model_extra or {}).items() if not _is_empty(value)}


class Function(Part):
    """A function that the model may call; `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(ClosedPart):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _without_bookkeeping(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if k != "cache_control" and not _is_empty(v)}

    def for_template(self) -> dict[str, Any]:
        """The tool as it was sent."""
        return self.model_dump(exclude_none=True)


class JsonSchema(Part):
    """`response_format.json_schema`."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(ClosedPart):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' goes with type 'json_schema', and only with it")
        return self

    def constraint(self) -> str | None:
        """The JSON schema that the output must follow; None: any text will do."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
