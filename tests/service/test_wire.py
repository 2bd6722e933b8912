"""Packed commits come out with the same bits."""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.protocol import Commit, TokenLogprob, VerifyTimings
from llm42_serve.wire import Down, Packed, Up, pack, unpack

TOKEN = st.integers(0, 2**31 - 1)
SHORT = st.floats(width=32)
LONG = st.floats()


def commits(floats: st.SearchStrategy[float]) -> st.SearchStrategy[Commit]:
    """Commits with any log-probabilities and numbers of alternatives."""
    tops = st.lists(st.tuples(TOKEN, floats), max_size=3).map(tuple)
    logprobs = st.lists(st.builds(TokenLogprob, TOKEN, floats, tops), min_size=1, max_size=6)

    def made(name: str, base: int, found: list[TokenLogprob], cut: int, timings: VerifyTimings) -> Commit:
        accepted = cut % len(found)
        next_token, *decoded = (x.token for x in found[accepted:])
        return Commit(name, base, accepted, next_token, tuple(found), "fp", timings, tuple(decoded))

    seconds, counts = st.floats(0, 1e6), st.integers(0, 2**31 - 1)
    timings = st.builds(VerifyTimings, seconds, seconds, counts, counts)
    return st.builds(
        made, st.text(max_size=5), st.integers(0, 2**31 - 1), logprobs, st.integers(0, 9), timings
    )


def bits(commit: Commit) -> tuple[object, ...]:
    """All of a commit, floats as their bits: NaN and -0.0 count."""
    pairs = [(x.token, x.logprob, *x.top) for x in commit.logprobs]
    floats = [f for x in commit.logprobs for f in (x.logprob, *(v for _, v in x.top))]
    plain = replace(commit, logprobs=tuple(TokenLogprob(x.token, 0.0) for x in commit.logprobs))
    tops = [[t for t, _ in x.top] for x in commit.logprobs]
    return repr(plain), [struct.pack("d", f) for f in floats], tops, len(pairs)


@given(st.one_of(st.lists(commits(SHORT), min_size=1), st.lists(commits(LONG), min_size=1)))
def test_what_is_packed_comes_out_bit_for_bit(given_ones: list[Commit]) -> None:
    packed = pickle.loads(pickle.dumps(pack(given_ones)))
    assert [bits(c) for c in unpack(packed)] == [bits(c) for c in given_ones]


def of(*values: float) -> Commit:
    found = tuple(TokenLogprob(i, v) for i, v in enumerate(values))
    return Commit("r", 3, 0, 0, found, "fp", decoded=tuple(range(1, len(values))))


def test_what_a_verifier_says_is_four_bytes_and_anything_else_is_eight() -> None:
    single = float(np.float32(-0.3))
    assert pack([of(single, -0.0, math.nan, -math.inf)]).logprobs.dtype == np.float32
    assert pack([of(single, -0.3)]).logprobs.dtype == np.float64
    assert pack([of(1e300)]).logprobs.dtype == np.float64


def test_control_rounding_would_be_noticed() -> None:
    packed = pack([of(-0.3)])
    rounded = replace(packed, logprobs=packed.logprobs.astype(np.float32))
    assert [bits(c) for c in unpack(rounded)] != [bits(of(-0.3))]


def test_tokens_are_no_objects() -> None:
    """A thousand more tokens are a few kilobytes."""
    short, long = (len(pickle.dumps(pack([of(*[-1.5] * n)]))) for n in (1, 1001))
    assert long - short <= 1000 * (4 + 4 + 4) + 50


@pytest.mark.parametrize("changes", [{"next_token": 7}, {"decoded": (7,)}])
def test_a_commit_that_contradicts_itself_is_not_packed(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="contradicts"):
        pack([of(-1.0), replace(of(-1.0, -2.0), **changes)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contradicts"):
        pack([of(-1.0), replace(of(-1.0), fingerprint="another")])


def test_other_releases_read_the_messages() -> None:
    """As llm42/protocol.py has it."""
    for kind in (Up, Down, Packed):
        assert kind.__dict__["__setstate__"].__qualname__ == "across_releases.<locals>.restore"
