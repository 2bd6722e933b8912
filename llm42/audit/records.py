"""Stored answers as an audit understands them: records of several forms (docs/audits.md), each checked on its
own. A field that a record's form does not know makes it a bad record, because it would not be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llm42.audit.claim import Claim, body_of, complete, differing, model_in, of_receipt, require_known
from llm42.audit.exchange import claims_of_exchange
from llm42.audit.values import BadRecord, floats_of, ids_of, object_of, require_plain, text_of
from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.receipt import Receipt, sampling_from_json

FLAT_FIELDS = frozenset(
    {
        "id", "fingerprint", "prompt", "prompt_len", "output", "logprobs", "sampling", "text", "manifest",
        "request",
    }
)  # fmt: skip
BESIDE_FIELDS = FLAT_FIELDS | {"receipt", "finish"}


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
        raise BadRecord(f"manifest: its fingerprint is {fingerprint_of(manifest)}, and {name!r} is given")
    return str(name), manifest


def claims_of(value: Any, line: int) -> list[Claim]:
    """The outputs that a record holds: one, or one for each choice of a reply. Raises BadRecord, and
    InvalidReceipt for a receipt in it."""
    if not isinstance(value, Mapping):
        raise BadRecord("a record must be a JSON object")
    require_plain(value)
    if "response" in value:
        return list(claims_of_exchange(value, line))
    if "receipt" in value:
        require_known(value, BESIDE_FIELDS, "a record with a receipt")
        return [complete(_beside(of_receipt(Receipt.from_json(value["receipt"]), line), value))]
    if "output_sha256" in value:
        return [complete(of_receipt(Receipt.from_json(value), line))]
    require_known(value, FLAT_FIELDS, "a plain record")
    claim = Claim(line, 0, text_of(value, "id") or f"line {line}", text_of(value, "fingerprint") or "")
    return [complete(_beside(claim, value))]


def _beside(claim: Claim, value: Mapping[str, Any]) -> Claim:
    """The claim with what stands beside it in the record; what is there twice must be the same."""
    given = value.get("sampling")
    sampling = None if given is None else sampling_from_json(given)
    prompt, output, body = ids_of(value, "prompt"), ids_of(value, "output"), body_of(value)
    _require_length(value, prompt, claim.receipt)
    twice = {
        "id": (text_of(value, "id"), claim.receipt and claim.receipt.id),
        "fingerprint": (text_of(value, "fingerprint"), claim.fingerprint),
        "prompt": (prompt, claim.prompt),
        "sampling": (sampling, claim.sampling),
        "finish": (text_of(value, "finish"), claim.finish or ""),
    }
    odd = differing({f"{name} beside the receipt": pair for name, pair in twice.items()})
    model = None if claim.receipt is None else claim.receipt.model
    return replace(
        claim,
        prompt=claim.prompt if prompt is None else prompt,
        output=claim.output if output is None else output,
        logprobs=floats_of(value, "logprobs"),
        text=text_of(value, "text"),
        sampling=claim.sampling or sampling,
        body=body,
        manifest=object_of(value, "manifest"),
        contradiction=odd or differing({"request's model": (model_in(body), model)}),
    )


def _require_length(
    value: Mapping[str, Any], prompt: tuple[int, ...] | None, receipt: Receipt | None
) -> None:
    """Raises BadRecord for a `prompt_len` that is not the prompt's, or that nothing can be held against."""
    said = value.get("prompt_len")
    if said is None:
        return
    length = receipt.prompt_len if receipt is not None else None if prompt is None else len(prompt)
    if length is None:
        raise BadRecord("prompt_len: store the prompt (token ids) or a receipt beside it")
    if type(said) is not int or said != length:
        raise BadRecord(f"prompt_len is {said!r}; the prompt has {length} tokens")
