"""Receipts: compact JSON that reads back as it was, hashes that see one bit, signatures that see one byte."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm42.config import AuditSettings
from llm42.protocol import SamplingParams, TokenLogprob
from llm42.receipt import (
    Answered,
    InvalidReceipt,
    KeyProblem,
    Keyring,
    Receipt,
    Signature,
    logprob_hash,
    make_receipt,
    token_hash,
)

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, seed=2**64 - 3, logit_bias=((3, 1.0),), min_tokens=2)
ANSWER = Answered(
    "cmpl-1-0",
    "tiny",
    1_700_000_000,
    "llm42-abc",
    (1, 2, 3),
    SAMPLING,
    (7, 8),
    (TokenLogprob(7, -0.25), TokenLogprob(8, -math.inf)),
    "length",
)
KEYS = Keyring({"k1": b"0123456789abcdef"}, "k1")


def signed(prompt_ids: bool = False, output_ids: bool = False) -> Receipt:
    return KEYS.sign(make_receipt(ANSWER, prompt_ids, output_ids))


@pytest.mark.parametrize("ids", [False, True])
def test_a_receipt_reads_back_as_it_was(ids: bool) -> None:
    receipt = signed(ids, ids)
    text = json.dumps(receipt.to_json())
    assert Receipt.from_json(json.loads(text)) == receipt
    assert ("prompt" in receipt.to_json()) is ids
    assert ("output" in receipt.to_json()) is ids
    assert receipt.to_json()["sampling"]["seed"] == str(2**64 - 3), "64 bits survive readers with doubles"
    assert "top_k" not in receipt.to_json()["sampling"], "neutral fields are left out"


def test_the_hashes_see_order_length_and_single_bits() -> None:
    by_hand = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0])).hexdigest()
    assert token_hash((1, 2)) == by_hand
    assert len({token_hash(t) for t in ((1, 2), (2, 1), (1,), (1, 2, 0), (513,))}) == 5
    value = -0.25
    near = math.nextafter(value, 0)
    assert len({logprob_hash([p]) for p in (value, near, 0.0, -0.0)}) == 4
    assert logprob_hash([-math.inf]) == logprob_hash([-9999.0]), "what a client sees is hashed"


def test_a_signature_covers_every_field_but_the_lists_of_ids() -> None:
    receipt = signed(True, True)
    assert KEYS.check(receipt) == Signature.VALID
    assert KEYS.check(replace(receipt, prompt=None, output=None)) == Signature.VALID
    changes: dict[str, Any] = {
        "id": "x",
        "model": "x",
        "created": 1,
        "fingerprint": "x",
        "prompt_len": 4,
        "prompt_sha256": "0",
        "sampling": replace(SAMPLING, top_k=1),
        "output_len": 3,
        "output_sha256": "0",
        "logprobs_sha256": "0",
        "finish": "stop",
    }
    for name, value in changes.items():
        assert KEYS.check(replace(receipt, **{name: value})) == Signature.INVALID, name
    untouched = set(Receipt.__dataclass_fields__) - set(changes)
    assert untouched == {"prompt", "output", "key", "hmac"}


def test_one_byte_of_the_hmac_one_of_the_key_and_missing_halves_are_noticed() -> None:
    receipt = signed()
    assert receipt.hmac is not None
    for at in range(len(receipt.hmac)):
        other = "0" if receipt.hmac[at] != "0" else "1"
        changed = replace(receipt, hmac=receipt.hmac[:at] + other + receipt.hmac[at + 1 :])
        assert KEYS.check(changed) == Signature.INVALID
    assert Keyring({"k1": b"0123456789abcdeX"}).check(receipt) == Signature.INVALID
    assert KEYS.check(replace(receipt, hmac=None)) == Signature.INVALID
    assert KEYS.check(replace(receipt, key=None)) == Signature.INVALID
    assert KEYS.check(replace(receipt, hmac="ä")) == Signature.INVALID
    assert KEYS.check(replace(receipt, key="k2")) == Signature.UNKNOWN_KEY
    assert KEYS.check(make_receipt(ANSWER, False, False)) == Signature.UNSIGNED


def test_another_json_writers_numbers_do_not_break_a_signature() -> None:
    receipt = KEYS.sign(replace(make_receipt(ANSWER, False, False), sampling=SamplingParams(temperature=1.0)))
    body = receipt.to_json()
    assert body["sampling"]["temperature"] == 1.0
    body["sampling"]["temperature"] = 1  # as JavaScript writes 1.0
    assert KEYS.check(Receipt.from_json(body)) == Signature.VALID


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": 2}, "v is 2"),
        ({"v": True}, "v is True"),
        ({"v": 1.0}, "v is 1.0"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"prompt_len": "3"}, "prompt_len"),
        ({"output": [-1]}, "not a token id"),
        ({"output": [2**31]}, "not a token id"),
        ({"sampling": {"temperature": "hot"}}, "temperature"),
        ({"sampling": {"seed": "x"}}, "sampling.seed"),
        ({"sampling": {"seed": 2**64}}, "sampling.seed"),
        ({"sampling": {"beam": 2}}, "unknown field 'beam'"),
        ({"sampling": None}, "sampling"),
        ({"fingerprint": None}, "fingerprint"),
    ],
)
def test_what_is_wrong_with_a_receipt_is_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidReceipt, match=said):
        Receipt.from_json(signed().to_json() | change)


def test_key_files_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    file = tmp_path / "k1"
    file.write_text("0123456789abcdef\n")
    ring = Keyring.load(AuditSettings(keys={"k1": str(file)}, signing_key="k1"))
    assert ring.check(signed()) == Signature.VALID
    file.write_text("short")
    with pytest.raises(KeyProblem, match=r"audit\.keys\.k1"):
        Keyring.load(AuditSettings(keys={"k1": str(file)}))
    with pytest.raises(KeyProblem, match="No such file"):
        Keyring.load(AuditSettings(keys={"k1": str(tmp_path / "none")}))
    with pytest.raises(ValueError, match="signing_key"):
        AuditSettings(signing_key="k9")
