"""Audits of stored answers: all of many are confirmed, and one changed token, bit or byte in one of them is
found. The negative controls break what an audit rests on, and the same audit must notice."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from llm42.audit.compare import Finding, Verdict
from llm42.audit.file import Records, parse_lines
from llm42.audit.replayer import Replayer
from llm42.config import AuditSettings
from llm42.errors import Overloaded, VerifierUnavailable
from llm42.fingerprint import fingerprint
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.receipt import (
    Answered,
    Keyring,
    Receipt,
    Signature,
    logprob_hash,
    make_receipt,
    sampling_to_json,
    token_hash,
)
from llm42.verifier.scheduler import Verifier
from tests.support import PENALISED, Answer, Lab, collect, request_of

ANSWERS = 500
FINGERPRINT = "tiny"
KEYS = Keyring({"k1": b"0123456789abcdef"}, "k1")
Stored = list[dict[str, Any]]


def requests_of(body: Any) -> list[Request]:
    """The service's would apply templates; here a body names what it wants by itself."""
    stops = tuple(body.get("stop_token_ids", ()))
    seed = body["seed"]
    made = request_of("planned", seed, body["length"], body["max_tokens"], stop_token_ids=stops)
    return [replace(made, stop=tuple(body.get("stop", ())))]


def record_of(request: Request, answer: Answer, **ids: bool) -> dict[str, Any]:
    """An answer as a client stores it: the receipt, and beside it what it keeps no hash of."""
    answered = Answered(
        request.request_id,
        "tiny",
        0,
        FINGERPRINT,
        request.prompt,
        request.sampling,
        answer.tokens,
        answer.logprobs,
        answer.finish,
    )
    receipt = KEYS.sign(make_receipt(answered, ids.get("prompt_ids", True), ids.get("output_ids", True)))
    return {"receipt": receipt.to_json(), "logprobs": [p.logprob for p in answer.logprobs]}


def records_of(stored: Sequence[dict[str, Any]]) -> Records:
    """Through the text of a file and back."""
    return parse_lines([json.dumps(r).encode() for r in stored])


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """500 questions: greedy, sampled and penalised, prompts of 4 to 40 tokens, outputs of 1 to 12."""
    made = []
    for i in range(ANSWERS):
        request = request_of(f"r{i}", i, 4 + i * 7 % 37, 1 + i % 12)
        sampling = PENALISED if i % 5 == 4 else replace(request.sampling, seed=i, temperature=i % 3 / 2)
        made.append(replace(request, sampling=sampling))
    return made


@pytest.fixture(scope="module")
def stored(tiny: Lab, requests: list[Request]) -> Stored:
    """Their answers, by the whole service of one process, with a fast path that proposes wrong tokens."""
    verifier = tiny.verifier().start()
    generator = tiny.generator(tiny.engine(corrupt_share=0.05), verifier)

    async def run() -> list[Answer]:
        places = asyncio.Semaphore(32)

        async def one(request: Request) -> Answer:
            async with places:
                return await collect(generator, request)

        return await asyncio.gather(*(one(r) for r in requests))

    answers = asyncio.run(run())
    tiny.close()
    return [record_of(r, a) for r, a in zip(requests, answers, strict=True)]


@dataclass
class Judge:
    """`Answers` of a verifier, with the fingerprint that the records claim; counts, and can misbehave."""

    verifier: Verifier
    cold: bool = True
    calls: list[int] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    name: str = FINGERPRINT
    generator: Any = None
    running: int = 0
    most: int = 0

    async def fingerprint(self, agreed: bool = False) -> tuple[str, dict[str, Any]]:
        assert agreed
        return self.name, self.manifest

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        self.calls.append(len(windows))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.failures:
                raise self.failures.pop()
            return await self.verifier.verify(windows, cold=self.cold)
        finally:
            self.running -= 1

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        deltas: AsyncGenerator[Delta, None] = self.generator.generate(request)
        return deltas


async def audit(lab: Lab, judge: Judge, records: Records, **settings: Any) -> list[Finding]:
    found: list[Finding] = []
    limits = AuditSettings(**settings)
    replayer = Replayer(judge, limits, KEYS, lab.tokenizer, requests_of, records.manifests)
    await replayer.audit(records.claims, found.append)
    assert sorted((f.line, f.choice) for f in found) == [(c.line, c.choice) for c in records.claims]
    return sorted(found, key=lambda f: f.line)


def odd_ones(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.verdict != Verdict.CONFIRMED]


@pytest.mark.slow
async def test_500_stored_answers_are_confirmed_from_a_cold_cache(lab: Lab, stored: Stored) -> None:
    judge = Judge(lab.verifier().start())
    findings = await audit(lab, judge, records_of(stored), batch_tokens=1024)
    assert len(findings) == ANSWERS
    assert odd_ones(findings) == []
    assert {f.signature for f in findings} == {Signature.VALID}
    stats = judge.verifier.stats()
    assert stats.cached_rows == 0
    assert stats.kv_held_blocks == stats.idle_sequences == 0, "an audit leaves nothing behind"
    assert len(judge.calls) < ANSWERS / 10, "many windows a call"
    assert judge.most <= AuditSettings().concurrency
    assert sum(f.rows for f in findings) == stats.rows


def changed(stored: Stored, at: int, index: int) -> tuple[Stored, int]:
    """One token of one answer is another one; the hash is made to fit, and the signature too."""
    record = json.loads(json.dumps(stored[at]))
    receipt = Receipt.from_json(record["receipt"])
    assert receipt.output is not None
    wrong = (receipt.output[index] + 1) % 512
    output = (*receipt.output[:index], wrong, *receipt.output[index + 1 :])
    forged = replace(receipt, output=output, output_sha256=token_hash(output), hmac=None, key=None)
    record["receipt"] = KEYS.sign(forged).to_json()
    return [*stored[:at], record, *stored[at + 1 :]], wrong


def with_one_bit(record: dict[str, Any], index: int) -> dict[str, Any]:
    """One log-probability is its neighbour among the doubles."""
    logprobs = list(record["logprobs"])
    logprobs[index] = math.nextafter(logprobs[index], 0)
    return record | {"logprobs": logprobs}


def with_one_byte(record: dict[str, Any]) -> dict[str, Any]:
    """The last digit of the HMAC is another one."""
    mac = record["receipt"]["hmac"]
    return record | {"receipt": record["receipt"] | {"hmac": mac[:-1] + ("0" if mac[-1] != "0" else "1")}}


@pytest.mark.slow
async def test_one_token_one_bit_and_one_byte_in_500_answers_are_found(lab: Lab, stored: Stored) -> None:
    """Each in an answer of its own; nothing else is reported."""
    records, wrong = changed(stored, 119, 5)
    records[222], records[77] = with_one_bit(stored[222], 3), with_one_byte(stored[77])
    findings = odd_ones(await audit(lab, Judge(lab.verifier().start()), records_of(records)))
    assert [f.line for f in findings] == [78, 120, 223]
    byte, token, bit = findings
    assert (byte.verdict, byte.signature) == (Verdict.BAD_SIGNATURE, Signature.INVALID)
    assert (token.verdict, bit.verdict) == (Verdict.DIFFERS, Verdict.DIFFERS)
    assert token.difference is not None
    assert (token.difference.index, token.difference.recorded_token) == (5, wrong)
    logprob = stored[222]["logprobs"][3]
    assert bit.difference is not None
    assert (bit.difference.index, bit.difference.canonical_logprob) == (3, logprob)
    assert bit.difference.recorded_token == bit.difference.canonical_token
    assert bit.difference.recorded_token_canonical_logprob == logprob
    assert bit.difference.recorded_logprob == math.nextafter(logprob, 0)


@pytest.mark.parametrize("index", [0, 6, 11])
async def test_the_first_token_that_differs_is_named_with_both_log_probabilities(
    lab: Lab, stored: Stored, index: int
) -> None:
    """First, middle and last token of an answer of 12."""
    at = 119
    records, wrong = changed(stored, at, index)
    (odd,) = odd_ones(await audit(lab, Judge(lab.verifier().start()), records_of(records[at - 5 : at + 5])))
    assert odd.difference is not None
    receipt = Receipt.from_json(stored[at]["receipt"])
    assert receipt.output is not None
    found, logprobs = odd.difference, stored[at]["logprobs"]
    assert (found.index, found.recorded_token) == (index, wrong)
    assert found.canonical_token == receipt.output[index]
    assert (found.canonical_logprob, found.recorded_logprob) == (logprobs[index], logprobs[index])


async def test_what_the_verifier_gives_the_recorded_token_is_reported(lab: Lab, stored: Stored) -> None:
    verifier = lab.verifier().start()
    receipt = Receipt.from_json(stored[0]["receipt"])
    assert receipt.prompt is not None
    asked = Window("top", receipt.prompt, receipt.prompt_len, (), receipt.sampling, 5)
    (commit,) = await verifier.verify([asked])
    assert isinstance(commit, Commit)
    token, logprob = next(x for x in commit.logprobs[0].top if x[0] != commit.next_token)
    flat = {"fingerprint": FINGERPRINT, "prompt": list(receipt.prompt), "output": [token]}
    line = flat | {"sampling": sampling_to_json(receipt.sampling)}
    (odd,) = await audit(lab, Judge(verifier), records_of([line]))
    assert odd.difference is not None
    assert odd.difference.recorded_logprob is None
    assert odd.difference.recorded_token_canonical_logprob == logprob
    assert odd.difference.canonical_logprob == commit.logprobs[0].logprob


async def test_a_log_probability_is_found_by_its_hash_when_only_that_is_stored(
    lab: Lab, stored: Stored
) -> None:
    receipt = Receipt.from_json(stored[7]["receipt"])
    values = [math.nextafter(stored[7]["logprobs"][0], 0), *stored[7]["logprobs"][1:]]
    forged = KEYS.sign(replace(receipt, logprobs_sha256=logprob_hash(values)))
    records = records_of([stored[6]["receipt"], forged.to_json()])
    good, bad = await audit(lab, Judge(lab.verifier().start()), records)
    assert (good.verdict, bad.verdict) == (Verdict.CONFIRMED, Verdict.DIFFERS)
    assert "logprobs_sha256" in bad.reason


async def test_control_a_verifier_with_other_bits_does_not_confirm(lab: Lab, stored: Stored) -> None:
    """One-ulp errors in an operator: if the audit compared nothing, this would pass too."""
    judge = Judge(lab.verifier(plants=["one-ulp"]).start())
    findings = await audit(lab, judge, records_of(stored[:60]))
    assert len(odd_ones(findings)) > 5


async def test_control_an_audit_that_trusts_the_cache_is_misled_by_it(lab: Lab, stored: Stored) -> None:
    """The cache is filled with what a wrong computation left: only an audit that takes nothing from it is
    right about the stored answers."""

    async def run(cold: bool) -> int:
        verifier = lab.verifier().start()
        warm = Judge(verifier, cold=False)
        records = records_of(stored[40:60])
        assert odd_ones(await audit(lab, warm, records)) == []
        kv = verifier._runner.kv  # type: ignore[attr-defined]
        kv.fill(range(verifier._pool.num_blocks), 0.5)
        return len(odd_ones(await audit(lab, Judge(verifier, cold=cold), records)))

    assert await run(cold=True) == 0
    assert await run(cold=False) > 0


async def test_an_answer_longer_than_a_window_takes_several(lab: Lab, stored: Stored) -> None:
    long = [i for i in range(ANSWERS) if len(stored[i]["logprobs"]) == 12][:8]
    judge = Judge(lab.verifier().start())
    findings = await audit(lab, judge, records_of([stored[i] for i in long]), max_window=5)
    assert odd_ones(findings) == []
    assert sum(judge.calls) == 3 * len(long)
    for index in (4, 5, 9, 10, 11):
        records, _ = changed(stored, long[0], index)
        (odd,) = await audit(lab, judge, records_of([records[long[0]]]), max_window=5)
        assert odd.difference is not None
        assert odd.difference.index == index


async def test_another_fingerprint_is_named_with_the_fields_that_differ(lab: Lab, stored: Stored) -> None:
    ours = {"device": {"threads": 1}, "libraries": {"torch": "2.13"}}
    theirs = {"device": {"threads": 2}, "libraries": {"torch": "2.13"}}
    flat = {
        "fingerprint": fingerprint(theirs),
        "prompt": [5, 6],
        "output": [7],
        "sampling": sampling_to_json(request_of("x", 1).sampling),
    }
    lines = [
        {"fingerprint": fingerprint(theirs), "manifest": theirs},
        flat,
        flat | {"fingerprint": "llm42-0"},
    ]
    lines.append(flat | {"fingerprint": "llm42-1", "manifest": theirs})
    judge = Judge(lab.verifier().start(), manifest=ours)
    known, unknown, wrong = await audit(lab, judge, records_of(lines))
    assert {f.verdict for f in (known, unknown, wrong)} == {Verdict.OTHER_FINGERPRINT}
    assert known.fields == {"device.threads": (2, 1)}
    assert "no manifest" in unknown.reason
    assert "belongs to neither" in wrong.reason
    assert judge.calls == [], "nothing is computed for it"


async def test_verifiers_replaced_during_an_audit_confirm_nothing(lab: Lab, stored: Stored) -> None:
    judge = Judge(lab.verifier().start())
    judge.verifier.fingerprint = "another"
    findings = await audit(lab, judge, records_of(stored[:3]))
    assert {f.verdict for f in findings} == {Verdict.OTHER_FINGERPRINT}


async def test_busy_verifiers_are_asked_again_and_dead_ones_lose_no_record(lab: Lab, stored: Stored) -> None:
    judge = Judge(lab.verifier().start())
    judge.failures = [Overloaded("full"), VerifierUnavailable("gone")]
    assert odd_ones(await audit(lab, judge, records_of(stored[:20]))) == []
    bug = Judge(lab.verifier().start(), failures=[RuntimeError("a bug")])
    findings = await audit(lab, bug, records_of(stored[:40]), batch_tokens=256)
    failed = odd_ones(findings)
    assert 0 < len(failed) < 40
    assert {f.verdict for f in failed} == {Verdict.FAILED}


async def test_what_no_model_can_have_said_is_a_failure_of_that_record(lab: Lab, stored: Stored) -> None:
    flat = {"fingerprint": FINGERPRINT, "sampling": {"seed": "1"}}
    lines = [stored[0], flat | {"prompt": [600], "output": [1]}, flat | {"prompt": [1] * 800, "output": [1]}]
    good, outside, long = await audit(lab, Judge(lab.verifier().start()), records_of(lines))
    assert good.verdict == Verdict.CONFIRMED
    assert (outside.verdict, long.verdict) == (Verdict.FAILED, Verdict.FAILED)
    assert "vocabulary" in outside.reason
    assert "context" in long.reason


async def test_a_hash_alone_is_audited_by_generating_again(
    lab: Lab, stored: Stored, requests: list[Request]
) -> None:
    verifier = lab.verifier().start()
    judge = Judge(verifier, generator=lab.generator(lab.engine(), verifier))
    bare = [replace(Receipt.from_json(stored[i]["receipt"]), output=None) for i in (20, 21, 44, 47)]
    assert odd_ones(findings := await audit(lab, judge, records_of([r.to_json() for r in bare]))) == []
    assert all(f.regenerated for f in findings)
    wrong = KEYS.sign(replace(bare[1], output_sha256=bare[0].output_sha256))
    findings = await audit(lab, judge, records_of([bare[0].to_json(), wrong.to_json()]))
    assert [f.verdict for f in findings] == [Verdict.CONFIRMED, Verdict.DIFFERS]
    assert "output_sha256" in findings[1].reason


async def test_text_alone_is_generated_again_and_compared(lab: Lab) -> None:
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(), verifier)
    body = {"prompt": "", "seed": 3, "length": 12, "max_tokens": 20}
    answer = await collect(generator, requests_of(body)[0])
    stop = {**body, "stop": [answer.text[4:6]]}
    cut = await collect(generator, requests_of(stop)[0])
    assert cut.text == answer.text[:4]
    base = {"fingerprint": FINGERPRINT}
    tokens = base | {"request": body, "output": list(answer.tokens)}
    lines = [
        base | {"request": body, "text": answer.text},
        base | {"request": stop, "text": cut.text},
        tokens | {"text": answer.text},
        base | {"request": body, "text": answer.text[:-1]},
        tokens | {"text": answer.text[:-1]},
        tokens | {"output": list(answer.tokens[:-1])},
        base | {"request": stop, "text": answer.text, "output": list(answer.tokens)},
        tokens | {"prompt": [9, 9]},
        base | {"request": body | {"max_tokens": 0}, "text": ""},
    ]
    findings = await audit(lab, Judge(verifier, generator=generator), records_of(lines))
    assert [f.verdict for f in findings] == [
        *[Verdict.CONFIRMED] * 3,
        *[Verdict.DIFFERS] * 5,
        Verdict.FAILED,
    ]
    assert "character" in findings[3].reason
    assert "text is not that of the tokens" in findings[4].reason
    assert "does not end where" in findings[5].reason
    assert "text" in findings[6].reason
    assert "prompt tokens" in findings[7].reason
    assert "no output" in findings[8].reason
