"""From deltas to OpenAI's JSON: whole replies and stream chunks, for both dialects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llm42.api.deltas import merge
from llm42.api.logprobs import LogprobWriter
from llm42.api.plan import HttpRequestPlan
from llm42.errors import FingerprintChanged
from llm42.protocol import Delta, RequestStats, TokenLogprob
from llm42.receipt import Answered, Keyring, make_receipt
from llm42.text.tokenizer import Tokenizer

MAX_WAITING = 16
"""Tokens of a stream that wait for text to go with: a character takes four at most, a stop string more."""


@dataclass(slots=True)
class _Choice:
    deltas: list[Delta] = field(default_factory=list)
    """All of them for a whole reply; for a stream, those that wait for text to go with."""
    said: list[Delta] = field(default_factory=list)
    """Of a stream, those that have left, where a receipt is made of them."""
    waiting: int = 0
    """Tokens in `deltas`."""
    size: int = 0
    """About how many values of the reply are made of `deltas`."""
    output_tokens: int = 0
    text_offset: int = 0
    """Characters of the token texts rendered so far (completions dialect)."""
    started: bool = False
    stats: RequestStats | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int | None = None
    replica: str = ""
    verifier: str = ""


class Renderer:
    """Holds what one HTTP request has produced so far. Not shared between requests."""

    def __init__(
        self, plan: HttpRequestPlan, model: str, tokens: Tokenizer, keyring: Keyring | None = None
    ) -> None:
        self._plan, self._model, self._writer = plan, model, LogprobWriter(tokens)
        self._choices = [
            _Choice(size=len(r.prompt) * plan.return_token_ids, text_offset=plan.echo_start)
            for r in plan.requests
        ]
        self._fingerprint: str | None = None
        self._keyring = keyring or Keyring({})
        self._width = 1 if plan.num_logprobs is None else plan.num_logprobs + 2

    def headers(self, first: tuple[int, Delta] | None = None) -> dict[str, str]:
        """Who answers, as far as it is known by now; `first` is a stream's piece that is not rendered yet."""
        origin = self._origin(self._choices)
        if first is not None:
            origin = {"replica": first[1].replica, "verifier": first[1].verifier}
        # the first is the client's own where it sent one, and Serve's proxy makes one up where it did not
        made = {"X-Request-Id": self._plan.id, "X-LLM42-Request": self._plan.id}
        made |= {f"X-LLM42-{name.title()}": who for name, who in origin.items()}
        return {name: value for name, value in made.items() if value}

    def _origin(self, choices: Sequence[_Choice]) -> dict[str, str]:
        found = {"replica": [c.replica for c in choices], "verifier": [c.verifier for c in choices]}
        return {name: ", ".join(filter(None, dict.fromkeys(who))) for name, who in found.items()}

    def add(self, index: int, delta: Delta) -> bool:
        """Takes a piece of choice `index`. Whether a stream has something to say now: a few tokens wait for
        text. Raises FingerprintChanged."""
        choice, request = self._choices[index], self._plan.requests[index]
        choice.deltas.append(delta)
        choice.waiting += len(delta.token_ids)
        choice.size += len(delta.token_ids) * self._width
        choice.size += len(delta.prompt_logprobs or ()) * ((request.prompt_logprobs or 0) + 1)
        choice.output_tokens += len(delta.token_ids)
        choice.stats = delta.stats or choice.stats
        if choice.prompt_logprobs is None:
            choice.prompt_logprobs = delta.prompt_logprobs
        if choice.cached_tokens is None:
            choice.cached_tokens = delta.cached_tokens
        choice.replica, choice.verifier = delta.replica or choice.replica, delta.verifier or choice.verifier
        if delta.fingerprint is not None:
            if self._fingerprint not in (None, delta.fingerprint):
                # one reply, one fingerprint: it stands beside all choices
                raise FingerprintChanged(
                    "the choices met verifiers with different fingerprints: send the request again"
                )
            self._fingerprint = delta.fingerprint
        return bool(delta.text or delta.finish_reason or choice.waiting >= MAX_WAITING)

    def size(self, index: int | None = None) -> int:
        """About how many values were added to choice `index`, or to all, and are not rendered."""
        return sum(c.size for i, c in enumerate(self._choices) if index in (None, i))

    def chunk(self, index: int) -> dict[str, Any]:
        """What a stream says next: all of choice `index` that was added and not said yet."""
        choice = self._choices[index]
        piece = merge(choice.deltas)
        if self._plan.receipt is not None:
            choice.said += choice.deltas
        choice.deltas.clear()
        choice.waiting = choice.size = 0
        body = self._choice(index, piece, self._chat_delta(choice, piece))
        whole: dict[str, Any] = {"choices": [body]}
        if not choice.started:
            (whole if self._plan.chat else body).update(self._prompt_ids(index))
        choice.started = True
        if piece.finish_reason:
            whole["llm42"] = self._evidence([choice]) | self._receipt(index)
        if self._plan.running_usage:
            whole["usage"] = self._usage()
        return self._envelope(".chunk") | whole

    def usage_chunk(self) -> dict[str, Any]:
        """What a stream says after the last choice when the client asked for usage."""
        last = {"choices": [], "usage": self._usage(), "llm42": self._evidence(self._choices)}
        return self._envelope(".chunk") | last

    def reply(self) -> dict[str, Any]:
        """The whole reply."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            piece = merge(choice.deltas)
            message = {"message": {"role": "assistant", "content": piece.text}}
            body = self._choice(index, piece, message)
            choices.append(body if self._plan.chat else body | self._of_prompt(index))
        receipts = [made for i in range(len(choices)) if (made := self._receipt(i))]
        evidence = self._evidence(self._choices)
        if receipts:
            evidence |= receipts[0] if len(choices) == 1 else {"receipts": [r["receipt"] for r in receipts]}
        prompt = self._of_prompt(0) if self._plan.chat else {}
        body = {"choices": choices, **prompt, "usage": self._usage(), "llm42": evidence}
        return self._envelope("") | body

    def _choice(self, index: int, piece: Delta, message: dict[str, Any]) -> dict[str, Any]:
        """A choice with what both kinds of reply say of it. message: a chat's."""
        body = {
            "index": index,
            **(message if self._plan.chat else self._text(index, piece)),
            "logprobs": self._logprobs(piece, index),
            "finish_reason": piece.finish_reason.value if piece.finish_reason else None,
        }
        return body | ({"token_ids": list(piece.token_ids)} if self._plan.return_token_ids else {})

    def _receipt(self, index: int) -> dict[str, Any]:
        """{"receipt": ...} of a choice that has ended, for the `llm42` object; empty when none is wanted."""
        wanted, request, choice = self._plan.receipt, self._plan.requests[index], self._choices[index]
        if wanted is None or self._fingerprint is None:
            return {}
        output = merge([*choice.said, *choice.deltas])
        answer = Answered(
            request.request_id,
            self._model,
            self._plan.created,
            self._fingerprint,
            request.prompt,
            request.sampling,
            output.token_ids,
            output.logprobs,
            output.finish_reason.value if output.finish_reason else None,
        )
        receipt = make_receipt(answer, wanted.prompt == "tokens", wanted.output == "tokens")
        return {"receipt": self._keyring.sign(receipt).to_json()}

    def _chat_delta(self, choice: _Choice, piece: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if piece.text or not choice.started:
            delta["content"] = piece.text
        return {"delta": delta}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._plan.id,
            "object": f"chat.completion{kind}" if self._plan.chat else "text_completion",
            "created": self._plan.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _text(self, index: int, piece: Delta) -> dict[str, Any]:
        """A completion's text, after its prompt where that is echoed."""
        if self._plan.echoes is None or self._choices[index].started:
            return {"text": piece.text}
        return {"text": self._plan.echoes[self._plan.prompt_index(index)] + piece.text}

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """What a reply says of a choice's prompt, where vLLM does: in each choice of a completion, and once
        at the top of a chat reply, whose choices share one prompt."""
        count, found = self._plan.prompt_logprobs, self._choices[index].prompt_logprobs
        scores: dict[str, Any] = {}
        if count is not None and found is not None:
            scores["prompt_logprobs"] = self._writer.prompt(found, count)
        return scores | self._prompt_ids(index)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        prompt = self._plan.requests[index].prompt
        return {"prompt_token_ids": list(prompt)} if self._plan.return_token_ids else {}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(p) for p in self._plan.prompts)
        output = sum(c.output_tokens for c in self._choices)
        cached = {self._plan.prompt_index(i): c.cached_tokens or 0 for i, c in enumerate(self._choices)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def _evidence(self, choices: list[_Choice]) -> dict[str, Any]:
        """The `llm42` object: what determinism cost, summed over `choices`, and the seed."""
        counts = Counter(asdict(RequestStats()))
        for choice in choices:
            counts.update(asdict(choice.stats or RequestStats()))
        origin = {name: value or None for name, value in self._origin(choices).items()}
        return {"deterministic": self._plan.deterministic, "seed": self._plan.seed, **counts, **origin}

    def _logprobs(self, piece: Delta, index: int) -> dict[str, Any] | None:
        if self._plan.num_logprobs is None:
            return None
        if self._plan.chat:
            return self._writer.chat(piece.logprobs)
        choice, entries, first = self._choices[index], piece.logprobs, None
        if self._plan.echoes is not None and not choice.started:
            prompt = self._plan.prompts[self._plan.prompt_index(index)]
            entries, first = (*(choice.prompt_logprobs or ()), *entries), prompt[0]
        made, choice.text_offset = self._writer.completion(
            entries, self._plan.num_logprobs, choice.text_offset, first
        )
        return made
