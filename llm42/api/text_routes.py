"""POST /tokenize and /detokenize: what becomes of a text, of messages, of ids. No engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from llm42.api.errors import ModelNotFound
from llm42.api.json_bodies import BodyReader, body_route
from llm42.api.prompts import chat_prompt, require_known, require_room, require_unicode
from llm42.api.reply_writer import dump
from llm42.api.requests import DetokenizeBody, TokenizeBody
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer


def text_routes(settings: Settings, tokenizer: Tokenizer, reader: BodyReader) -> APIRouter:
    """The two routes; both run off the event loop, and so do their replies' JSON: one value per token."""
    router, context = APIRouter(route_class=body_route(reader)), settings.model.max_model_len

    async def written(made: Callable[[], dict[str, Any]]) -> Response:
        return Response(await asyncio.to_thread(lambda: dump(made())), media_type="application/json")

    @router.post("/tokenize", response_model=dict[str, Any])
    async def tokenize(body: TokenizeBody) -> Response:
        _require_model(body.model, settings)
        return await written(lambda: _tokenize(body, context, tokenizer))

    @router.post("/detokenize", response_model=dict[str, Any])
    async def detokenize(body: DetokenizeBody) -> Response:
        _require_model(body.model, settings)
        require_known(body.tokens, "tokens", tokenizer)
        return await written(lambda: {"prompt": tokenizer.decode(body.tokens, False)})

    return router


def _tokenize(body: TokenizeBody, context: int, tokenizer: Tokenizer) -> dict[str, Any]:
    if body.messages is not None:
        ids = chat_prompt(body.messages, body, context, tokenizer)
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
