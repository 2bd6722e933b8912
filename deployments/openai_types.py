"""Request bodies of the OpenAI dialects: types, ranges and the rule for fields we do not know.

A field that would change the output and is not implemented is refused (HTTP 400); one that cannot change it,
or holds its neutral value, is ignored. Nothing is dropped silently that could be noticed in the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls", "request_id", "priority",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Accepted and ignored: they cannot change a token."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "prompt_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Not implemented; accepted only with these values (or null), which change nothing."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _about(param: str, message: str) -> PydanticCustomError:
    """An error of the body as a whole that names the field to look at."""
    return PydanticCustomError("value_error", "{text}", {"text": message, "param": param})


class StreamOptions(BaseModel):
    """`stream_options`; other keys of it concern only the framing of chunks and are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class ReceiptOptions(BaseModel):
    """`receipt`: what a receipt has besides hashes (llm42/receipt.py). true means: as here."""

    model_config = ConfigDict(strict=True, extra="forbid")
    prompt: Literal["tokens", "hash"] = "tokens"
    output: Literal["tokens", "hash"] = "hash"


class GenerationBody(BaseModel):
    """What both endpoints share. None always means: the default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    deterministic: bool | None = None
    is_deterministic: bool | None = None
    receipt: bool | ReceiptOptions | None = None

    @model_validator(mode="after")
    def _one_name_one_value(self) -> GenerationBody:
        a, b = self.deterministic, self.is_deterministic
        if a is not None and b is not None and a != b:
            raise _about(
                "is_deterministic",
                "deterministic and is_deterministic are two names of one field and disagree",
            )
        return self

    def wants_determinism(self, default: bool) -> bool:
        """The field under either name, else the server's default."""
        for value in (self.deterministic, self.is_deterministic):
            if value is not None:
                return value
        return default

    def unsupported(self) -> str | None:
        """The first extra field that would change the output, or None."""
        for name, value in (self.model_extra or {}).items():
            if name in HARMLESS or value is None or value in NEUTRAL.get(name, ()):
                continue
            return name
        return None


class CompletionBody(GenerationBody):
    """POST /v1/completions. The prompt is text, token ids, or a list of either."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(BaseModel):
    """A text part of a message's content; other kinds of part are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message. Tool calls and tool results are not implemented and refused."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="after")
    def _nothing_dropped(self) -> Message:
        for key, value in (self.model_extra or {}).items():
            if value not in (None, [], ""):
                raise ValueError(f"a message's '{key}' is not supported")
        return self

    def for_template(self) -> dict[str, str]:
        """What the chat template sees: role ("developer" is "system"), plain text, and the name if given."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise _about("top_logprobs", "needs logprobs: true")
        return self
