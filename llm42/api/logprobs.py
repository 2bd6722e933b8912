"""Log-probabilities as the OpenAI dialects, and vLLM's `prompt_logprobs`, write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm42.api.plan import HttpRequestPlan
from llm42.errors import RequestRejected
from llm42.protocol import TokenLogprob
from llm42.receipt import finite
from llm42.text.tokenizer import Tokenizer

MAX_LOGPROBS = 65_536
"""Log-probabilities, alternatives included, that one reply may hold. With many more the garbage collector,
which looks at each of them, would keep the event loop from its work for longer than 50 ms."""


def require_few(plan: HttpRequestPlan) -> None:
    """Refuses a request whose reply could hold more than MAX_LOGPROBS: alternatives + 1 for each token of a
    prompt that has them, and of an output unless it is streamed, where they leave as they come.
    Raises RequestRejected."""
    shown = 0 if plan.num_logprobs is None else plan.num_logprobs + 1
    own = 0 if plan.prompt_logprobs is None else plan.prompt_logprobs + 1
    echoed = shown if plan.echoes is not None else 0
    written = plan.prompts if plan.chat else [r.prompt for r in plan.requests]
    prompts = sum(len(p) for p in written) * (own + echoed)
    outputs = 0 if plan.stream else sum(r.max_tokens for r in plan.requests) * shown
    if prompts + outputs > MAX_LOGPROBS:
        raise RequestRejected(
            f"The reply could hold {prompts + outputs} log-probabilities, of all tokens and alternatives; the"
            f" limit is {MAX_LOGPROBS}. Ask for fewer alternatives, prompts or choices, for a smaller"
            " max_tokens, or for a stream.",
            "prompt_logprobs" if own and prompts > outputs else "logprobs",
        )


class LogprobWriter:
    """From entries to JSON values."""

    def __init__(self, tokens: Tokenizer) -> None:
        self._tokens = tokens

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat reply."""
        content = []
        for entry in entries:
            top = [self._chat_token(token, logprob) for token, logprob in entry.top]
            content.append(self._chat_token(entry.token, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(
        self, entries: Sequence[TokenLogprob], count: int, offset: int, first: int | None = None
    ) -> tuple[dict[str, Any], int]:
        """`choices[].logprobs` of a completion, and the text offset after it.

        count: alternatives per token; 0: no top_logprobs. offset: characters of token texts before,
        below 0 where tokens are no part of the text. first: a
        token in front whose log-probability nobody knows (the prompt's first).
        """
        tokens = [self._tokens.token_text(e.token) for e in entries]
        logprobs: list[float | None] = [finite(e.logprob) for e in entries]
        tops: list[dict[str, float] | None] = [self._alternatives(e, count) for e in entries]
        if first is not None:
            tokens.insert(0, self._tokens.token_text(first))
            logprobs.insert(0, None)
            tops.insert(0, None)
        offsets = []
        for text in tokens:
            offsets.append(max(0, offset))
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops if count else None,
            "text_offset": offsets,
        }, offset

    def prompt(self, entries: Sequence[TokenLogprob], count: int) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: null for the first token, then id -> logprob, rank and text. The rank of a token
        that is not among the `count` likeliest is null."""
        found: list[dict[str, Any] | None] = [None]
        for entry in entries:
            ranked = list(enumerate(entry.top[:count], 1))
            rows = {token: self._prompt_token(token, p, rank) for rank, (token, p) in ranked}
            rows.setdefault(entry.token, self._prompt_token(entry.token, entry.logprob, None))
            found.append({str(token): row for token, row in rows.items()})
        return found

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = list(self._tokens.token_bytes(token))
        return {"token": self._tokens.token_text(token), "logprob": finite(logprob), "bytes": raw}

    def _prompt_token(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._tokens.token_text(token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def _alternatives(self, entry: TokenLogprob, count: int) -> dict[str, float]:
        """Keyed by text, likeliest first; of two ids with one text the likelier stays."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top[:count], (entry.token, entry.logprob)):
            found.setdefault(self._tokens.token_text(token), finite(logprob))
        return found
