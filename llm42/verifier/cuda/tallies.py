"""How often each id stands in the output of requests that are decoded, on the device: penalties can then be
applied to a row whose last token the host does not know yet.

A sequence has a row of a table from its first such step on. Each step adds the token that came since, from
the host or from what the step before has sampled; a row that missed one is counted anew from the tokens. Only
additions of integers: the table is a function of the tokens. Everything is queued on the current stream, so a
row may be given to another sequence while a step that reads it still runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from llm42.sampling import Draw, reads_history
from llm42.verifier.runner import SequenceRows

IN_PROMPT = 1 << 30
"""Set in an id's entry when the prompt has it; the rest counts the output."""
FIRST_ROWS = 8


class Slot:
    """A sequence's row of the table, from when it is taken until the sequence drops it."""

    __slots__ = ("_free", "row", "upto")

    def __init__(self, row: int, free: list[int]) -> None:
        self.row, self._free = row, free
        self.upto = -1
        """How many tokens of the sequence are in it."""

    def __del__(self) -> None:
        self._free.append(self.row)


class Tallies:
    """One per runner; `table` [rows, V] int32 grows as it is needed."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.table = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def update(self, sequences: Iterable[SequenceRows], sampled: Tensor) -> None:
        """Before a step: takes in what its decoding rows with penalties come after, their own token included.
        sampled [R] int32: tokens of the logit rows of the step before."""
        known: list[tuple[int, int]] = []
        fed: list[tuple[int, int]] = []
        for s in sequences:
            if not s.decodes or not reads_history(s.sampling):
                continue
            slot = s.tally
            if not isinstance(slot, Slot):
                slot = s.tally = self._take()
            if slot.upto not in (s.start, s.start + 1):
                self._count(slot, s)
            if slot.upto == s.start:
                slot.upto += 1
                if s.feed >= 0:
                    fed.append((slot.row, s.feed))
                else:
                    known.append((slot.row, s.tokens[s.start]))
        if known:
            self._add(*self._columns(known))
        if fed:
            rows, at = self._columns(fed)
            self._add(rows, sampled[at].long())

    def _take(self) -> Slot:
        if not self._free:
            before = self.table.shape[0]
            more = max(FIRST_ROWS, before)
            self.table = torch.cat([self.table, self.table.new_zeros(more, self.table.shape[1])])
            self._free += range(before, before + more)
        return Slot(self._free.pop(), self._free)

    def _count(self, slot: Slot, s: SequenceRows) -> None:
        """Anew, from the tokens before the row's own."""
        row = self.table[slot.row]
        row.zero_()
        output = torch.tensor(s.tokens[s.prompt_len : s.start], dtype=torch.int64)
        ids, counts = output.unique(return_counts=True)
        row[self._up(ids)] = self._up(counts).int()
        prompt = self._up(torch.tensor(s.tokens[: s.prompt_len], dtype=torch.int64).unique())
        row[prompt] |= IN_PROMPT
        slot.upto = s.start

    def _add(self, rows: Tensor, ids: Tensor) -> None:
        """One more of an id in each of the rows, which are distinct."""
        self.table[rows, ids] += 1

    def _columns(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows, ids = self._up(torch.tensor(pairs, dtype=torch.int64)).unbind(1)
        return rows, ids

    def _up(self, host: Tensor) -> Tensor:
        """Copied without waiting for what runs."""
        if self.table.is_cuda:
            host = host.pin_memory()
        return host.to(self.table.device, non_blocking=True)


def counted(draws: Iterable[Draw], vocab: int, device: torch.device) -> tuple[list[Draw], Tensor]:
    """The draws as those of sequences that are decoded, and the table that they name rows of
    (certification)."""
    tallies, out, kept = Tallies(vocab, device), list[Draw](), list[SequenceRows]()
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    for draw in draws:
        last = len(draw.history) - 1
        if draw.given is None and reads_history(draw.params) and last >= draw.prompt_len:
            s = SequenceRows(
                list(draw.history), last, 1, [], last, draw.prompt_len, draw.params, decodes=True
            )
            tallies.update([s], nothing)
            kept.append(s)  # else the next one would be given its row
            out.append(replace(draw, history=range(last + 1), tally=s.tally.row))
        else:
            out.append(draw)
    return out, tallies.table


def penalised(values: Tensor, tallies: Tensor, repeat: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Stage 1 of llm42/sampling.py. values [R, V] float32; tallies [R, V] int32, rows of a table; the others
    [R, 1] float32."""
    number = (tallies & (IN_PROMPT - 1)).float()
    seen = torch.where(values > 0, values / repeat, values * repeat)
    values = torch.where(tallies != 0, seen, values)
    return values - frequency * number - presence * (number > 0).float()
