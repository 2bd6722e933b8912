"""Prompts of a request as token ids: texts, ids, batches of both, and messages through the chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from llm42.api.messages import Message, Tool
from llm42.api.requests import (
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    TemplateOptions,
    TokenizeBody,
)
from llm42.errors import RequestRejected
from llm42.text.tokenizer import Tokenizer

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"})
"""Variables of templates that chat_template_kwargs may not set, nor the names of special tokens."""

Prompt = tuple[int, ...]


def prompts_of(body: GenerationBody, context: int, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Each not empty and inside the vocabulary. Raises RequestRejected with the field's name."""
    if isinstance(body, ChatBody):
        raw, param = [chat_prompt(body.messages, body, context, tokenizer)], "messages"
    else:
        assert isinstance(body, CompletionBody)
        raw, param = _completion_prompts(body, context, tokenizer), "prompt"
    if not 0 < len(raw) <= MAX_PROMPTS:
        raise RequestRejected(f"{param}: between 1 and {MAX_PROMPTS} prompts are needed.", param)
    for ids in raw:
        if not ids:
            raise RequestRejected(f"{param}: an empty prompt cannot be continued.", param)
        require_known(ids, param, tokenizer)
    return tuple(tuple(ids) for ids in raw)


def echoes_of(body: CompletionBody, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The text of each prompt: as it was given, or of its ids."""
    return tuple(_texts(body) or (tokenizer.decode(p, skip_special=False) for p in prompts))


def echo_start(body: CompletionBody, tokenizer: Tokenizer) -> int:
    """Where in an echoed prompt's text its first token begins: the tokens in front of a text are no part of
    it, so they lie before 0."""
    added = tokenizer.begin_ids if _texts(body) and body.add_special_tokens is not False else ()
    return -sum(len(tokenizer.token_text(token)) for token in added)


def chat_prompt(
    messages: Sequence[Message], body: ChatBody | TokenizeBody, context: int, tokenizer: Tokenizer
) -> list[int]:
    """The messages' ids. Raises RequestRejected for what the template refuses or would leave out, and for
    what cannot fit into `context` tokens."""
    tools = body.tools if body.tool_choice != "none" else None
    text = require_unicode(_render(messages, tools, body, context, tokenizer), "messages")
    return tokenizer.encode(text, add_special=bool(body.add_special_tokens))


def _render(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    options: TemplateOptions,
    context: int,
    tokenizer: Tokenizer,
) -> str:
    for message in messages:
        require_unicode(message.name or "", "messages")  # a template may leave it out
    parts = [str(part) for m in messages for part in m.for_template(further=False).values()]
    require_room("".join(parts), "messages", context, tokenizer)
    if options.continue_final_message and not (messages[-1].role == "assistant" and messages[-1].text):
        raise RequestRejected(
            "continue_final_message needs a last message of the assistant, with text.",
            "continue_final_message",
        )
    variables = _template_variables(options, tokenizer)
    if tools:
        if "tools" not in tokenizer.template_for(True).variables:
            raise RequestRejected(
                "This model's chat template knows no tools: leave them out, or describe them in a message.",
                "tools",
            )
        variables["tools"] = [tool.for_template() for tool in tools]
    try:
        date = datetime.date.fromisoformat(options.date) if options.date else None
    except ValueError as error:
        raise RequestRejected(f"date: {error}", "date") from error
    ending = bool(options.continue_final_message)
    text = tokenizer.apply_chat_template(
        [m.for_template() for m in messages],
        (not ending) if options.add_generation_prompt is None else options.add_generation_prompt,
        date=date,
        continue_final_message=ending,
        **variables,
    )
    _require_nothing_lost(messages, text)
    require_room(text, "messages", context, tokenizer)
    return text


def require_room(text: str, param: str, context: int, tokenizer: Tokenizer) -> None:
    """Raises RequestRejected for a text that cannot fit into `context` tokens whatever its tokens are, before
    seconds go into encoding it."""
    longest = context * tokenizer.longest_token
    if len(text) > longest and len(text.strip()) > longest:  # some templates strip
        raise RequestRejected(
            f"{param}: {len(text)} characters cannot fit the context of {context} tokens: shorten the text.",
            param,
            "context_length_exceeded",
        )


def require_unicode(text: str, param: str) -> str:
    """The text itself. Raises RequestRejected for a lone surrogate, which JSON can carry and which is no
    character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRejected(f"{param}: not valid Unicode: {error.reason}", param) from error
    return text


def require_known(ids: Sequence[int], param: str, tokenizer: Tokenizer) -> None:
    """Raises RequestRejected for ids outside the model's vocabulary; what the model can draw is taken."""
    if ids and max(ids) >= tokenizer.vocab_size:
        raise RequestRejected(
            f"{param}: token id {max(ids)} is outside the vocabulary (0 to {tokenizer.vocab_size - 1}).",
            param,
        )


def _completion_prompts(body: CompletionBody, context: int, tokenizer: Tokenizer) -> list[list[int]]:
    texts, given = _texts(body), body.prompt if isinstance(body.prompt, list) else []
    if ids := [p for p in given if isinstance(p, int)]:
        return [ids]
    for text in texts:
        require_room(text, "prompt", context, tokenizer)
    special = body.add_special_tokens is not False
    # empty text stays empty, so that it is refused even where a begin token would be put in front
    encoded = [
        tokenizer.encode(require_unicode(p, "prompt"), add_special=special) if p else [] for p in texts
    ]
    return encoded or [p for p in given if isinstance(p, list)]


def _texts(body: CompletionBody) -> list[str]:
    return [p for p in ([body.prompt] if isinstance(body.prompt, str) else body.prompt) if isinstance(p, str)]


def _template_variables(options: TemplateOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    given = dict(options.chat_template_kwargs or {})
    for name in given:
        if name in RESERVED or name in tokenizer.special or not name.isidentifier():
            raise RequestRejected(
                f"chat_template_kwargs: '{name}' cannot be set there: leave it out.", "chat_template_kwargs"
            )
    return given


def _require_nothing_lost(messages: Sequence[Message], text: str) -> None:
    """Tool calls and results must be in the prompt: many templates leave them out without a word."""
    for index, message in enumerate(messages):
        wanted = [call.function.name for call in message.tool_calls or ()]
        if message.role == "tool":
            wanted.append(message.text.strip())
        for part in wanted:
            if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
                raise RequestRejected(
                    f"messages[{index}]: this model's chat template leaves out tool calls or tool results:"
                    " write them into the content.",
                    "messages",
                )
