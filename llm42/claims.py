"""Stored answers as an audit understands them: records of several forms (docs/audits.md), each checked on its
own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llm42.audit_values import BadRecord, floats_of, ids_of, object_of, require_plain, text_of
from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.protocol import SamplingParams
from llm42.receipt import Receipt, sampling_from_json

FLAT_FIELDS = frozenset(
    {"id", "fingerprint", "prompt", "prompt_len", "output", "logprobs", "sampling", "text", "manifest"}
)


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
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    manifest: Mapping[str, Any] | None = field(default=None, repr=False)
    numbered: bool = False
    """The record itself says which of the request's choices it is."""
    contradiction: str = ""
    """What the record says twice, and differently; then it is wrong whatever is canonical."""


def manifest_of(value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(fingerprint, manifest) of a reply of GET /v1/fingerprint; None for anything else.

    Raises BadRecord when the fingerprint is not the manifest's.
    """
    if set(value) - {"object", "status"} != {"fingerprint", "manifest"}:
        return None
    require_plain(value)
    name, manifest = value["fingerprint"], object_of(value, "manifest")
    if manifest is None:
        raise BadRecord("manifest: a JSON object is needed")
    if fingerprint_of(manifest) != name:
        raise BadRecord(f"manifest: its fingerprint is {fingerprint_of(manifest)}, not {name!r}")
    return str(name), manifest


def claims_of(value: Mapping[str, Any], line: int) -> list[Claim]:
    """The outputs that a record holds: one, or one for each choice of a reply. Raises InvalidReceipt."""
    require_plain(value)
    if "response" in value:
        return list(_of_exchange(value, line))
    if "output_sha256" in value:
        return [_complete(_of_receipt(Receipt.from_json(value), line))]
    if "receipt" in value:
        receipt = Receipt.from_json(value["receipt"])
        return [_complete(_beside(_of_receipt(receipt, line), value))]
    if unknown := sorted(set(value) - FLAT_FIELDS - {"request"}):
        raise BadRecord(f"unknown field {unknown[0]!r}")
    claim = Claim(line, 0, text_of(value, "id") or f"line {line}", text_of(value, "fingerprint") or "")
    return [_complete(_beside(claim, value))]


def _of_receipt(receipt: Receipt, line: int, choice: int = 0) -> Claim:
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


def _beside(claim: Claim, value: Mapping[str, Any]) -> Claim:
    """The claim with what stands beside it in the record; what is there twice must be the same."""
    given = value.get("sampling")
    sampling = None if given is None else sampling_from_json(given)
    prompt, output, body = ids_of(value, "prompt"), ids_of(value, "output"), _body(value)
    if "prompt_len" in value and prompt is not None and value["prompt_len"] != len(prompt):
        raise BadRecord(f"prompt_len is {value['prompt_len']!r}; the prompt has {len(prompt)} tokens")
    twice = {
        "fingerprint": (text_of(value, "fingerprint"), claim.fingerprint),
        "prompt": (prompt, claim.prompt),
        "sampling": (sampling, claim.sampling),
    }
    odd = _differing({f"{name} beside the receipt": pair for name, pair in twice.items()})
    return replace(
        claim,
        prompt=claim.prompt if prompt is None else prompt,
        output=claim.output if output is None else output,
        logprobs=floats_of(value, "logprobs"),
        text=text_of(value, "text"),
        sampling=claim.sampling or sampling,
        body=body,
        manifest=object_of(value, "manifest"),
        contradiction=odd or _differing({"request's model": (_model(body), _model_of(claim.receipt))}),
    )


def _differing(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    """The first thing that is there twice and differs, in words; empty when there is none."""
    odd = [name for name, (a, b) in pairs.items() if a is not None and b is not None and a != b]
    return f"the record contradicts itself: the {odd[0]} is another one" if odd else ""


def _model(body: Mapping[str, Any] | None) -> Any:
    return None if body is None else body.get("model")


def _model_of(receipt: Receipt | None) -> str | None:
    return None if receipt is None else receipt.model


def _body(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    body = value.get("request")
    if body is None:
        return None
    if not isinstance(body, Mapping) or not ("messages" in body or "prompt" in body):
        raise BadRecord("request: the body of a completion or chat request is needed")
    return body


def _of_exchange(value: Mapping[str, Any], line: int) -> Iterator[Claim]:
    """A request and its whole reply, as they went over HTTP."""
    body, reply = _body(value), value["response"]
    if not isinstance(reply, Mapping) or not isinstance(reply.get("choices"), list) or not reply["choices"]:
        raise BadRecord("response: a whole reply with choices is needed")
    evidence = object_of(reply, "llm42") or {}
    if body is not None and body.get("echo"):
        raise BadRecord("request.echo: the reply repeats the prompt; store token ids or a receipt")
    seed = evidence.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRecord("response.llm42.seed: a whole number is needed")
    seeds = (None if body is None else body.get("seed"), seed)
    odd = _differing({"seed of the reply": seeds, "model of the reply": (_model(body), _model(reply))})
    if body is not None and seed is not None and body.get("seed") is None:
        body = {**body, "seed": seed}
    receipts, seen = _receipts(evidence, len(reply["choices"])), set[int]()
    for position, choice in enumerate(reply["choices"]):
        if not isinstance(choice, Mapping):
            raise BadRecord("response.choices: JSON objects are needed")
        index = choice.get("index", position)
        if type(index) is not int or index < 0 or index in seen:
            raise BadRecord(f"response.choices: {index!r} is no index, or there twice")
        seen.add(index)
        name = text_of(value, "id") or text_of(reply, "id") or f"line {line}"
        claim = Claim(line, index, name, text_of(reply, "system_fingerprint") or "", contradiction=odd)
        claim = _of_choice(claim, choice, reply, receipts[position])
        yield _complete(replace(claim, body=body, manifest=object_of(value, "manifest")))


def _of_choice(
    claim: Claim, choice: Mapping[str, Any], reply: Mapping[str, Any], receipt: Receipt | None
) -> Claim:
    """The claim with what one choice of a reply says."""
    prompt, output = ids_of(choice, "prompt_token_ids"), ids_of(choice, "token_ids")
    prompt = ids_of(reply, "prompt_token_ids") if prompt is None else prompt  # a chat's: once for all choices
    finish, odd = text_of(choice, "finish_reason"), claim.contradiction
    if receipt is not None:
        twice = {
            "system_fingerprint": (text_of(reply, "system_fingerprint"), receipt.fingerprint),
            "model": (_model(reply), receipt.model),
            "finish_reason": (finish, receipt.finish),
            "prompt_token_ids": (prompt, receipt.prompt),
        }
        odd = odd or _differing({f"reply's {name} beside the receipt": p for name, p in twice.items()})
        claim = _of_receipt(receipt, claim.line, claim.choice)
    return replace(
        claim,
        prompt=claim.prompt if prompt is None else prompt,
        output=claim.output if output is None else output,
        logprobs=_choice_logprobs(choice),
        text=_choice_text(choice),
        finish=claim.finish if finish is None else finish,
        numbered=True,
        contradiction=odd,
    )


def _receipts(evidence: Mapping[str, Any], choices: int) -> Sequence[Receipt | None]:
    single, several = evidence.get("receipt"), evidence.get("receipts")
    found = [single] if single is not None else several
    if found is None:
        return [None] * choices
    if not isinstance(found, list) or len(found) != choices:
        raise BadRecord("response.llm42: one receipt for each choice is needed")
    return [Receipt.from_json(r) for r in found]


def _choice_text(choice: Mapping[str, Any]) -> str | None:
    message = choice.get("message")
    return text_of(message, "content") if isinstance(message, Mapping) else text_of(choice, "text")


def _choice_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    found = choice.get("logprobs")
    if not isinstance(found, Mapping):
        return None
    content = found.get("content")
    if isinstance(content, list):
        if not all(isinstance(entry, Mapping) for entry in content):
            raise BadRecord("logprobs.content: JSON objects are needed")
        return floats_of({"logprobs": [entry.get("logprob") for entry in content]}, "logprobs")
    return floats_of(found, "token_logprobs")


def _complete(claim: Claim) -> Claim:
    """Raises BadRecord for a claim that cannot be decided, or contradicts itself."""
    if not claim.fingerprint:
        raise BadRecord("no fingerprint: only answers of deterministic requests can be audited")
    if claim.body is None and (claim.prompt is None or claim.sampling is None):
        missing = "prompt (token ids)" if claim.prompt is None else "sampling"
        raise BadRecord(f"{missing} is missing, and there is no request that it follows from")
    if claim.output is None and claim.receipt is None:
        if claim.text is None:
            raise BadRecord("no answer: output (token ids), text or a receipt is needed")
        if claim.body is None:
            raise BadRecord("text alone says too little: store the request beside it, or output (token ids)")
    if claim.prompt == () or claim.output == ():
        raise BadRecord("an empty prompt or output holds nothing to compare")
    if claim.receipt is not None and claim.receipt.output_len < 1:
        raise BadRecord("receipt: output_len must be 1 or more")
    if claim.logprobs is not None and claim.output is not None and len(claim.logprobs) != len(claim.output):
        raise BadRecord(f"{len(claim.logprobs)} logprobs for {len(claim.output)} output tokens")
    return claim
