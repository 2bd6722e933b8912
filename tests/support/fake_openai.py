"""A small OpenAI endpoint in this process that keeps every rule of the battery, or breaks one on purpose."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

STEP_S = 0.0005
VOCABULARY = 200


@dataclass
class FakeOpenAI:
    """`broken` names what it does wrong; an empty name: nothing."""

    broken: str = ""
    running: int = 0
    served: int = 0
    aborted: int = 0
    cached: set[str] = field(default_factory=set)

    def app(self) -> FastAPI:
        """The endpoints under /v1."""
        app = FastAPI()
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        return app

    async def chat(self, request: Request) -> Any:
        """The text of the completion of all messages."""
        body = await request.json()
        body |= {"prompt": str(body["messages"]), "logprobs": 0}
        text = self._choice(body, 0, self._noise(body))["text"]
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}

    async def completions(self, request: Request) -> Any:
        """Whole or streamed."""
        body = await request.json()
        error = "dead" if self.broken == "dead" else self._error(body)
        if error and not (self.broken == "late_errors" and body.get("stream")):
            status = 500 if self.broken in ("crashes", "dead") else 400
            return JSONResponse({"error": {"message": error}}, status)
        if self.broken == "no_salt" and "cache_salt" in body:
            return JSONResponse({"error": {"message": "unknown field cache_salt"}}, 400)
        if body.get("stream"):
            return StreamingResponse(self._events(body, error), media_type="text/event-stream")
        return await self._whole(body)

    def _error(self, body: dict[str, Any]) -> str:
        prompt = body.get("prompt")
        if (isinstance(prompt, str) and len(prompt) > 100_000) or body["max_tokens"] > 10**6:
            return "too long"
        if body.get("n", 1) < 1 or not isinstance(body.get("temperature", 1), int | float):
            return "wrong n or temperature"
        if body.get("temperature", 1) < 0 or isinstance(body.get("stop"), int) or prompt == [2**40]:
            return "wrong temperature, stop or prompt"
        return ""

    def _noise(self, body: dict[str, Any]) -> int:
        """What changes the answer: 0 in a system that keeps the rules."""
        salt = json.dumps([str(body["prompt"])[:200], body.get("cache_salt")])
        hit, _ = salt in self.cached, self.cached.add(salt)
        body["hit"] = hit
        wrong = {
            "load": self.running, "order": self.served % 3, "cache": int(hit), "aborts": self.aborted,
            "lists": int(isinstance(body["prompt"], list)), "random": random.randrange(10**9),
        }  # fmt: skip
        return wrong.get(self.broken, 0)

    def _choice(self, body: dict[str, Any], index: int, noise: int) -> dict[str, Any]:
        """The tokens are drawn by a generator that the request seeds: a model as far as this matters."""
        hot = body.get("temperature", 1) > 0
        seed = body.get("seed", random.randrange(10**9)) if hot else 0
        if hot and self.broken == "seed_ignored":
            seed = random.randrange(10**9)
        if self.broken == "seed_constant":
            seed, index = 0, 0
        fields = {k: body[k] for k in ("top_k", "top_p", "min_p", "logit_bias") if k in body}
        prompt = body["prompt"] if isinstance(body["prompt"], str) else list(body["prompt"])
        prompt_ids = [ord(c) % VOCABULARY for c in prompt] if isinstance(prompt, str) else prompt
        source = random.Random(json.dumps([prompt_ids, seed, index if hot else 0, noise, fields]))
        ids = [source.randrange(VOCABULARY) for _ in range(body["max_tokens"])]
        bits = noise if self.broken in ("scores",) else 0
        scores = [self._score(token, bits) for token in ids]
        if body.get("echo"):
            again = 1e-9 if self.broken == "rescored" else 0.0
            scores = [None, *(self._score(token, bits) + again for token in prompt_ids[1:]), *scores]
            ids = [*prompt_ids, *ids]
        tokens = [f" t{token}" for token in ids]
        logprobs = {"tokens": tokens, "token_logprobs": scores, "top_logprobs": None}
        if body.get("logprobs"):
            logprobs["top_logprobs"] = [{token: score} for token, score in zip(tokens, scores, strict=True)]
        choice = {"index": index, "text": "".join(tokens), "finish_reason": "length", "logprobs": logprobs}
        return choice | {"token_ids": ids, "prompt_token_ids": prompt_ids}

    def _score(self, token: int, noise: int) -> float:
        return -1.0 / (1 + token) - noise * 1e-9

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        self.running += 1
        try:
            prompt, n = body["prompt"], body.get("n", 1)
            noise = self._noise(body)
            prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
            if not body.get("hit"):
                await asyncio.sleep(STEP_S)
            choices = [
                self._choice(body | {"prompt": p}, i, noise) | {"index": k * n + i}
                for k, p in enumerate(prompts)
                for i in range(n)
            ]
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(STEP_S)
            usage = {"prompt_tokens_details": {"cached_tokens": 16 * body["hit"]}}
            mark = "fake" if self.broken != "fingerprint" else f"fake-{self.served}"
            return {"choices": choices, "usage": usage, "system_fingerprint": mark}
        finally:
            self.running -= 1
            self.served += 1

    async def _events(self, body: dict[str, Any], error: str) -> AsyncIterator[str]:
        if error:
            yield _event({"error": {"message": error}})
            return
        self.running += 1
        ended = False
        try:
            choice = self._choice(body, 0, self._noise(body))
            if self.broken == "empty_chunk":
                yield _event({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
            count = len(choice["token_ids"])
            for i in range(count):
                await asyncio.sleep(STEP_S)
                yield _event({"choices": [self._part(choice, i, i == count - 1)]})
            ended = True
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1
            self.served += 1
            self.aborted += not ended

    def _part(self, choice: dict[str, Any], i: int, last: bool) -> dict[str, Any]:
        scores = {key: values and values[i : i + 1] for key, values in choice["logprobs"].items()}
        if self.broken == "stream_scores":
            scores = {}
        early = "" if self.broken == "finish_reason" else None
        return {
            "index": 0, "text": choice["logprobs"]["tokens"][i], "logprobs": scores,
            "token_ids": choice["token_ids"][i : i + 1], "finish_reason": "length" if last else early,
        }  # fmt: skip


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
