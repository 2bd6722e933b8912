"""Receipts of one HTTP request's choices: collects what they are made of while the output goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llm42.api.plan import Plan
from llm42.api.requests import ReceiptOptions
from llm42.protocol import Delta, TokenLogprob
from llm42.receipt import Answered, Keyring, make_receipt


@dataclass(slots=True)
class _Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


class Receipts:
    """One per HTTP request; makes nothing unless the request asks for receipts."""

    def __init__(self, plan: Plan, model: str, keyring: Keyring) -> None:
        self._plan, self._model, self._keyring = plan, model, keyring
        self._options: ReceiptOptions | None = plan.receipt
        self._outputs = [_Output() for _ in plan.requests]

    def note(self, index: int, delta: Delta) -> None:
        """Takes a piece of choice `index`."""
        if self._options is None:
            return
        output = self._outputs[index]
        output.tokens += delta.token_ids
        output.logprobs += delta.logprobs
        output.finish = delta.finish_reason.value if delta.finish_reason else None

    def of_choice(self, index: int, fingerprint: str | None) -> dict[str, Any]:
        """{"receipt": ...} of a choice that has ended, for the `llm42` object; empty when none is wanted."""
        if self._options is None or fingerprint is None:
            return {}
        request, output = self._plan.requests[index], self._outputs[index]
        answer = Answered(
            request.request_id,
            self._model,
            self._plan.created,
            fingerprint,
            request.prompt,
            request.sampling,
            tuple(output.tokens),
            tuple(output.logprobs),
            output.finish,
        )
        wanted = self._options
        receipt = make_receipt(answer, wanted.prompt == "tokens", wanted.output == "tokens")
        return {"receipt": self._keyring.sign(receipt).to_json()}

    def of_all(self, fingerprint: str | None) -> dict[str, Any]:
        """The same of a whole reply: one choice's `receipt`, or the `receipts` of several in their order."""
        made = [self.of_choice(i, fingerprint) for i in range(len(self._outputs))]
        if len(made) == 1 or not all(made):
            return made[0] if len(made) == 1 else {}
        return {"receipts": [m["receipt"] for m in made]}
