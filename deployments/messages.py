"""Chat messages and tools as the OpenAI dialect writes them, and what a chat template gets to see of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from deployments.bodies import ClosedPart, Part

MAX_MESSAGES = 4096
MAX_TOOLS = 128


class TextPart(Part):
    """A text part of a message's content; other kinds of part are refused."""

    type: Literal["text"]
    text: str


class CalledFunction(ClosedPart):
    """What a tool call calls; `arguments` is JSON in a string."""

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
    """One chat message."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _nothing_dropped(self) -> Message:
        for key, value in (self.model_extra or {}).items():
            if value not in (None, [], ""):
                raise ValueError(f"a message's '{key}' is not supported")
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

    def for_template(self) -> dict[str, Any]:
        """What the chat template sees: "developer" is "system", content is plain text, the rest only if
        given."""
        made: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return made | {key: value for key, value in optional.items() if value is not None}


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


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
