"""Request bodies of the OpenAI dialects: types, ranges, and fields that go together.

other_fields.py has the rule for those that are not here.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from llm42.api.body_limits import ClosedPart, Part, about, at_most, none_for
from llm42.api.messages import MAX_MESSAGES, MAX_TOOLS, Message, ResponseFormat, Tool
from llm42.api.other_fields import is_neutral, refusal

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]


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
        custom_error_message="must be a text, a list of token ids, or a list of either",
    ),
]


class StreamOptions(Part):
    """`stream_options`; other keys of it concern only the framing of chunks and are ignored. A whole reply
    has its usage in any case."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


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
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
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
    stop: Stop | None = None
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
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise about(
                "max_completion_tokens",
                "max_tokens and max_completion_tokens are two names of one field and disagree",
            )
        if self.min_tokens and self.max_tokens == 0:
            raise about("min_tokens", f"{self.min_tokens} is above max_tokens 0")
        return self

    @property
    def asks_for_determinism(self) -> bool | None:
        """The field under either name; None: the request does not say."""
        return self.deterministic if self.deterministic is not None else self.is_deterministic

    def unsupported(self) -> tuple[str, str] | None:
        """(field, message) of the first extra field that may not be ignored, or None."""
        extra = dict(self.model_extra or {})
        if "best_of" in extra and extra["best_of"] == (self.n or 1) and type(extra["best_of"]) is int:
            del extra["best_of"]
        fields = set(type(self).model_fields)
        return refusal(extra, elsewhere=_all_fields() - fields, fields=fields)


class CompletionBody(GenerationBody):
    """POST /v1/completions. The prompt is text, token ids, or a list of either."""

    prompt: Prompt
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, none_for(False)] = None
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
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise about("top_logprobs", "needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _calls_are_not_counted(self) -> ChatBody:
        if self.parallel_tool_calls is False and self.tools and self.tool_choice != "none":
            raise about("parallel_tool_calls", "the calls cannot be kept to one here; leave it out")
        return self


class TokenizeBody(Part, TemplateOptions):
    """POST /tokenize: a text, or messages as they would become a prompt. What would only matter to the output
    is ignored, so that a request's own body can be sent here."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise about("prompt", "give either prompt or messages")
        for name in TemplateOptions.model_fields if self.messages is None else ():
            if not is_neutral(name, getattr(self, name)):  # a text's ids could not show it
                raise about(name, "is for messages; a text is taken as it is")
        return self

    @model_validator(mode="after")
    def _nothing_dropped(self) -> TokenizeBody:
        extra = {k: v for k, v in (self.model_extra or {}).items() if k not in _all_fields()}
        if (found := refusal(extra, fields=type(self).model_fields)) is not None:
            raise about(*found)
        return self


class DetokenizeBody(Part):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=1 << 20)]

    @model_validator(mode="after")
    def _nothing_dropped(self) -> DetokenizeBody:
        if (found := refusal(self.model_extra or {}, fields=type(self).model_fields)) is not None:
            raise about(*found)
        return self


@cache
def _all_fields() -> frozenset[str]:
    return frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)
