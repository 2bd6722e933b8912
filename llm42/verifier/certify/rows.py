"""Row-invariance checks: run an operator in many arrangements and compare bits (integer views: NaN and
-0.0 count).

Each check is evidence that one thing does not change a row's bits. The letters are those of
docs/determinism.md: (a) the row's position in the step, (b) what its companions hold, (c) the step's size,
(d) borders of windows and shapes of companions, (e) dirty memory, (f) any of these in the whole model. A
check returns None, or a Violation that says in words what changed a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROBES = 4
Rows = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Violation:
    """How an operator broke row invariance."""

    operator: str
    check: str
    detail: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.check}: {self.detail}"


@dataclass(slots=True)
class Tally:
    """How many rows were compared."""

    rows: int = 0


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One call of a row-wise operator: at one of the model's real shapes, in one form of its arguments.

    make(rows, generator) gives random inputs, run(*inputs) the outputs; every tensor has the rows in
    dimension 0.
    """

    operator: str
    shape: str
    make: Callable[[int, torch.Generator], Rows]
    run: Callable[..., Rows]


_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit equality of two tensors of one dtype and shape."""
    view = _INT[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def _same_rows(got: Rows, rows: Sequence[int], want: Rows, probes: Sequence[int]) -> bool:
    return all(same_bits(g[list(rows)], w[list(probes)]) for g, w in zip(got, want, strict=True))


def check_sizes(case: OperatorCase, sizes: Sequence[int], tally: Tally) -> Violation | None:
    """Check (c) alone, in one arrangement: about a thirtieth of `check_rows`, to refuse early what it would
    refuse. Nothing passes by it."""
    probes = case.make(PROBES, torch.Generator(device="cpu").manual_seed(0))
    want: Rows | None = None
    for rows in reversed(sizes):
        got = case.run(*(p[[i % PROBES for i in range(rows)]].clone() for p in probes))
        tally.rows += rows
        want = want or tuple(o[:PROBES].clone() for o in got)
        if not all(same_bits(g[:PROBES], w[: len(g)]) for g, w in zip(got, want, strict=True)):
            return _differ(case, rows, sizes[-1])
    return None


def _differ(case: OperatorCase, rows: int, reference: int) -> Violation:
    return Violation(case.operator, "step size", f"{case.shape}: steps of {rows} and {reference} rows differ")


def check_bucket(case: OperatorCase, bucket: int, tally: Tally) -> Rows | Violation:
    """Checks (a) and (b) in steps of `bucket` rows: equal rows have equal bits. Returns the probes' outputs,
    to be compared across buckets.

    Every probe is computed at every row (the arrangements are the rotations of one order), and every row
    beside companions of every content (rows drawn at random hold probes, then the others do)."""
    gen = torch.Generator(device="cpu").manual_seed(0)
    probes = case.make(PROBES, gen)
    first = [i % PROBES for i in range(bucket)]
    spread = case.run(*(p[first].clone() for p in probes))
    found = [first.index(i) for i in range(min(PROBES, bucket))]
    want = tuple(o[found].clone() for o in spread)
    for shift in range(len(found)):
        order = [(i + shift) % PROBES % len(found) for i in range(bucket)]
        out = case.run(*(p[order].clone() for p in probes))
        tally.rows += bucket
        if not _same_rows(out, range(bucket), want, order):
            detail = f"{case.shape}: equal rows of a step of {bucket} differ"
            return Violation(case.operator, "row position", detail)
    for content, companions in _companions(case, bucket, gen):
        for rows in _probe_rows(bucket, gen):
            which = [int(x) for x in torch.randint(0, len(found), (len(rows),), generator=gen)]
            inputs = tuple(c.clone() for c in companions)
            for tensor, probe in zip(inputs, probes, strict=True):
                tensor[rows] = probe[which]
            tally.rows += len(rows)
            if not _same_rows(case.run(*inputs), rows, want, which):
                named = f"row {rows[0]}" if len(rows) == 1 else f"one of {len(rows)} rows"
                detail = f"{case.shape}: {named} of {bucket} depends on companions ({content})"
                return Violation(case.operator, "companions", detail)
    return want


def _probe_rows(bucket: int, gen: torch.Generator) -> list[list[int]]:
    """Which rows hold probes: single ones, then a random half, then the other half."""
    single = [[row] for row in sorted({0, 1 % bucket, bucket // 2, bucket - 1})]
    order = torch.randperm(bucket, generator=gen).tolist()
    halves = [sorted(order[: bucket // 2]), sorted(order[bucket // 2 :])]
    return single + [half for half in halves if half]


def _companions(case: OperatorCase, rows: int, gen: torch.Generator) -> Iterator[tuple[str, Rows]]:
    random = case.make(rows, gen)
    yield "random", random
    for name, value in (("zeros", 0.0), ("NaN", float("nan")), ("inf", float("inf"))):
        yield name, tuple(torch.full_like(t, value) if t.is_floating_point() else t for t in random)


def check_rows(
    case: OperatorCase, buckets: Sequence[int], tally: Tally
) -> tuple[list[int], Violation | None]:
    """Checks (a), (b) and (c): a row has one result in steps of all these sizes. Returns the buckets that
    agree with the last one, the reference, and the first violation, if any.

    Empty list: not even steps of the reference size alone are row-invariant.
    """
    reference = check_bucket(case, buckets[-1], tally)
    if isinstance(reference, Violation):
        return [], reference
    good, first = [buckets[-1]], None
    for bucket in reversed(buckets[:-1]):
        got = check_bucket(case, bucket, tally)
        if isinstance(got, Violation):
            first = first or got
        elif not all(same_bits(g, w[: len(g)]) for g, w in zip(got, reference, strict=True)):
            first = first or _differ(case, bucket, buckets[-1])
        else:
            good.insert(0, bucket)
    return good, first
