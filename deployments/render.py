"""From deltas to OpenAI's JSON: whole replies and stream chunks, for both dialects."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from deployments.deltas import merge
from deployments.translate import Plan
from llm42.protocol import Delta, FingerprintChanged, RequestStats, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold (vLLM's convention)."""


class TokenNames(Protocol):
    """How one token is shown (llm42.tokenizer.Tokenizer does it)."""

    def token_text(self, token: int) -> str:
        """Readable; special tokens spelled out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Exact; a token may hold a part of a character only."""
        ...


@dataclass(slots=True)
class _Choice:
    deltas: list[Delta] = field(default_factory=list)
    """All of them for a whole reply; for a stream, those that wait for text to go with."""
    output_tokens: int = 0
    text_offset: int = 0
    """Characters of the token texts rendered so far (completions dialect)."""
    started: bool = False
    stats: RequestStats | None = None


class Renderer:
    """Holds what one HTTP request has produced so far. Not shared between requests."""

    def __init__(self, plan: Plan, model: str, tokens: TokenNames) -> None:
        self._plan, self._model, self._tokens = plan, model, tokens
        self._choices = [_Choice() for _ in plan.requests]
        self._fingerprint: str | None = None

    def add(self, index: int, delta: Delta) -> None:
        """Takes a piece of choice `index` of a whole reply."""
        self._take(index, delta)

    def chunk(self, index: int, delta: Delta) -> str | None:
        """The event for a piece of a streamed choice; None while there is no text (tokens wait for it)."""
        choice = self._take(index, delta)
        piece = merge(choice.deltas)
        if not piece.text and piece.finish_reason is None:
            return None
        choice.deltas.clear()
        rendered = self._chat_delta(choice, piece) if self._plan.chat else {"text": piece.text}
        body: dict[str, Any] = {
            "index": index,
            **rendered,
            "logprobs": self._logprobs(piece, choice),
            "finish_reason": piece.finish_reason.value if piece.finish_reason else None,
        }
        if self._plan.return_token_ids:
            body["token_ids"] = list(piece.token_ids)
            if not choice.started:
                body["prompt_token_ids"] = list(self._plan.requests[index].prompt)
        choice.started = True
        extra = {"llm42": self._evidence([choice])} if piece.finish_reason else {}
        return self._event({"choices": [body], **extra})

    def usage_chunk(self) -> str:
        """The event after the last choice when the client asked for usage."""
        return self._event({"choices": [], "usage": self._usage(), "llm42": self._evidence(self._choices)})

    def reply(self) -> dict[str, Any]:
        """The whole reply."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            piece = merge(choice.deltas)
            content: dict[str, Any] = (
                {"message": {"role": "assistant", "content": piece.text}}
                if self._plan.chat
                else {"text": piece.text}
            )
            body = {
                "index": index,
                **content,
                "logprobs": self._logprobs(piece, choice),
                "finish_reason": piece.finish_reason.value if piece.finish_reason else None,
            }
            if self._plan.return_token_ids:
                body["token_ids"] = list(piece.token_ids)
                body["prompt_token_ids"] = list(self._plan.requests[index].prompt)
            choices.append(body)
        kind = "chat.completion" if self._plan.chat else "text_completion"
        evidence = self._evidence(self._choices)
        return self._envelope(kind) | {"choices": choices, "usage": self._usage(), "llm42": evidence}

    def _take(self, index: int, delta: Delta) -> _Choice:
        choice = self._choices[index]
        choice.deltas.append(delta)
        choice.output_tokens += len(delta.token_ids)
        choice.stats = delta.stats or choice.stats
        if delta.fingerprint is not None:
            if self._fingerprint not in (None, delta.fingerprint):
                # one reply, one fingerprint: it stands beside all choices
                raise FingerprintChanged("the choices of this request met verifiers with other fingerprints")
            self._fingerprint = delta.fingerprint
        return choice

    def _chat_delta(self, choice: _Choice, piece: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if piece.text or not choice.started:
            delta["content"] = piece.text
        return {"delta": delta}

    def _event(self, body: dict[str, Any]) -> str:
        kind = "chat.completion.chunk" if self._plan.chat else "text_completion"
        return f"data: {json.dumps(self._envelope(kind) | body, ensure_ascii=False)}\n\n"

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._plan.id,
            "object": kind,
            "created": self._plan.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(p) for p in self._plan.prompts)
        output = sum(c.output_tokens for c in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _evidence(self, choices: list[_Choice]) -> dict[str, Any]:
        """The `llm42` object: what determinism cost, summed over `choices`, and the seed to replay with."""
        counts: dict[str, int] = asdict(RequestStats())
        for choice in choices:
            for name, value in asdict(choice.stats or RequestStats()).items():
                counts[name] += value
        return {"deterministic": self._plan.deterministic, "seed": self._plan.seed, **counts}

    def _logprobs(self, piece: Delta, choice: _Choice) -> dict[str, Any] | None:
        if self._plan.num_logprobs is None:
            return None
        return self._chat_logprobs(piece) if self._plan.chat else self._completion_logprobs(piece, choice)

    def _chat_logprobs(self, piece: Delta) -> dict[str, Any]:
        content = []
        for entry in piece.logprobs:
            top = [self._chat_token(token, logprob) for token, logprob in entry.top]
            content.append(self._chat_token(entry.token, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokens.token_bytes(token))
        return {"token": self._tokens.token_text(token), "logprob": finite(logprob), "bytes": raw}

    def _completion_logprobs(self, piece: Delta, choice: _Choice) -> dict[str, Any]:
        tokens = [self._tokens.token_text(entry.token) for entry in piece.logprobs]
        offsets = []
        for text in tokens:
            offsets.append(choice.text_offset)
            choice.text_offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in piece.logprobs],
            "top_logprobs": [self._alternatives(e) for e in piece.logprobs]
            if self._plan.num_logprobs
            else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Keyed by text, likeliest first; of two ids with one text the likelier stays."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            found.setdefault(self._tokens.token_text(token), finite(logprob))
        return found


def finite(logprob: float) -> float:
    """The value itself, bit for bit, unless JSON cannot hold it."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
