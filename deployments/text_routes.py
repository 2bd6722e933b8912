"""POST /tokenize and /detokenize: what becomes of a text, of messages, of ids. No engine is asked."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from deployments.errors import ModelNotFound
from deployments.openai_types import DetokenizeBody, TokenizeBody
from deployments.prompts import render_chat, require_known, require_room, require_unicode
from llm42.config import Settings
from llm42.tokenizer import Tokenizer


def text_routes(settings: Settings, tokenizer: Tokenizer) -> APIRouter:
    """The two routes; both run off the event loop."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        _require_model(body.model, settings)
        return await asyncio.to_thread(_tokenize, body, settings.model.max_model_len, tokenizer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        _require_model(body.model, settings)
        require_known(body.tokens, "tokens", tokenizer)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}

    return router


def _tokenize(body: TokenizeBody, context: int, tokenizer: Tokenizer) -> dict[str, Any]:
    if body.messages is not None:
        tools = body.tools if body.tool_choice != "none" else None
        text = require_unicode(render_chat(body.messages, tools, body, context, tokenizer), "messages")
        ids = tokenizer.encode(text, add_special=bool(body.add_special_tokens))
    else:
        text = require_unicode(body.prompt or "", "prompt")
        require_room(text, "prompt", context, tokenizer)
        ids = tokenizer.encode(text, add_special=body.add_special_tokens is not False)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": context, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return reply


def _require_model(name: str | None, settings: Settings) -> None:
    if name is not None and name != settings.model.name:
        raise ModelNotFound(name, settings.model.name)
