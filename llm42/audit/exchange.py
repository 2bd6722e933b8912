"""Whole exchanges as an audit understands them: a request and its reply as they went over HTTP, one claim for
each choice of the reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llm42.audit.claim import (
    Claim,
    Names,
    body_of,
    complete,
    differing,
    model_in,
    of_receipt,
    require_deterministic,
    require_known,
)
from llm42.audit.values import BadRecord, floats_of, ids_of, object_of, text_of
from llm42.receipt import Receipt

FIELDS = frozenset({"id", "request", "response", "receipt", "receipts", "manifest"})
REPLY = frozenset(
    {
        "id", "object", "created", "model", "system_fingerprint", "choices", "usage", "llm42",
        "prompt_token_ids", "prompt_logprobs",
    }
)  # fmt: skip
CHOICE = frozenset({"index", "logprobs", "finish_reason", "token_ids"})
COMPLETION_CHOICE = CHOICE | {"text", "prompt_token_ids", "prompt_logprobs"}
CHAT_CHOICE = CHOICE | {"message", "prompt_token_ids"}
MESSAGE = frozenset({"role", "content"})
COMPLETION_LOGPROBS = frozenset({"tokens", "token_logprobs", "top_logprobs", "text_offset"})
CHAT_LOGPROBS = frozenset({"content"})
CHAT_TOKEN = frozenset({"token", "logprob", "bytes", "top_logprobs"})
SEEDS = 2**64


def claims_of_exchange(value: Mapping[str, Any], line: int) -> Iterator[Claim]:
    """One claim for each choice. Raises BadRecord, and InvalidReceipt for a receipt in it."""
    require_known(value, FIELDS, "a record with a response")
    reply = value["response"]
    if not isinstance(reply, Mapping) or not isinstance(reply.get("choices"), list) or not reply["choices"]:
        raise BadRecord("response: a whole reply with choices is needed")
    evidence, choices = object_of(reply, "llm42") or {}, reply["choices"]
    body, odd = _question(value, reply, evidence)
    manifest, seen = object_of(value, "manifest"), set[int]()
    own = _receipts(evidence, len(choices), "response.llm42")
    beside = _receipts(value, len(choices), "record")
    for position, choice in enumerate(choices):
        index = _index(choice, position, seen)
        name = text_of(value, "id") or text_of(reply, "id") or f"line {line}"
        claim = Claim(line, index, name, text_of(reply, "system_fingerprint") or "", contradiction=odd)
        for receipt in filter(None, (own[position], beside[position])):
            claim = _with_receipt(claim, receipt, choice, reply)
        claim = _of_choice(claim, choice, reply, body)
        yield complete(replace(claim, body=body, manifest=manifest, choices=len(choices)))


def _question(
    value: Mapping[str, Any], reply: Mapping[str, Any], evidence: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    """The request, with the seed that it was run with, and what of the reply as a whole contradicts it."""
    body, seed = body_of(value), evidence.get("seed")
    if body is not None and body.get("echo"):
        raise BadRecord("request.echo: the reply repeats the prompt; store token ids or a receipt")
    require_deterministic(evidence.get("deterministic"), "response.llm42.deterministic")
    if seed is not None and type(seed) is not int:
        raise BadRecord("response.llm42.seed: a whole number is needed")
    pairs = {
        "seed of the reply": (_seed(body), _seed(evidence)),
        "model of the reply": (model_in(body), model_in(reply)),
    }
    odd = _foreign(reply, REPLY, "response") or differing(pairs)
    if body is not None and seed is not None and body.get("seed") is None:
        body = {**body, "seed": seed}
    return body, odd


def _seed(value: Mapping[str, Any] | None) -> Any:
    """Signed and unsigned numbers of 64 bits are two spellings of one seed."""
    seed = None if value is None else value.get("seed")
    return seed % SEEDS if type(seed) is int else seed


def _index(choice: Any, position: int, seen: set[int]) -> int:
    """Which choice it says it is; noted in `seen`."""
    if not isinstance(choice, Mapping):
        raise BadRecord("response.choices: JSON objects are needed")
    index = choice.get("index", position)
    if type(index) is not int or index < 0 or index in seen:
        raise BadRecord(
            f"response.choices: index {index!r} is not a whole number from 0 on, or is there twice"
        )
    seen.add(index)
    return index


def _foreign(value: Mapping[str, Any], known: frozenset[str], where: str) -> str:
    """The first field that no answer of this service has, unless it is empty, as clients' libraries add
    them; in words."""
    odd = sorted(name for name in set(value) - known if value[name] not in (None, "", [], {}))
    return f"{where}.{odd[0]}: no deterministic answer of this service has it" if odd else ""


def _receipts(value: Mapping[str, Any], choices: int, where: str) -> Sequence[Receipt | None]:
    """`receipt` of the one choice, or `receipts` of all of them."""
    single, several = value.get("receipt"), value.get("receipts")
    if single is not None and several is not None:
        raise BadRecord(f"{where}: it has receipt and receipts: keep one of them")
    found = [single] if single is not None else several
    if found is None:
        return [None] * choices
    if not isinstance(found, list) or len(found) != choices:
        raise BadRecord(f"{where}: one receipt for each choice is needed")
    return [Receipt.from_json(r) for r in found]


def _with_receipt(
    claim: Claim, receipt: Receipt, choice: Mapping[str, Any], reply: Mapping[str, Any]
) -> Claim:
    """The claim with a receipt of the choice, or a second one: it must say what the reply says."""
    evidence, first = object_of(reply, "llm42") or {}, claim.receipt
    name = text_of(reply, "id")
    twice: dict[str, tuple[Any, Any]] = {
        "id": (name and f"{name}-{claim.choice}", receipt.id),
        "created": (reply.get("created"), receipt.created),
        "system_fingerprint": (text_of(reply, "system_fingerprint"), receipt.fingerprint),
        "model": (model_in(reply), receipt.model),
        "finish_reason": (text_of(choice, "finish_reason"), receipt.finish or ""),
        "prompt_token_ids": (_prompt_ids(choice, reply), receipt.prompt),
        "token_ids": (ids_of(choice, "token_ids"), receipt.output),
    }
    if claim.choice == 0:  # the seeds of further choices are made of it
        twice["seed"] = (_seed(evidence), receipt.sampling.seed)
    odd = claim.contradiction or differing(
        {f"reply's {name} beside the receipt": p for name, p in twice.items()}
    )
    if first is None:
        return replace(of_receipt(receipt, claim.line, claim.choice), contradiction=odd)
    same = first.signed_fields() == receipt.signed_fields()
    ids = {"prompt": (first.prompt, receipt.prompt), "output": (first.output, receipt.output)}
    odd = odd or (
        "" if same else "the record contradicts itself: the receipt beside the reply is another one"
    )
    return replace(
        claim,
        second=receipt,
        prompt=first.prompt or receipt.prompt,
        output=first.output or receipt.output,
        contradiction=odd or differing({f"{n} of the receipt beside the reply": p for n, p in ids.items()}),
    )


def _prompt_ids(choice: Mapping[str, Any], reply: Mapping[str, Any]) -> tuple[int, ...] | None:
    """A completion's are in each choice, a chat's are at the top: all choices share them."""
    own = ids_of(choice, "prompt_token_ids")
    return ids_of(reply, "prompt_token_ids") if own is None else own


def _of_choice(
    claim: Claim, choice: Mapping[str, Any], reply: Mapping[str, Any], body: Mapping[str, Any] | None
) -> Claim:
    """The claim with what one choice of a reply says."""
    prompt, output = _prompt_ids(choice, reply), ids_of(choice, "token_ids")
    message = object_of(choice, "message")
    chat = message is not None
    text = text_of(choice, "text") if message is None else text_of(message, "content")
    if text is None:
        raise BadRecord("response.choices: text (of a chat reply: message.content) is needed")
    logprobs, names, odd = _logprobs(object_of(choice, "logprobs") or {}, chat)
    odd = odd or _foreign(choice, CHAT_CHOICE if chat else COMPLETION_CHOICE, "response.choices")
    odd = odd or differing({"prompt_token_ids of the choice": (prompt, ids_of(reply, "prompt_token_ids"))})
    if text_of(choice, "finish_reason") is None:
        odd = odd or "the reply's choice has no finish_reason: a whole reply has one"
    if body is not None and chat != ("messages" in body):
        odd = odd or "the reply is not of the request's kind: one is a chat, the other a completion"
    return replace(
        claim,
        prompt=claim.prompt if prompt is None else prompt,
        output=claim.output if output is None else output,
        logprobs=logprobs,
        names=names,
        text=text,
        finish=text_of(choice, "finish_reason"),
        contradiction=claim.contradiction
        or odd
        or (_message_problem(message) if message is not None else ""),
    )


def _message_problem(message: Mapping[str, Any]) -> str:
    """What a chat message says besides its text that no answer says; empty when there is nothing."""
    if message.get("role", "assistant") != "assistant":
        return f"message.role is {message['role']!r}; an answer is the assistant's"
    return _foreign(message, MESSAGE, "message")


def _logprobs(found: Mapping[str, Any], chat: bool) -> tuple[tuple[float, ...] | None, Names, str]:
    """Log-probabilities, how they spell the tokens, and a field that is none of them, in words."""
    if not chat:
        names = Names(_texts(found, "tokens"), offsets=_offsets(found))
        return (floats_of(found, "token_logprobs"), names, _foreign(found, COMPLETION_LOGPROBS, "logprobs"))
    content, odd = found.get("content"), _foreign(found, CHAT_LOGPROBS, "logprobs")
    if content is None:
        return None, Names(), odd
    if not isinstance(content, list) or not all(isinstance(entry, Mapping) for entry in content):
        raise BadRecord("logprobs.content: JSON objects are needed")
    foreign = filter(None, (_foreign(entry, CHAT_TOKEN, "logprobs.content") for entry in content))
    names = Names(
        _texts({"content.token": [entry.get("token") for entry in content]}, "content.token"),
        tuple(_bytes(entry) for entry in content),
    )
    values = floats_of({"logprobs": [entry.get("logprob") for entry in content]}, "logprobs")
    return values, names, odd or next(foreign, "")


def _texts(value: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise BadRecord(f"logprobs.{name}: the texts of the tokens are needed")
    return tuple(found)


def _offsets(value: Mapping[str, Any]) -> tuple[int, ...] | None:
    found = value.get("text_offset")
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(at) is int for at in found):
        raise BadRecord("logprobs.text_offset: whole numbers are needed")
    return tuple(found)


def _bytes(entry: Mapping[str, Any]) -> bytes | None:
    found = entry.get("bytes")
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(b) is int and 0 <= b < 256 for b in found):
        raise BadRecord("logprobs.content.bytes: a list of bytes is needed")
    return bytes(found)
