"""Stored answers as an audit understands them: records of several forms (docs/audits.md), each checked on its
own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.protocol import SamplingParams
from llm42.receipt import InvalidReceipt, Receipt, require_token_ids, sampling_from_json

FLAT_FIELDS = frozenset(
    {"id", "fingerprint", "prompt", "prompt_len", "output", "logprobs", "sampling", "text", "manifest"}
)


class BadRecord(InvalidReceipt):
    """One record cannot be audited as it stands."""


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
    receipt: Receipt | None = None
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    manifest: Mapping[str, Any] | None = field(default=None, repr=False)


def manifest_of(value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(fingerprint, manifest) of a reply of GET /v1/fingerprint; None for anything else.

    Raises BadRecord when the fingerprint is not the manifest's.
    """
    if set(value) - {"object", "status"} != {"fingerprint", "manifest"}:
        return None
    name, manifest = value["fingerprint"], value["manifest"]
    if not isinstance(manifest, Mapping):
        raise BadRecord("manifest: a JSON object is needed")
    if fingerprint_of(manifest) != name:
        raise BadRecord(f"manifest: its fingerprint is {fingerprint_of(manifest)}, not {name!r}")
    return str(name), manifest


def claims_of(value: Mapping[str, Any], line: int) -> list[Claim]:
    """The outputs that a record holds: one, or one for each choice of a stored reply. Raises BadRecord."""
    if "response" in value:
        return list(_of_exchange(value, line))
    if "output_sha256" in value:
        return [_complete(_of_receipt(Receipt.from_json(value), line))]
    if "receipt" in value:
        receipt = Receipt.from_json(value["receipt"])
        return [_complete(_beside(_of_receipt(receipt, line), value))]
    if unknown := sorted(set(value) - FLAT_FIELDS - {"request"}):
        raise BadRecord(f"unknown field {unknown[0]!r}")
    claim = Claim(line, 0, _text(value, "id") or f"line {line}", _text(value, "fingerprint") or "")
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
        receipt=receipt,
    )


def _beside(claim: Claim, value: Mapping[str, Any]) -> Claim:
    """The claim with what stands beside it in the record; what it has already is not replaced."""
    sampling, given = claim.sampling, value.get("sampling")
    if sampling is None and given is not None:
        sampling = sampling_from_json(given)
    prompt = _ids(value, "prompt")
    if "prompt_len" in value and prompt is not None and value["prompt_len"] != len(prompt):
        raise BadRecord(f"prompt_len is {value['prompt_len']!r}; the prompt has {len(prompt)} tokens")
    if "manifest" in value and not isinstance(value["manifest"], Mapping):
        raise BadRecord("manifest: a JSON object is needed")
    return replace(
        claim,
        prompt=prompt if prompt is not None else claim.prompt,
        output=found if (found := _ids(value, "output")) is not None else claim.output,
        logprobs=_floats(value, "logprobs"),
        text=_text(value, "text"),
        sampling=sampling,
        body=_body(value),
        manifest=value.get("manifest"),
    )


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
    evidence = reply.get("llm42") or {}
    if not isinstance(evidence, Mapping):
        raise BadRecord("response.llm42: a JSON object is needed")
    if body is not None:
        if body.get("echo"):
            raise BadRecord("request.echo: the reply repeats the prompt; store token ids or a receipt")
        body = {**body, "seed": evidence["seed"]} if evidence.get("seed") is not None else body
    receipts = _receipts(evidence, len(reply["choices"]))
    for position, choice in enumerate(reply["choices"]):
        if not isinstance(choice, Mapping):
            raise BadRecord("response.choices: JSON objects are needed")
        index = choice.get("index", position)
        if type(index) is not int or index < 0:
            raise BadRecord(f"response.choices: {index!r} is no index")
        name = _text(value, "id") or _text(reply, "id") or f"line {line}"
        claim = Claim(line, index, name, _text(reply, "system_fingerprint") or "")
        if receipts[position] is not None:
            claim = _of_receipt(receipts[position], line, index)
        prompt, output = _ids(choice, "prompt_token_ids"), _ids(choice, "token_ids")
        yield _complete(
            replace(
                claim,
                prompt=claim.prompt if prompt is None else prompt,
                output=claim.output if output is None else output,
                logprobs=_choice_logprobs(choice),
                text=_choice_text(choice),
                body=body,
                manifest=value.get("manifest"),
            )
        )


def _receipts(evidence: Mapping[str, Any], choices: int) -> Sequence[Any]:
    single, several = evidence.get("receipt"), evidence.get("receipts")
    found = [single] if single is not None else several
    if found is None:
        return [None] * choices
    if not isinstance(found, list) or len(found) != choices:
        raise BadRecord("response.llm42: one receipt for each choice is needed")
    return [Receipt.from_json(r) for r in found]


def _choice_text(choice: Mapping[str, Any]) -> str | None:
    message = choice.get("message")
    return _text(message, "content") if isinstance(message, Mapping) else _text(choice, "text")


def _choice_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    found = choice.get("logprobs")
    if not isinstance(found, Mapping):
        return None
    content = found.get("content")
    if isinstance(content, list):
        if not all(isinstance(entry, Mapping) for entry in content):
            raise BadRecord("logprobs.content: JSON objects are needed")
        return _floats({"logprobs": [entry.get("logprob") for entry in content]}, "logprobs")
    return _floats(found, "token_logprobs")


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


def _text(value: Mapping[str, Any], name: str) -> str | None:
    found = value.get(name)
    if found is not None and not isinstance(found, str):
        raise BadRecord(f"{name}: text is needed")
    return found


def _ids(value: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(t) is int for t in found):
        raise BadRecord(f"{name}: a list of token ids is needed")
    require_token_ids(found, name)
    return tuple(found)


def _floats(value: Mapping[str, Any], name: str) -> tuple[float, ...] | None:
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(p) in (int, float) for p in found):
        raise BadRecord(f"{name}: a list of numbers is needed")
    try:
        return tuple(float(p) for p in found)
    except OverflowError as error:
        raise BadRecord(f"{name}: {error}") from error
