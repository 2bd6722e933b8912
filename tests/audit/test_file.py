"""Reading stored answers: four forms, and an error with its line number for whatever is none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm42.audit.file import AuditFileError, parse_lines, read_records
from llm42.audit.records import claims_of
from llm42.fingerprint import fingerprint
from llm42.protocol import SamplingParams, TokenLogprob
from llm42.receipt import Answered, make_receipt

FLAT: dict[str, Any] = {
    "id": "a",
    "fingerprint": "llm42-x",
    "prompt": [1, 2],
    "output": [3, 4],
    "logprobs": [-0.5, -1],
    "sampling": {"temperature": 0.5, "seed": "7"},
}
SAMPLING = SamplingParams(temperature=0.5, seed=7)
RECEIPT = make_receipt(
    Answered(
        "r",
        "tiny",
        0,
        "llm42-x",
        (1, 2),
        SAMPLING,
        (3, 4),
        (TokenLogprob(3, -0.5), TokenLogprob(4, -1.0)),
        "stop",
    ),
    True,
    False,
).to_json()
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "deterministic": True}
REPLY: dict[str, Any] = {
    "id": "cmpl-1",
    "system_fingerprint": "llm42-x",
    "choices": [
        {"index": 0, "text": "yo", "finish_reason": "stop"},
        {"index": 1, "text": "ho", "finish_reason": "stop"},
    ],
    "llm42": {"seed": 42},
}


def test_a_flat_record() -> None:
    (claim,) = claims_of(FLAT, 5)
    assert (claim.line, claim.prompt, claim.output, claim.sampling) == (5, (1, 2), (3, 4), SAMPLING)
    assert claim.logprobs == (-0.5, -1.0)


def test_a_receipt_alone_and_with_ids_beside_it() -> None:
    (alone,) = claims_of(RECEIPT, 1)
    assert (alone.prompt, alone.output, alone.sampling) == ((1, 2), None, SAMPLING)
    (beside,) = claims_of({"receipt": RECEIPT, "output": [3, 4], "logprobs": [-0.5, -1.0]}, 1)
    assert beside.output == (3, 4)
    assert beside.receipt == alone.receipt


def test_a_stored_exchange_gives_a_claim_for_each_choice() -> None:
    first, second = claims_of({"request": BODY, "response": REPLY}, 9)
    assert [(c.line, c.choice, c.text) for c in (first, second)] == [(9, 0, "yo"), (9, 1, "ho")]
    assert first.body is not None
    assert first.body["seed"] == 42, "the seed that the reply echoes, not whatever the default is later"
    chat = {
        "system_fingerprint": "llm42-x",
        "choices": [
            {
                "message": {"content": "yo"},
                "token_ids": [3],
                "prompt_token_ids": [1, 2],
                "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
            }
        ],
        "llm42": {"receipt": RECEIPT | {"output_len": 1}},
    }
    (claim,) = claims_of({"request": BODY, "response": chat}, 1)
    assert (claim.text, claim.output, claim.prompt, claim.logprobs) == ("yo", (3,), (1, 2), (-0.5,))
    assert claim.receipt is not None


def test_prompt_ids_at_the_top_of_a_chat_reply() -> None:
    """Where chat replies have them; older ones have them in their choices."""
    choices = [{"index": i, "message": {"content": "yo"}, "token_ids": [3]} for i in range(2)]
    reply = {"system_fingerprint": "llm42-x", "prompt_token_ids": [1, 2], "choices": choices}
    assert [c.prompt for c in claims_of({"request": BODY, "response": reply}, 1)] == [(1, 2)] * 2


def test_the_seed_of_the_reply_never_replaces_the_requests() -> None:
    named = BODY | {"seed": 41}
    odd, _ = claims_of({"request": named, "response": REPLY}, 1)
    assert odd.body == named
    assert "seed" in odd.contradiction
    good, _ = claims_of({"request": BODY | {"seed": 42}, "response": REPLY}, 1)
    assert good.contradiction == ""


BAD: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ("[1]", "a record must be a JSON object"),
    ('{"a": NaN}', "NaN is not JSON"),
    ("[" * 100_000, "not JSON"),
    ({}, "no fingerprint"),
    (FLAT | {"fingerprint": None}, "no fingerprint: only answers of deterministic requests"),
    (FLAT | {"outptu": [1]}, "unknown field 'outptu'"),
    (FLAT | {"prompt": None}, "prompt .* is missing"),
    (FLAT | {"sampling": None}, "sampling is missing"),
    (FLAT | {"output": None}, "no answer"),
    (FLAT | {"output": None, "text": "x"}, "text alone"),
    (FLAT | {"output": []}, "empty"),
    (FLAT | {"output": [1, True]}, "output: a list of token ids"),
    (FLAT | {"output": [1, -2]}, "not a token id"),
    (FLAT | {"logprobs": [-1]}, "1 logprobs for 2"),
    (FLAT | {"logprobs": ["a", "b"]}, "logprobs: a list of numbers"),
    (FLAT | {"logprobs": [10**400, 1]}, "logprobs"),
    (FLAT | {"prompt_len": 3}, "prompt_len is 3"),
    (FLAT | {"text": 4}, "text: text is needed"),
    ('{"id": "a", "id": "b"}', "'id' is there twice"),
    (FLAT | {"request": {"model": "x"}}, "request"),
    ({"receipt": {}}, "v is None"),
    ({"receipt": RECEIPT, "foo": 1}, "unknown field 'foo'"),
    ({"receipt": RECEIPT, "finish_reason": "stop"}, "unknown field 'finish_reason'"),
    ({"receipt": RECEIPT, "prompt_len": 5}, "prompt_len is 5; the prompt has 2"),
    ({"receipt": RECEIPT, "request": BODY | {"deterministic": False}}, "request.deterministic is False"),
    (RECEIPT | {"text": "yo"}, "unknown field 'text'"),
    (FLAT | {"finish": "stop"}, "unknown field 'finish'"),
    (FLAT | {"prompt": [1], "prompt_len": True}, "prompt_len is True"),
    (FLAT | {"prompt": None, "request": BODY, "prompt_len": 2}, "store the prompt"),
    ({"request": BODY, "response": REPLY, "output": [3]}, "unknown field 'output'"),
    ({"request": BODY, "response": REPLY, "fingerprint": "llm42-x"}, "unknown field 'fingerprint'"),
    ({"request": BODY, "response": REPLY, "receipt": RECEIPT}, "record: one receipt for each"),
    ({"response": REPLY, "receipt": RECEIPT, "receipts": [RECEIPT] * 2}, "it has receipt and receipts"),
    ({"request": BODY | {"deterministic": False}, "response": REPLY}, "request.deterministic is False"),
    ({"request": BODY | {"is_deterministic": 0}, "response": REPLY}, "request.is_deterministic is 0"),
    ({"request": BODY, "response": REPLY | {"llm42": {"deterministic": False}}}, "llm42.deterministic is"),
    (
        {"request": BODY, "response": REPLY | {"choices": [{"message": {"content": None}}]}},
        "message.content. is needed",
    ),
    ({"receipt": RECEIPT | {"output_len": 0}}, "output_len"),
    ({"request": BODY, "response": {}}, "response"),
    ({"request": BODY, "response": REPLY | {"system_fingerprint": None}}, "no fingerprint"),
    ({"request": BODY | {"echo": True}, "response": REPLY}, "echo"),
    ({"request": BODY, "response": REPLY | {"choices": [4]}}, "choices"),
    ({"request": BODY, "response": REPLY | {"llm42": {"receipt": RECEIPT}}}, "one receipt for each"),
    ({"request": BODY, "response": REPLY | {"choices": [{"index": 0, "text": "a"}] * 2}}, "there twice"),
    ({"request": BODY, "response": REPLY | {"llm42": {"seed": True}}}, "seed: a whole number"),
    ({"request": BODY, "response": REPLY, "manifest": [1]}, "manifest: a JSON object"),
    ({"fingerprint": "llm42-no", "manifest": {"a": 1}}, "manifest: its fingerprint is"),
    ({"fingerprint": "llm42-no", "manifest": None}, "manifest: a JSON object"),
    ('{"a": 1e999}', "too large for a double"),
    ('{"a": ["\\ud800"]}', "not valid Unicode"),
    ('{"\\ud800": 1}', "not valid Unicode"),
    ('{"a": ' * 200 + "1" + "}" * 200, "nested deeper"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_a_bad_line_is_reported_by_its_number_and_loses_nothing(line: Any, said: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    records = parse_lines([json.dumps(FLAT).encode(), b"\n", text.encode(), json.dumps(FLAT).encode()])
    assert [c.line for c in records.claims] == [1, 4]
    (bad,) = records.bad
    assert bad.line == 3
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(bad.message)


def test_bytes_that_are_no_text_and_a_byte_order_mark() -> None:
    records = parse_lines([b"\xef\xbb\xbf" + json.dumps(FLAT).encode(), b"\xff{}"])
    assert len(records.claims) == 1
    assert "not UTF-8" in records.bad[0].message


def test_a_manifest_line_explains_its_fingerprint() -> None:
    manifest = {"device": {"threads": 2}}
    name = fingerprint(manifest)
    line = {"object": "fingerprint", "fingerprint": name, "manifest": manifest}
    records = parse_lines([json.dumps(line).encode()])
    assert records.manifests == {name: manifest}
    assert not records.bad


def test_a_file_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AuditFileError, match="No such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(AuditFileError, match="holds no records"):
        read_records(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_or_a_pretty_printed_file_gets_one_hint(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([FLAT, FLAT], indent=indent))
    with pytest.raises(AuditFileError, match=r"one JSON array; JSON Lines is needed.*jq -c '\.\[\]' a\.json"):
        read_records(path)
    pretty = json.dumps(FLAT, indent=2)
    for text in (pretty, f"\n{pretty}\n{pretty}\n"):
        path.write_text(text)
        with pytest.raises(AuditFileError, match="several lines; JSON Lines is needed"):
            read_records(path)


def test_an_array_among_records_stays_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"[1]\n{json.dumps(FLAT)}\n")
    assert [b.line for b in read_records(path).bad] == [1]
