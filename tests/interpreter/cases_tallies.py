"""Penalties of rows that are decoded, from counts on the device, against the row sampler."""

from __future__ import annotations

import random

import pytest
import torch

from llm42.protocol import SamplingParams
from llm42.sampling import Draw, sample_row
from llm42.verifier.cuda.runner import _wishes
from llm42.verifier.cuda.sampler import draw_rows, sample_step_device
from llm42.verifier.cuda.tallies import Slot, Tallies
from llm42.verifier.runner import SequenceRows
from llm42_kernels.sampling import row_stats

VOCAB, PROMPT = 61, 9
PARAMS = [
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, seed=4),
    SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, presence_penalty=-0.5, repetition_penalty=0.8, seed=5,
        logit_bias=((3, 2.0),), min_tokens=12, min_tokens_banned=(1, 2),
    ),
    SamplingParams(temperature=1.0, seed=6),
    SamplingParams(frequency_penalty=-0.3, temperature=0.7, seed=7),
]  # fmt: skip


class Decoding:
    """Requests that take one row of each step, as a runner sees them. Small logits: ids come again."""

    def __init__(self, count: int) -> None:
        self.tallies, self.rng = Tallies(VOCAB, torch.device("cpu")), random.Random(1)
        self.params = [PARAMS[i % len(PARAMS)] for i in range(count)]
        self.known = [[self.rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(count)]
        self.asked = [self.sequence(i) for i in range(count)]
        self.sampled = torch.zeros(count, dtype=torch.int32)
        """Of the step before, by logit row; row i is another request's, if any took part."""

    def sequence(self, i: int) -> SequenceRows:
        return SequenceRows(
            list(self.known[i]), PROMPT - 1, 1, [], 0, PROMPT - 1, self.params[i], decodes=True
        )

    def step(self, taking: list[int], late: bool, shift: int = 0) -> list[tuple[int, int]]:
        """(request, token) of each. late: the host has not seen the last tokens yet. shift: whose token is
        fed."""
        for row, i in enumerate(taking):
            s, tokens = self.asked[i], self.known[i]
            s.start = s.first_logit = len(tokens) - 1
            s.tokens[:] = tokens[:-1] if late else tokens
            s.feed = row if late else -1
        before = torch.tensor([self.known[i][-1] for i in taking], dtype=torch.int32)
        rows = [self.asked[i] for i in taking]
        self.tallies.update(rows, before.roll(shift))
        logits = torch.randn(len(taking), VOCAB) * 2
        general, asked, _ = _wishes(rows)
        assert general == list(range(len(taking)))
        stats = row_stats(logits)
        draw_rows(logits, stats, general, asked, tallies=self.tallies.table)
        self.want = [
            sample_row(x, self.params[i], self.known[i], PROMPT - 1).token
            for x, i in zip(logits, taking, strict=True)
        ]
        found = list(zip(taking, stats.token.tolist(), strict=True))
        for (i, _), token in zip(found, self.want, strict=True):
            self.known[i].append(token)
        return found


def run(decoding: Decoding, steps: int, shift: int = 0) -> int:
    """How many tokens were not the row sampler's."""
    wrong, everybody = 0, list(range(len(decoding.params)))
    for number in range(steps):
        taking = [i for i in everybody if number % 5 != 3 or i % 2]  # some are left out of a step
        decoding.rng.shuffle(taking)
        found = decoding.step(taking, late=number % 4 != 0, shift=shift)
        wrong += sum(token != want for (_, token), want in zip(found, decoding.want, strict=True))
    return wrong


def test_tokens_are_the_row_samplers() -> None:
    decoding = Decoding(10)
    assert run(decoding, 30) == 0
    assert decoding.tallies.table.shape[0] == 8, "temperature alone needs no row"
    for i, params in enumerate(decoding.params):
        assert isinstance(decoding.asked[i].tally, Slot) == (params != PARAMS[3])


def test_control_another_requests_token_is_counted() -> None:
    assert run(Decoding(10), 30, shift=1) > 0


def test_a_row_that_was_given_up_is_counted_anew() -> None:
    decoding = Decoding(10)
    run(decoding, 6)
    decoding.asked = [decoding.sequence(i) for i in range(10)]  # preempted, and here again
    assert len(decoding.tallies._free) == 8
    assert run(decoding, 12) == 0
    assert decoding.tallies.table.shape[0] == 8


def test_control_a_missed_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(10)
    run(decoding, 3)
    for s in decoding.asked:
        if isinstance(s.tally, Slot):
            s.tally.upto += 1  # as if the next one were in it
    add = Tallies._add
    monkeypatch.setattr(Tallies, "_count", lambda *_: None)
    assert run(decoding, 12) > 0
    monkeypatch.setattr(Tallies, "_add", add)


def test_rows_of_a_step_are_counted_as_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What certification compares: alone the host counts, among others the device. Control: it does not."""
    rng, logits = random.Random(2), torch.randn(8, VOCAB)
    histories = [[rng.randrange(12) for _ in range(PROMPT + 15)] for _ in range(8)]
    draws = [Draw(PARAMS[i % 3], ids, PROMPT) for i, ids in enumerate(histories)]
    logits[:, :12] += 3.0
    alone = [sample_step_device(row[None].clone(), [d])[0] for row, d in zip(logits, draws, strict=True)]
    assert sample_step_device(logits, draws) == alone
    monkeypatch.setattr(Tallies, "_count", lambda _, slot, s: setattr(slot, "upto", s.start))
    assert sample_step_device(logits, draws) != alone


def test_a_window_counts_on_the_host() -> None:
    rows = SequenceRows(list(range(20)), 15, 5, [], 16, 9, PARAMS[0])
    tallies = Tallies(VOCAB, torch.device("cpu"))
    tallies.update([rows], torch.zeros(1, dtype=torch.int32))
    assert tallies.table.shape[0] == 0
    assert _wishes([rows])[1][0] == Draw(PARAMS[0], list(range(17)), 9)
