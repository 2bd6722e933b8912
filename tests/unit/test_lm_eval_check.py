"""The comparison of lm-eval's logs: what it calls equal, and what it refuses since it would show nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import lm_eval_check
from benchmarks.service.lm_eval_check import CHOICE, TEXT, Refused, differing, require_answers, texts_of

QUESTIONS = 4
LM_EVAL = """#!{python}
import json, pathlib, sys
at = lambda name: sys.argv[sys.argv.index(name) + 1]
model, batch = json.loads(at("--model_args")), int(at("--batch_size"))
many = batch > 1 or model["num_concurrent"] > 1
texts = {texts}
out = pathlib.Path(at("--output_path")) / "m"
out.mkdir(parents=True)
(out / "results_2026-12-03.json").write_text('{{"lm_eval_version": "0"}}')
for task, answer in (("{choice}", lambda i: [["-1.5", "False"]]), ("{text}", lambda i: [texts[i]])):
    lines = [json.dumps({{"doc_id": i, "resps": [answer(i)]}}) for i in range(len(texts))]
    (out / f"samples_{{task}}_2026-12-03.jsonl").write_text("\\n".join(lines) + "\\n")
"""
"""Stands for lm-eval. The texts are an expression of the test, in which `many` says how it was asked."""


def log(*texts: str) -> bytes:
    return b"".join(json.dumps({"resps": [[text]]}).encode() + b"\n" for text in texts)


def logs(*texts: str) -> dict[str, bytes]:
    return {CHOICE: log(*texts), TEXT: log(*texts)}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """main() with an lm-eval whose texts are an expression; its exit status, and the result or None."""
    monkeypatch.setattr(lm_eval_check, "write_tokenizer", lambda path, directory: directory)
    results: list[tuple[str, Any, Any]] = []
    monkeypatch.setattr(lm_eval_check, "report", lambda *words: results.append(words))

    def checked(texts: str, *options: str) -> tuple[int, Any]:
        place = tmp_path / "lm_eval"
        place.write_text(LM_EVAL.format(python=sys.executable, texts=texts, choice=CHOICE, text=TEXT))
        place.chmod(0o755)
        words = ["x", "--lm-eval", str(place), "--questions", str(QUESTIONS), "--control", "--result", "r"]
        monkeypatch.setattr(sys, "argv", [*words, *options])
        return lm_eval_check.main(), results.pop() if results else None

    return checked


# ---- what is compared


def test_lines_that_differ_are_counted() -> None:
    assert differing(logs("a", "b", "c"), logs("a", "x", "c")) == {CHOICE: 1, TEXT: 1}
    assert differing(logs("a", "b", "c"), logs("a", "b")) == {CHOICE: 1, TEXT: 1}
    assert differing(logs("a"), {}) == {CHOICE: 1, TEXT: 1}


def test_texts_are_read_from_a_log() -> None:
    line = {"doc_id": 0, "arguments": [["Once", {"until": ["."]}]], "resps": [[" there was"]]}
    assert texts_of(json.dumps(line).encode() + b"\n") == [" there was"]


def test_texts_that_depend_on_the_others_are_found(check: Any) -> None:
    status, (_, figures, raw) = check("['a', 'b', 'c', 'x' if many else 'd']")
    assert status == 0  # as --control expects
    assert figures["equal_logs"].value == 2 and figures["differing_scores"].value == 0
    assert figures["differing_texts"].value == 1 and raw["texts"]["different"] == 4 and raw["lm_eval"] == "0"


def test_equal_logs_are_equal(check: Any) -> None:
    status, (_, figures, raw) = check("['a', 'b', 'c', 'd']")
    assert status == 1 and raw["equal"]  # a control that shows no difference has failed
    assert figures["equal_logs"].value == 4 and figures["differing_texts"].value == 0


# ---- what shows nothing


@pytest.mark.parametrize("texts", [("", "", "", ""), ("a", "", "", ""), (" ", "\n", "\t\n", "a")])
def test_mostly_empty_texts_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="of 4 texts are empty"):
        require_answers(logs(*texts), QUESTIONS)


def test_some_empty_texts_are_none_of_its_business() -> None:
    require_answers(logs("a", "b", "", ""), QUESTIONS)


@pytest.mark.parametrize("of", [{}, logs("a", "b", "c"), {TEXT: log(*"abcd")}, {CHOICE: log(*"abcd")}])
def test_missing_questions_are_refused(of: dict[str, bytes]) -> None:
    with pytest.raises(Refused, match="of 4 questions"):
        require_answers(of, QUESTIONS)


@pytest.mark.parametrize("texts", ["[''] * 4", "[''] * 4 if many else list('abcd')", "list('abc')"])
def test_a_refused_run_has_no_result(check: Any, capfd: pytest.CaptureFixture[str], texts: str) -> None:
    assert check(texts) == (2, None)
    assert "refused: llm42_" in capfd.readouterr().err


def test_control_without_the_guard_empty_texts_pass_as_equal(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_check, "require_answers", lambda logs, questions: None)
    _, (_, figures, raw) = check("[''] * 4")
    assert raw["equal"] and figures["differing_texts"].value == 0 and raw["texts"]["empty"] == 4


# ---- what is asked


def test_a_story_is_open_so_that_the_model_goes_on(tmp_path: Path) -> None:
    lm_eval_check.write_tasks(tmp_path, QUESTIONS)
    rows = [json.loads(line) for line in (tmp_path / "questions.json").read_text().splitlines()]
    assert len(rows) == QUESTIONS and len({row["story"] for row in rows}) == QUESTIONS
    assert all(row["story"][-1].isalpha() for row in rows)  # after a question it often ended at once
    assert "{{story}}" in (tmp_path / "text.yaml").read_text()
    assert "{{question}}" in (tmp_path / "choice.yaml").read_text()
