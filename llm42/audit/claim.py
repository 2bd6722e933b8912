"""One stored output as an audit holds it, whatever form of record it came from, and what makes it one that
can be decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm42.audit.values import BadRecord
from llm42.protocol import SamplingParams
from llm42.receipt import Receipt


@dataclass(frozen=True, slots=True)
class Names:
    """How a reply's log-probabilities spell the output's tokens; None: they do not say."""

    texts: tuple[str, ...] | None = None
    raw: tuple[bytes | None, ...] | None = None
    """Their bytes, of a chat reply."""
    offsets: tuple[int, ...] | None = None
    """Where each begins in the joined texts, in characters, of a completion."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One stored output: what was asked, as far as the record says, and what is said to be the answer.

    The question is `prompt` and `sampling`, or `body`, an OpenAI request from which both follow. The answer
    is `output`, or the text, or the hash in the receipt.
    """

    line: int
    choice: int
    id: str
    fingerprint: str
    prompt: tuple[int, ...] | None = None
    sampling: SamplingParams | None = None
    output: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    text: str | None = None
    finish: str | None = None
    receipt: Receipt | None = None
    second: Receipt | None = None
    """Another receipt of the same answer: the one beside a reply that has its own."""
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    manifest: Mapping[str, Any] | None = field(default=None, repr=False)
    names: Names = Names()
    choices: int | None = None
    """How many choices the stored reply has; this one is number `choice` of them. None: the record is no
    reply, and does not say which of the request's choices it is."""
    contradiction: str = ""
    """What the record says twice, and differently; then it is wrong whatever is canonical."""


def differing(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    """The first thing that is there twice and differs, in words; empty when there is none."""
    odd = [name for name, (a, b) in pairs.items() if a is not None and b is not None and a != b]
    return f"the record contradicts itself: the {odd[0]} is another one" if odd else ""


def require_known(value: Mapping[str, Any], known: frozenset[str], form: str) -> None:
    """Raises BadRecord for a field that the record's form does not have: it would not be compared."""
    if unknown := sorted(set(value) - known):
        raise BadRecord(f"unknown field {unknown[0]!r} in {form}: remove it (docs/audits.md has the fields)")


def model_in(body: Mapping[str, Any] | None) -> Any:
    """The model that a stored request or reply names."""
    return None if body is None else body.get("model")


def body_of(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The request that a record has, if any. Raises BadRecord for what is none, or asks for best effort."""
    body = value.get("request")
    if body is None:
        return None
    if not isinstance(body, Mapping) or not ("messages" in body or "prompt" in body):
        raise BadRecord("request: it must be the body of a completion or chat request")
    for name in ("deterministic", "is_deterministic"):
        require_deterministic(body.get(name), f"request.{name}")
    return body


def require_deterministic(said: Any, where: str) -> None:
    """Raises BadRecord where a record says that its answer was none that is promised."""
    if said is not None and said is not True:
        text = f"{where} is {said!r}: only answers of deterministic requests can be audited"
        raise BadRecord(text)


def of_receipt(receipt: Receipt, line: int, choice: int = 0) -> Claim:
    """What a receipt says by itself."""
    return Claim(
        line,
        choice,
        receipt.id,
        receipt.fingerprint,
        receipt.prompt,
        receipt.sampling,
        receipt.output,
        finish=receipt.finish,
        receipt=receipt,
    )


def complete(claim: Claim) -> Claim:
    """The claim itself. Raises BadRecord for one that cannot be decided."""
    if not claim.fingerprint:
        raise BadRecord("no fingerprint: only answers of deterministic requests can be audited")
    if claim.body is None and (claim.prompt is None or claim.sampling is None):
        missing = "prompt (token ids)" if claim.prompt is None else "sampling"
        raise BadRecord(f"{missing} is missing: store it, or the request from which it follows")
    if claim.output is None and claim.receipt is None:
        if claim.text is None:
            raise BadRecord("no answer: output (token ids), text or a receipt is needed")
        if claim.body is None:
            raise BadRecord("text alone says too little: store the request beside it, or output (token ids)")
    if claim.prompt == () or claim.output == ():
        raise BadRecord("the prompt or the output is empty: there is nothing to compare")
    if claim.receipt is not None and claim.receipt.output_len < 1:
        raise BadRecord("receipt: output_len must be 1 or more")
    if claim.logprobs is not None and claim.output is not None and len(claim.logprobs) != len(claim.output):
        raise BadRecord(
            f"{len(claim.logprobs)} logprobs for {len(claim.output)} output tokens: each needs one"
        )
    return claim
