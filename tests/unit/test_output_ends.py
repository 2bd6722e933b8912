"""The two borders of an output's text: what it adds to its prompt, and what of its end is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from llm42.audit.claim import Claim
from llm42.audit.compare import text_problem
from llm42.protocol import FinishReason, Request, SamplingParams, TokenLogprob
from llm42.session.outputs import to_delta
from llm42.text.output_text import OutputText
from llm42.text.tokenizer import Tokenizer
from tests.support import write_model
from tests.unit.test_text import FALLBACK, tokens_of


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny model's byte-level tokenizer."""
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("ends")))


@pytest.mark.parametrize(("include", "want"), [(False, "xa"), (True, "xab")])
def test_a_stop_tokens_text_is_left_out(byte_level: Tokenizer, include: bool, want: str) -> None:
    """A word, or an end token that is not marked as special; what was held back is shown before it."""
    x, a, b = tokens_of(byte_level, "xab")
    request = Request("r", (5,), 9, stop=("ac",), stop_token_ids=(b,), include_stop=include)
    out = OutputText.of(byte_level, request)
    assert out.push([x, a]) == ("x", 2)
    piece, used = out.push([b])
    assert (piece, used) == (want[1:], 1)
    assert out.stopped == (not include), "the engine ends it in any case"
    assert out.flush() == ""


@pytest.mark.parametrize("include", [False, True])
def test_a_delta_with_a_stop_token(byte_level: Tokenizer, include: bool) -> None:
    """The token itself, and its log-probability, are part of the answer."""
    a, b, c = tokens_of(byte_level, "abc")
    request = Request("r", (5,), 9, stop_token_ids=(b,), include_stop=include, num_logprobs=0)
    entries = [TokenLogprob(t, -1.0) for t in (a, b)]
    text = OutputText.of(byte_level, request)
    made = to_delta(byte_level, request, text, [a, b], entries, FinishReason.STOP)
    assert made.text == ("ab" if include else "a")
    assert (made.token_ids, made.logprobs) == ((a, b), tuple(entries))
    assert made.finish_reason is FinishReason.STOP
    assert OutputText.of(byte_level, request).push([c]) == ("c", 1)


@pytest.mark.parametrize("cut", range(7))
def test_an_output_that_goes_on_elsewhere_counts_from_its_beginning(byte_level: Tokenizer, cut: int) -> None:
    """Another replica starts with what the client has (Request.output): same minimum, same text."""
    tokens = tokens_of(byte_level, "ab ab abab")
    request = Request("r", (5,), 20, SamplingParams(min_tokens=7), stop=("ab",))
    first, second = OutputText.of(byte_level, request), OutputText.of(byte_level, request)
    before, _ = first.push(tokens[:cut])
    assert second.push(tokens[:cut]) == (before, cut)
    after, used = second.push(tokens[cut:])
    assert (before + after, cut + used, second.stopped) == ("ab ab ", 8, True)


def test_an_audit_expects_the_same_text(byte_level: Tokenizer) -> None:
    """llm42.audit.compare recomputes a stored answer's text by the rules that made it."""
    a, b, x = tokens_of(byte_level, "abx")
    request = Request("r", (5,), 9, SamplingParams(min_tokens=3), stop=("ab",), stop_token_ids=(x,))
    output = (a, b, b, b, x)
    claim = Claim(1, 0, "c", "fp", output=output, text="abbb", body={"prompt": "p"})
    assert text_problem(claim, request, output, byte_level) == ""
    assert text_problem(replace(claim, text="abbbx"), request, output, byte_level)
    assert text_problem(replace(claim, text=""), request, output, byte_level)
    asked = replace(request, include_stop=True)
    assert text_problem(replace(claim, text="abbbx"), asked, output, byte_level) == ""
    spaced = Claim(1, 0, "c", "fp", output=(WORDS["\u2581a"],), text=" a", body={"prompt": "p"})
    assert text_problem(spaced, Request("r", (WORDS["b"],), 1), spaced.output or (), FALLBACK) == ""


WORDS = {name: FALLBACK.backend.token_to_id(name) for name in ("\u2581", "\u2581a", "a", "b")}


def test_an_output_keeps_its_first_space(byte_level: Tokenizer) -> None:
    """SentencePiece drops a space at the start of a text: that is the prompt's, when there is one."""
    hello, world = [WORDS["\u2581a"]], [WORDS["\u2581a"], WORDS["b"]]
    out = OutputText.of(FALLBACK, Request("r", tuple(hello), 9))
    shown = out.push(world)[0] + out.flush()
    assert shown == " ab" == "".join(FALLBACK.token_text(t) for t in world)
    assert FALLBACK.decode(hello) + shown == FALLBACK.decode(hello + world) == "a ab"
    assert OutputText(FALLBACK).push(world)[0] == "ab", "nothing comes before it"
    assert OutputText(byte_level, prompt=[7]).push(byte_level.encode(" a"))[0] == " a"


@settings(max_examples=400, deadline=None)
@given(
    prompt=st.lists(st.sampled_from([0x20, 0x61, *range(256, 263)]), max_size=8),
    output=st.lists(st.sampled_from([0x20, 0xE2, 0x82, 0xAC, *range(256, 263)]), max_size=8),
)
def test_an_output_is_what_it_adds_to_the_prompt(prompt: list[int], output: list[int]) -> None:
    """The library's decoding of both, where no run of byte tokens crosses the border; and, token by token,
    its DecodeStream, which vLLM uses."""
    out = OutputText(FALLBACK, prompt=prompt)
    shown = out.push(output)[0] + out.flush()
    if not (prompt and output and prompt[-1] < 256 and output[0] < 256):
        assert FALLBACK.backend.decode(prompt) + shown == FALLBACK.backend.decode(prompt + output)
    if prompt and all(token >= 256 for token in output):
        stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
        assert shown == "".join(stream.step(FALLBACK.backend, token) or "" for token in output)
