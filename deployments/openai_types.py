"""Request bodies of the OpenAI dialects: types, ranges and the rule for fields we do not know.

A field that would change the output and is not implemented is refused (HTTP 400); one that cannot change it,
or holds its neutral value, is ignored. Nothing is dropped silently that could be noticed in the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from deployments.bodies import ClosedPart, Part, about, at_most
from deployments.messages import MAX_MESSAGES, MAX_TOOLS, Message, ResponseFormat, Tool

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 1024

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
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _form(prompt: Any) -> str | None:
    """The form that a prompt is held against: that of its first element."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    return {str: "texts", int: "ids", list: "batch"}.get(type(prompt[0])) if prompt else "texts"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("batch")],
    Discriminator(
        _form,
        custom_error_type="prompt_form",
        custom_error_message="Input should be a text, a list of token ids, or a list of either",
    ),
]


class StreamOptions(Part):
    """`stream_options`; other keys of it concern only the framing of chunks and are ignored."""

    include_usage: bool = False


class ReceiptOptions(ClosedPart):
    """`receipt`: what a receipt has besides hashes (llm42/receipt.py). true means: as here."""

    prompt: Literal["tokens", "hash"] = "tokens"
    output: Literal["tokens", "hash"] = "hash"


Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[dict[str, Bias], at_most(MAX_BIASES), Field(max_length=MAX_BIASES)]


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
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    deterministic: bool | None = None
    is_deterministic: bool | None = None
    receipt: bool | ReceiptOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream and self.prompt_logprobs is not None:
            raise about("prompt_logprobs", "not available in a stream; leave stream out, or use echo")
        a, b = self.deterministic, self.is_deterministic
        if a is not None and b is not None and a != b:
            raise about(
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

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class TemplateOptions(BaseModel):
    """How the model's chat template is to render the messages."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    date: Annotated[str, Field(pattern=r"^[12]\d{3}-[01]\d-[0-3]\d$")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateOptions:
        if self.continue_final_message and self.add_generation_prompt:
            raise about("continue_final_message", "excludes add_generation_prompt: true")
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
            raise about("top_logprobs", "needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise about(
                "max_completion_tokens",
                "max_tokens and max_completion_tokens are two names of one field and disagree",
            )
        return self


class TokenizeBody(ClosedPart, TemplateOptions):
    """POST /tokenize: a text, or messages as they would become a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise about("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(ClosedPart):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=1 << 20)]
