"""Output text: independent of how tokens are grouped, never taken back, and no part of a stop string leaks;
broken variants are noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE

from llm42.text.detokenizer import Detokenizer
from llm42.text.output_text import OutputText, StopSearch
from llm42.text.tokenizer import Tokenizer
from tests.support import write_model

LETTERS = "abc \nä€🙂"
STOPS = st.lists(st.text("abc€", min_size=1, max_size=4), max_size=3).map(tuple)
TEXTS = st.text(LETTERS, max_size=24)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny model's byte-level tokenizer: a character may take up to four tokens."""
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("text")))


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: pieces with U+2581 for a space, and <0xNN> tokens for the rest."""
    names = [*(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "b", "c", "ab", "bc", "\u2581a"]
    backend = tokenizers.Tokenizer(BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, eos_token_ids=())


FALLBACK = byte_fallback()


def expected(
    tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str], include: bool, least: int = 0
) -> tuple[str, int, bool]:
    """(text, tokens used, stopped) by searching the whole text anew after every token; `least`: tokens in
    whose text no stop string counts."""
    exempt = len(Detokenizer(tokenizer).push(tokens[:least])) if least else 0

    def first(text: str) -> tuple[int, str] | None:
        places = ((at, s) for s in stop for at in range(len(text)) if text.startswith(s, at))
        return min(((at, s) for at, s in places if at + len(s) > exempt), default=None)

    for used in range(1, len(tokens) + 1):
        text = Detokenizer(tokenizer).push(tokens[:used])
        if used > least and (found := first(text)) is not None:
            at, s = found
            return text[: at + (len(s) if include else 0)], used, True
    text = tokenizer.decode(tokens)
    if len(tokens) <= least or (found := first(text)) is None:
        return text, len(tokens), False
    at, s = found
    return text[: at + (len(s) if include else 0)], len(tokens), True


@dataclass
class Shown:
    """What a client saw, push by push."""

    pieces: list[str]
    used: int
    stopped: bool


def show(
    make: Callable[..., OutputText],
    tokenizer: Tokenizer,
    groups: Sequence[Sequence[int]],
    stop: Sequence[str],
    include: bool,
    least: int = 0,
) -> Shown:
    out = make(tokenizer, stop, include, min_tokens=least)
    shown = Shown([], 0, False)
    for group in groups:
        piece, used = out.push(group)
        shown.pieces.append(piece)
        shown.used += used
        if out.stopped:
            break
    shown.pieces.append(out.flush())
    shown.stopped = out.stopped
    return shown


def faults(
    make: Callable[..., OutputText],
    tokenizer: Tokenizer,
    groups: Sequence[Sequence[int]],
    stop: Sequence[str],
    include: bool,
    least: int = 0,
) -> list[str]:
    """The broken properties of one output."""
    tokens = [t for group in groups for t in group]
    text, used, stopped = expected(tokenizer, tokens, stop, include, least)
    shown = show(make, tokenizer, groups, stop, include, least)
    found = []
    if (shown.used, shown.stopped) != (used, stopped):
        found.append(f"{shown.used} tokens, stopped {shown.stopped} instead of {used}, {stopped}")
    if "".join(shown.pieces) != text:
        found.append(f"text {''.join(shown.pieces)!r} instead of {text!r}")
    if not include and not least and any(s in "".join(shown.pieces) for s in stop):
        found.append("a stop string is shown")
    seen = ""
    for piece in shown.pieces:
        seen += piece
        if not text.startswith(seen):
            found.append("something was shown that is not part of the output")
    return found


def grouped(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    borders = [0, *sorted(c for c in cuts if c <= len(tokens)), len(tokens)]
    return [list(tokens[a:b]) for a, b in pairwise(borders)]


CUTS = st.lists(st.integers(0, 60), max_size=12)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, stop=STOPS, include=st.booleans(), cuts=CUTS)
@example("abcabc", ("cab", "b"), True, [1, 3])
@example("ab🙂c", ("🙂",), False, [1, 2, 3, 4, 5])
def test_grouping_changes_nothing(
    byte_level: Tokenizer, text: str, stop: tuple[str, ...], include: bool, cuts: list[int]
) -> None:
    groups = grouped(byte_level.encode(text), cuts)
    assert faults(OutputText, byte_level, groups, stop, include) == []


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.one_of(st.integers(2, 511), st.sampled_from([0, 1, 67, 68, 69])), max_size=30),
    stop=STOPS,
    include=st.booleans(),
    cuts=CUTS,
)
def test_any_tokens_also_broken_utf8(
    byte_level: Tokenizer, tokens: list[int], stop: tuple[str, ...], include: bool, cuts: list[int]
) -> None:
    assert faults(OutputText, byte_level, grouped(tokens, cuts), stop, include) == []


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0x0A, 0x61, *range(256, 263)]), max_size=30),
    stop=STOPS,
    include=st.booleans(),
    cuts=CUTS,
)
def test_byte_fallback_tokenizers(
    tokens: list[int], stop: tuple[str, ...], include: bool, cuts: list[int]
) -> None:
    assert faults(OutputText, FALLBACK, grouped(tokens, cuts), stop, include) == []


@settings(max_examples=600, deadline=None)
@given(text=TEXTS, stop=STOPS, include=st.booleans(), cuts=CUTS, least=st.integers(1, 30))
@example("aaaa", ("aa",), False, [], 3)
@example("xabc", ("xab!", "ab", "abc"), False, [], 3)
@example("xabcab", ("xab!", "ab"), True, [1, 4], 3)
@example("ab€", ("€",), False, [], 4)
def test_stop_strings_wait_for_the_minimum(
    byte_level: Tokenizer, text: str, stop: tuple[str, ...], include: bool, cuts: list[int], least: int
) -> None:
    """A stop string ends the output where it ends past the text of the first min_tokens tokens; a request
    that goes on elsewhere counts what the client has."""
    tokens = tokens_of(byte_level, text)
    groups = grouped(tokens, cuts)
    assert faults(OutputText, byte_level, groups, stop, include, least) == []


# ---- broken variants: the same checker must notice each


class SearchesOnlyTheNewPiece(OutputText):
    """A stop string across a border is not found."""

    def _add(self, piece: str) -> str:
        self._held = ""
        self._searches = [StopSearch(s) for s in self.stop]
        return OutputText._add(self, piece)


class JudgesWholeGroups(OutputText):
    """How many tokens were used depends on how they came."""

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        return self._add(self._detokenizer.push(tokens)), len(tokens)


class DropsWhatIsHeld(OutputText):
    """The held part is lost at the end."""

    def flush(self) -> str:
        return ""


class TakesTheFirstStopInTheList(OutputText):
    """The order of the stop strings decides, not their place in the text."""

    def _add(self, piece: str) -> str:
        for stop in self.stop:
            if stop in self._held + piece:
                self._searches = [s for s in self._searches if s.stop == stop]
                break
        return OutputText._add(self, piece)


class ForgetsIncludeStop(OutputText):
    """Cuts the stop string always."""

    def _add(self, piece: str) -> str:
        self.include_stop = False
        return OutputText._add(self, piece)


def noticed(make: Callable[..., OutputText], tokenizer: Tokenizer) -> bool:
    texts = ["abcabc", "aabaab c", "cab bca", "a b c a€b", "bcbcab"]
    stops = [("bc", "ab"), ("b", "ab"), ("abca",), ("€",), ("bcab", "cb")]
    return any(
        faults(make, tokenizer, grouped(tokenizer.encode(text), cuts), stop, include)
        for text in texts
        for stop in stops
        for include in (False, True)
        for cuts in ((), (1,), (2, 3), tuple(range(30)))
    )


def test_the_cases_of_the_controls_hold_for_the_real_one(byte_level: Tokenizer) -> None:
    assert not noticed(OutputText, byte_level)


@pytest.mark.parametrize(
    "broken",
    [
        SearchesOnlyTheNewPiece,
        JudgesWholeGroups,
        DropsWhatIsHeld,
        TakesTheFirstStopInTheList,
        ForgetsIncludeStop,
    ],
)
def test_control_broken_outputs_are_noticed(byte_level: Tokenizer, broken: type[OutputText]) -> None:
    assert noticed(broken, byte_level)


def test_control_not_holding_back_leaks(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputText, "_pending", lambda self: 0)
    assert noticed(OutputText, byte_level)


class ForgetsTheMinimum(OutputText):
    """Stop strings count from the first token."""

    def _add(self, piece: str) -> str:
        self.min_tokens = 0
        return OutputText._add(self, piece)


class ExemptsTheBeginning(OutputText):
    """A stop string must begin after the minimum, not only end there."""

    def _add(self, piece: str) -> str:
        shown = OutputText._add(self, piece)
        if self._count <= self.min_tokens:
            self._searches = [StopSearch(s) for s in self.stop]
        return shown


@pytest.mark.parametrize("broken", [ForgetsTheMinimum, ExemptsTheBeginning])
def test_control_a_wrong_minimum_is_noticed(byte_level: Tokenizer, broken: type[OutputText]) -> None:
    tokens = [[t] for t in tokens_of(byte_level, "xabcab")]
    assert faults(OutputText, byte_level, tokens, ("bca", "ab"), False, 3) == []
    assert faults(broken, byte_level, tokens, ("bca", "ab"), False, 3) != []


# ---- single cases


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte, so that every border lies between two tokens."""
    return [t for char in text for t in tokenizer.encode(char)]


def test_only_what_may_begin_a_stop_string_is_held(byte_level: Tokenizer) -> None:
    out = OutputText(byte_level, stop=("abac",))
    pieces = [out.push([t])[0] for t in tokens_of(byte_level, "xababad")]
    assert pieces == ["x", "", "", "", "ab", "", "abad"]
    assert out.flush() == ""


@pytest.mark.parametrize(("include", "want"), [(False, "x"), (True, "xab")])
def test_the_stop_string_is_cut_or_kept(byte_level: Tokenizer, include: bool, want: str) -> None:
    out = OutputText(byte_level, ("ab",), include)
    piece, used = out.push(tokens_of(byte_level, "xabyz"))
    assert (piece, used, out.stopped, out.flush()) == (want, 3, True, "")


def test_of_two_stop_strings_the_earlier_in_the_text_wins(byte_level: Tokenizer) -> None:
    pair = byte_level.encode("th")
    assert len(pair) == 1, "one token must bring both ends"
    out = OutputText(byte_level, ("h", "th"))
    assert out.push([*tokens_of(byte_level, "x"), *pair]) == ("x", 2)


def test_flush_gives_the_held_part_and_incomplete_characters(byte_level: Tokenizer) -> None:
    out = OutputText(byte_level, ("abc",))
    assert out.push([*tokens_of(byte_level, "xab"), tokens_of(byte_level, "€")[0]]) == ("x", 4)
    assert out.flush() == "ab\ufffd"
    assert out.flush() == ""


def test_special_tokens_are_no_text(byte_level: Tokenizer) -> None:
    out = OutputText(byte_level, ("ab",))
    a, b = tokens_of(byte_level, "ab")
    assert out.push([a, 0, b]) == ("", 3)
    assert out.stopped
