"""Stop strings: what is found and held back is what the plain definition says, at a cost that does not grow
with the stop strings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm42.text.output_text import OutputText, StopSearch
from llm42.text.tokenizer import Tokenizer
from tests.support import write_model

LETTERS = "ab€"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("stops")))


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`: the definition, read off."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def plainly(
    pieces: Sequence[str], stops: Sequence[str], include: bool, exempt: int
) -> tuple[list[str], bool]:
    """What is shown after each piece, and whether a stop string has ended it: by looking at the whole text.
    No stop string ends in the first `exempt` pieces."""
    text, gone, free, shown = "", 0, 0, list[str]()
    for number, piece in enumerate(pieces, 1):
        text += piece
        if number <= exempt:
            free = len(text)
        ends = [(at, s) for s in stops for at in range(gone, len(text)) if text.startswith(s, at)]
        if found := [(at, s) for at, s in ends if at + len(s) > free]:
            at, s = min(found)
            return [*shown, text[gone : at + (len(s) if include else 0)]], True
        keep = max((overlap(text[gone:], s) for s in stops), default=0)
        shown.append(text[gone : len(text) - keep])
        gone = len(text) - keep
    return shown, False


STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4)
PIECES = st.lists(st.text(LETTERS, max_size=5), max_size=12)


@settings(max_examples=800, deadline=None)
@given(pieces=PIECES, stops=STOPS, include=st.booleans(), exempt=st.integers(0, 4))
@example(["aabaa", "baab"], ["aabaab"], False, 0)
@example(["ab", "ab", "a"], ["abab", "ba"], True, 1)
@example(["aaa", "a"], ["aa"], False, 1)
@example(["a", "ab"], ["aab", "ab"], False, 0)
def test_as_the_definition_says(
    tokenizer: Tokenizer, pieces: list[str], stops: list[str], include: bool, exempt: int
) -> None:
    """Text in pieces of any length, several of which no stop string may end in."""
    out, shown = OutputText(tokenizer, stops, include, min_tokens=exempt), list[str]()
    for piece in pieces:
        out._count += 1
        shown.append(out._add(piece))
        if out.stopped:
            break
    assert (shown, out.stopped) == plainly(pieces, stops, include, exempt)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=60), stop=st.text("ab", min_size=1, max_size=9))
def test_what_is_matched_after_each_character(text: str, stop: str) -> None:
    search = StopSearch(stop)
    for end in range(1, len(text) + 1):
        assert bool(search.push(text[end - 1])) == text[:end].endswith(stop)
        assert search.matched == overlap(text[:end], stop)


def seconds(tokenizer: Tokenizer, length: int) -> float:
    """CPU time of 600 pieces with 16 stop strings: the first keeps all of the text held back, the others
    have nothing in common with its end."""
    stops = ["a" * (length - 1) + "b", *(f"{chr(99 + i)}" + "a" * (length - 1) for i in range(15))]
    best = float("inf")
    for _ in range(3):
        out = OutputText(tokenizer, stops)
        began = time.thread_time()
        for _ in range(600):
            out._add("aaaa")
        best = min(best, time.thread_time() - began)
    return best


def test_long_stop_strings_cost_what_short_ones_do(tokenizer: Tokenizer) -> None:
    """32 times as long, at most a few times the cost (it was about 30 times)."""
    assert seconds(tokenizer, 1024) < 6 * seconds(tokenizer, 32)
