"""Request bodies of the OpenAI dialects: types, ranges and the rule for fields we do not know.

A field that would change the output and is not implemented is refused (HTTP 400); one that cannot change it,
or holds its neutral value, is ignored. Nothing is dropped silently that could be noticed in the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.messages import MAX_MESSAGES, MAX_TOOLS, Message, ResponseFormat, Tool

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
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
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
    max_tokens: Annotated[int, Field(ge=0)] | None = None
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    deterministic: bool | None = None
    is_deterministic: bool | None = None
    receipt: bool | ReceiptOptions | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream and self.prompt_logprobs is not None:
            raise _about("prompt_logprobs", "not available in a stream; leave stream out, or use echo")
        a, b = self.deterministic, self.is_deterministic
        if a is not None and b is not None and a != b:
            raise _about(
                "is_deterministic",
                "deterministic and is_deterministic are two names of one field and disagree",
            )
        return self

    @property
    def asks_for_determinism(self) -> bool | None:
        """The field under either name; None: the request does not say."""
        return self.deterministic if self.deterministic is not None else self.is_deterministic

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
    echo: bool | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class TemplateOptions(BaseModel):
    """How the model's chat template is to render the messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    date: Annotated[str, Field(pattern=r"^[12]\d{3}-[01]\d-[0-3]\d$")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateOptions:
        if self.continue_final_message and self.add_generation_prompt:
            raise _about("continue_final_message", "excludes add_generation_prompt: true")
        return self


class ChatBody(TemplateOptions, GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise _about("top_logprobs", "needs logprobs: true")
        return self


class TokenizeBody(TemplateOptions):
    """POST /tokenize: a text, or messages as they would become a prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise _about("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
