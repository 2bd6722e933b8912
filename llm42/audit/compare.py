"""What an audit finds out about one stored output: pure comparisons of a claim with canonical tokens."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from llm42.audit.claim import Claim, Names
from llm42.audit.question import prompt_fits
from llm42.protocol import Commit, FinishReason, Request, TokenLogprob, Window
from llm42.receipt import Receipt, Signature, finite, logprob_hash, token_hash
from llm42.text.output_text import OutputText
from llm42.text.tokenizer import Tokenizer


class Verdict(StrEnum):
    """The outcome of auditing one output."""

    CONFIRMED = "confirmed"
    DIFFERS = "differs"
    OTHER_FINGERPRINT = "other_fingerprint"
    BAD_SIGNATURE = "bad_signature"
    FAILED = "failed"
    """It could not be computed again; nothing is known."""
    BAD_RECORD = "bad_record"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output token whose id or log-probability is not the canonical one."""

    index: int
    recorded_token: int
    recorded_logprob: float | None
    """None: the record has no log-probabilities."""
    canonical_token: int
    canonical_logprob: float
    recorded_token_canonical_logprob: float | None = None
    """What the verifier gives the recorded token."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome for one output."""

    line: int
    choice: int
    id: str
    verdict: Verdict
    reason: str = ""
    signature: Signature = Signature.UNSIGNED
    regenerated: bool = False
    """The output was generated again and compared as a whole, instead of being replayed token by token."""
    tokens: int = 0
    """Output tokens that were compared."""
    rows: int = 0
    """Positions that the verifier computed."""
    difference: Difference | None = None
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Manifest fields that differ: (the record's, the verifier's)."""

    def to_json(self) -> dict[str, Any]:
        """Without what does not apply."""
        body = asdict(self)
        always = ("line", "choice", "id", "verdict")
        return {
            k: v for k, v in body.items() if k in always or not (v is None or v is False or v in ("", {}))
        }


def windows_of(request: Request, output: Sequence[int], longest: int) -> list[Window]:
    """The output as candidates after the prompt; more than one window only when it is longer than `longest`.

    The last token of each is not a candidate: it is compared with the token that the verifier adds.
    """
    windows = []
    for start in range(0, len(output), longest):
        chunk = tuple(output[start : start + longest])
        windows.append(
            Window(
                f"{request.request_id}-{start}",
                (*request.prompt, *output[:start]),
                len(request.prompt),
                chunk[:-1],
                request.sampling,
            )
        )
    return windows


def first_difference(
    output: Sequence[int], logprobs: Sequence[float] | None, commits: Sequence[Commit], prompt_len: int
) -> Difference | None:
    """Compares ids, and the bits of the log-probabilities where the record has them, as far as canonical
    tokens are known."""
    for commit in commits:
        for index, entry in enumerate(commit.logprobs, commit.base - prompt_len):
            recorded = None if logprobs is None else logprobs[index]
            same = recorded is None or bits(recorded) == bits(finite(entry.logprob))
            if entry.token != output[index] or not same:
                return Difference(index, output[index], recorded, entry.token, finite(entry.logprob))
    return None


def bits(value: float) -> bytes:
    """The IEEE 754 double: tells -0.0 from 0.0, and a last bit from another."""
    return struct.pack("<d", value)


def receipt_problem(receipt: Receipt, output: Sequence[int], logprobs: Sequence[float]) -> str:
    """How canonical tokens and log-probabilities contradict a receipt; empty when they do not."""
    if receipt.output not in (None, tuple(output)):
        return "the ids in the receipt (output) are not the canonical ones; those beside it are"
    if receipt.output_len != len(output):
        return f"the receipt is for {receipt.output_len} output tokens, not {len(output)}"
    if receipt.output_sha256 != token_hash(output):
        return "the canonical tokens do not have the receipt's hash (output_sha256)"
    if receipt.logprobs_sha256 != logprob_hash(logprobs):
        return "the canonical log-probabilities do not have the receipt's hash (logprobs_sha256)"
    return ""


def logprob_problem(recorded: Sequence[float] | None, found: Sequence[TokenLogprob]) -> str:
    """How canonical log-probabilities contradict recorded ones, bit for bit; empty when they do not."""
    if recorded is None:
        return ""
    if len(recorded) != len(found):
        return f"{len(recorded)} log-probabilities are stored; the canonical answer has {len(found)}"
    pairs = zip(recorded, found, strict=True)
    odd = [i for i, (value, entry) in enumerate(pairs) if bits(value) != bits(finite(entry.logprob))]
    return f"the log-probabilities are not the canonical ones, from token {odd[0]} on" if odd else ""


def names_problem(names: Names, output: Sequence[int], tokenizer: Tokenizer) -> str:
    """How canonical tokens contradict the texts, bytes and places that a reply's log-probabilities give
    them; empty when they do not."""
    texts = [tokenizer.token_text(token) for token in output]
    raw = [tokenizer.token_bytes(token) for token in output]
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    stored: tuple[tuple[str, Sequence[Any] | None, Sequence[Any]], ...] = (
        ("texts", names.texts, texts),
        ("bytes", names.raw, raw),
        ("offsets", names.offsets, starts),
    )
    for what, said, right in stored:
        if said is None:
            continue
        if len(said) != len(right):
            return f"{len(said)} {what} of tokens are stored beside the log-probabilities, not {len(right)}"
        odd = [i for i, (a, b) in enumerate(zip(said, right, strict=True)) if a not in (None, b)]
        if odd:
            return f"the {what} beside the log-probabilities are not the tokens', from token {odd[0]} on"
    return ""


def question_problem(claim: Claim, request: Request) -> str:
    """How the record contradicts itself about what was asked, and how much of it; empty when it does not.

    request: as it was sent; where no body is stored, its max_tokens is not known and not looked at.
    """
    receipt, length = claim.receipt, len(claim.output or ())
    if claim.prompt is not None and claim.prompt != request.prompt:
        return "the stored prompt tokens are not those of the stored request"
    if receipt is not None and not prompt_fits(receipt, request.prompt):
        return "the prompt does not have the receipt's length and hash (prompt_sha256)"
    if claim.sampling is not None and claim.sampling != request.sampling:
        whose = "the stored" if receipt is None else "the receipt's"
        return f"{whose} sampling is not that of the stored request"
    if receipt is not None and claim.output is None:
        length = receipt.output_len
    if claim.body is not None and length > request.max_tokens:
        return f"the output has {length} tokens; the request allows {request.max_tokens} (max_tokens)"
    return ""


def text_problem(claim: Claim, request: Request, output: Sequence[int], tokenizer: Tokenizer) -> str:
    """How canonical tokens contradict the record's text and end; empty when they do not.

    Without the request, stop strings are unknown: then the text of an answer that did not end by its length
    may be a beginning of the tokens' text, and nothing is known of the end.
    """
    text = OutputText.of(tokenizer, request)
    shown, used = text.push(output)
    shown += text.flush()
    cut = claim.body is None and claim.finish != FinishReason.LENGTH
    partly = cut and claim.text is not None and shown.startswith(claim.text)
    if claim.text not in (None, shown) and not partly:
        return _differing_text(claim.text or "", shown)
    if claim.body is None:
        return ""
    stopped = text.stopped or output[-1] in request.stop_token_ids
    early = any(token in request.stop_token_ids for token in output[:-1]) or used < len(output)
    if early or not (stopped or len(output) == request.max_tokens):
        return f"the output does not end where the request says: it has {len(output)} tokens"
    finish = FinishReason.STOP if stopped else FinishReason.LENGTH
    if claim.finish is not None and claim.finish != finish:
        return f"the stored finish reason is {claim.finish!r}; the output ends with {finish.value!r}"
    return ""


def _differing_text(stored: str, canonical: str) -> str:
    same = (i for i, (a, b) in enumerate(zip(canonical, stored, strict=False)) if a != b)
    at = next(same, min(len(canonical), len(stored)))
    there = canonical[at : at + 24]
    return f"the stored text is not that of the tokens: from character {at} on, {there!r} is canonical"


def throughput(findings: Sequence[Finding], seconds: float) -> dict[str, float]:
    """Records, output tokens and computed positions per second."""
    seconds = max(seconds, 1e-9)
    tokens, rows = sum(f.tokens for f in findings), sum(f.rows for f in findings)
    rates = {"records_s": len(findings), "tokens_s": tokens, "rows_s": rows}
    return {name: round(value / seconds, 2) for name, value in rates.items()}


def summary(findings: Sequence[Finding], began: float) -> dict[str, Any]:
    """Counts by verdict and signature, and the speed since `began` (time.monotonic)."""
    seconds = time.monotonic() - began
    counts = {v.value: sum(f.verdict == v for f in findings) for v in Verdict}
    signatures = {s.value: sum(f.signature == s for f in findings) for s in Signature}
    return {
        "records": len(findings),
        **counts,
        "signatures": signatures,
        "seconds": round(seconds, 3),
        **throughput(findings, seconds),
    }
