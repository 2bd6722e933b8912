"""Requests that may change their way: what goes wrong in one of them costs time, and no answer."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.config import SessionSettings
from llm42.engine.base import SAME_ID, EngineOutput, Sink
from llm42.engine.torch.engine import TorchEngine
from llm42.errors import VerifierUnavailable
from llm42.protocol import Request, Window
from llm42.session import drive
from llm42.session.actions import Emit
from llm42.session.direct import DirectDrive
from llm42.session.load import Load, Progress, Way
from llm42.session.machine import Session
from llm42.session.outputs import EngineFailed
from llm42.session.ways import Promises, Ways
from llm42.step_times import Costs, VerifierLoad
from tests.protocol.session_model import oracle, verify
from tests.protocol.switching import KINDS, Starves, nothing_left, switching
from tests.support import (
    Lab,
    Wrapped,
    collect,
    request_of,
    together,
    wait_until,
)


class Fails:
    """An engine that reports an error of some requests, instead of their token of this number."""

    def __init__(self, engine: TorchEngine, at: int) -> None:
        self.engine, self.at = engine, at

    def submit(self, request: Request, sink: Sink, limit: int) -> None:
        def heard(output: EngineOutput) -> None:
            if request.deterministic and output.start + len(output.tokens) > self.at:
                output = EngineOutput(request.request_id, output.epoch, output.start, error="planted")
            sink(output)

        self.engine.submit(request, heard, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("at", [0, 2, 9, 30])
def test_an_engine_that_fails_a_request(lab: Lab, at: int) -> None:
    """Before and behind commits, with a window in flight or none: the verifier goes on."""
    requests = [request_of(f"f{i}", i, max_tokens=40, sampling=KINDS[i % 3]) for i in range(6)]
    auto = replace(lab, mode="auto", decide=lambda *_: "verify", parts=lab.parts)
    engine, verifier = lab.engine(), lab.verifier().start()
    session = {"min_window": 1, "start_window": 4, "lookahead": 64}
    generator = auto.generator(Fails(engine, at), verifier, **session)
    answers = together(generator, requests)
    assert lab.wrong(answers, requests) == []
    assert all(0 < a.stats.direct_tokens <= 40 for a in answers)
    assert nothing_left(generator)
    assert wait_until(lambda: engine.load().kv_used == 0)
    with pytest.raises(EngineFailed, match="planted"):  # the control
        together(lab.generator(Fails(engine, at), verifier, mode="verify", **session), requests[:1])


def test_a_policy_that_raises(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Which way is cheaper may only cost time; the ids are free again."""

    def decide(request: Progress, load: Load) -> Way:
        raise ZeroDivisionError

    lab = replace(lab, mode="auto", decide=decide, decide_best_effort=decide, parts=lab.parts)
    generator = lab.generator(lab.engine(), lab.verifier().start())
    requests = [request_of(f"z{i}", i, max_tokens=30) for i in range(3)]
    plain = replace(requests[0], request_id="plain", deterministic=False)
    for _ in range(2):
        *answers, last = together(generator, [*requests, plain])
        assert lab.wrong(answers, requests) == []
        assert len(last.tokens) == 30
    assert nothing_left(generator)
    assert sum("which way is cheaper" in r.message for r in caplog.records) == 1


def test_one_id_in_both_classes(lab: Lab) -> None:
    """Whether both are answered must not depend on the way: the second is refused while the first runs."""
    lab, _ = switching(lab, 4)
    generator = lab.generator(lab.engine(), lab.verifier().start())
    first = request_of("same", 1, max_tokens=60)
    second = replace(first, deterministic=False)

    async def both() -> list[object]:
        asked = (collect(generator, r) for r in (first, second))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    for _ in range(2):
        answer, refused = asyncio.run(both())
        assert lab.wrong([answer], [first]) == []  # type: ignore[list-item]
        assert isinstance(refused, EngineFailed) and SAME_ID in str(refused)
    assert nothing_left(generator)


def test_a_model_that_raises_while_somebody_waits(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """For how long is then as where nothing is known."""
    lab = replace(lab, mode="auto", decide=lambda *_: "direct", parts=lab.parts)
    generator = lab.generator(lab.engine(), Starves(lab.verifier().start()), commit_deadline_s=0.002)
    assert generator.verifier is not None

    def load(_: object) -> VerifierLoad:
        raise ZeroDivisionError

    monkeypatch.setattr(generator.verifier, "load", load)
    requests = [request_of(f"l{i}", i, max_tokens=30) for i in range(2)]
    assert lab.wrong(together(generator, requests), requests) == []
    assert nothing_left(generator)


@pytest.mark.parametrize("first", ["verify", "direct"])
def test_who_is_not_decoded_goes_back(lab: Lab, first: Way) -> None:
    """Whether it has begun or not; and not again for a while."""

    def decide(request: Progress, load: Load) -> Way:
        return first if request.way is None else "direct"

    auto = replace(lab, mode="auto", decide=decide, parts=lab.parts)
    verifier = Starves(lab.verifier().start())
    generator = auto.generator(lab.engine(), verifier, commit_deadline_s=0.02, min_window=1, start_window=4)
    generator.ways.hold = 4
    requests = [request_of(f"w{i}", i, max_tokens=30) for i in range(4)]
    assert lab.wrong(together(generator, requests), requests) == []
    assert 4 <= verifier.followed <= 8
    assert nothing_left(generator)


class Dies(Wrapped):
    """Fails each request after some commits, and has the next try wait until it is told to go on."""

    def __init__(self, verifier: Any) -> None:
        super().__init__(verifier)
        self.tries, self.stopped = Counter[str](), list[str]()
        self.waiting: dict[str, Callable[[], None]] = {}

    def progressed_s(self, request_id: str) -> float:
        return 0.0

    def renew(self, *asked: Any) -> None:
        self.verifier.renew(*asked)

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)
        self.waiting.pop(request_id, None)
        super().stop(request_id)

    def follow(self, window: Window, sink: Any) -> None:
        name = window.request_id
        self.tries[name] += 1
        if self.tries[name] > 1:
            self.waiting[name] = partial(self.verifier.follow, window, sink)
            return
        said = 0

        def heard(answer: Any) -> None:
            nonlocal said
            said += 1
            if said <= 3:
                sink(answer)
            if said == 3:
                sink(VerifierUnavailable("planted"))

        self.verifier.follow(window, heard)


@pytest.mark.parametrize("planted", [False, True])
def test_who_is_computed_anew_elsewhere_may_wait_for_that(
    lab: Lab, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at its beginning: else all whom a dead verifier had would have both sides compute their prompts.
    planted: as long as for one more token, the control."""
    if planted:
        monkeypatch.setattr(DirectDrive, "begun", property(lambda _: True, lambda *_: None), raising=False)
    auto = replace(lab, mode="auto", decide=lambda *_: "direct", parts=lab.parts)
    verifier = Dies(lab.verifier().start())
    generator = auto.generator(lab.engine(), verifier, commit_deadline_s=0.01)

    def patience_s(session: Session, begun: bool, _: Any) -> float:
        name = session.request.request_id
        if name in verifier.waiting and not begun:
            verifier.waiting.pop(name)()
        return 0.0 if name in verifier.waiting else math.inf

    monkeypatch.setattr(generator.ways, "patience_s", patience_s)
    requests = [request_of(f"k{i}", i, max_tokens=40) for i in range(2)]
    assert lab.wrong(together(generator, requests), requests) == []
    assert bool(verifier.stopped) == planted
    assert nothing_left(generator)


@pytest.mark.parametrize("planted", [False, True])
def test_who_goes_back_leaves_no_promise(lab: Lab, planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that it does not take there is others'. planted: the promise is kept, as the control."""
    held, turn = list[int](), drive.Drive.turn

    def looks(self: drive.Drive) -> None:
        turn(self)
        if self.session.way == "verify":
            held.append(self.owner.ways.promises.of(self.request.request_id))

    monkeypatch.setattr(drive.Drive, "turn", looks)
    if planted:
        monkeypatch.setattr(Promises, "end", lambda *_: None)
    auto = replace(lab, mode="auto", decide=lambda *_: "direct", parts=lab.parts)
    generator = auto.generator(lab.engine(), Starves(lab.verifier().start()), commit_deadline_s=0.005)
    generator.ways.hold = 64
    requests = [request_of(f"k{i}", i, max_tokens=20) for i in range(2)]
    assert lab.wrong(together(generator, requests), requests) == []
    assert len(held) == 2 and all(held) == planted


def test_control_without_another_way_it_waits(lab: Lab) -> None:
    verifier = Starves(lab.verifier().start())
    generator = lab.generator(lab.engine(), verifier, mode="direct", commit_deadline_s=0.02)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(collect(generator, request_of("w", 1, max_tokens=30)), 3.0))


def promised(lab: Lab) -> int:
    """How many of ten requests go direct with KV for two and a half."""
    costs = Costs(((1.0, 0.01),))
    slow = Costs(((1.0, 0.1),))
    load = VerifierLoad(costs, costs, kv_free=250)
    client: Any = SimpleNamespace(load=lambda _: load)
    engine: Any = SimpleNamespace(times=SimpleNamespace(costs=slow))
    settings = lab.settings.model_copy(update={"session": SessionSettings(mode="auto")})
    ways, found = Ways(settings, engine), list[Way]()
    requests = [Request(f"p{i}", (1,) * 40, 60, deterministic=True) for i in range(10)]
    with ExitStack() as stack:
        for request in requests:
            stack.enter_context(ways.counted(request, True))
            found.append(ways.first(Session(request, settings.session, 0.0), client))
    assert not ways.promises._of and not ways.promises.total
    return found.count("direct")


def test_kv_is_not_promised_twice(lab: Lab) -> None:
    """All see the same figures of the verifier, which are of a moment ago."""
    assert promised(lab) == 2


def test_control_it_would_be(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Promises, "give", lambda *_: None)
    assert promised(lab) == 10


def test_what_was_promised_is_taken(lab: Lab) -> None:
    promises = Promises()
    promises.give("a", 100, 60)
    promises.give("b", 50, 20)
    promises.admitted("a")
    promises.admitted("a")
    assert (promises.total, promises.of("a"), promises.of("b"), promises.of("c")) == (110, 60, 50, 0)
    assert promises.coming == 1
    promises.give("a", 30, 30)
    assert promises.coming == 1, "who was admitted and stays is not on its way again"
    promises.end("b")
    promises.end("b")
    assert (promises.total, promises.coming) == (30, 0)
    promises.end("a")
    promises.give("a", 100, 60)
    assert promises.coming == 1, "who comes back is"


def test_a_late_commit_with_candidates() -> None:
    """The first try was given up, and is answered before the next one."""
    session = Session(Request("r", (3, 1), 50, deterministic=True), SessionSettings(), 0.0)
    right = oracle(50, (3, 1))[0]
    session.candidates(0, 0, right[:5])
    session.turn("direct")
    window = session.due(0.0)
    assert window is not None and len(window.candidates) == 5
    session.lost()
    emit, *_ = session.commit(verify(window), 0.0)
    assert isinstance(emit, Emit) and emit.tokens == (*right[:6],)
    again = session.due(0.0)
    assert again is not None and (again.candidates, len(again.tokens)) == ((), 8)


def test_what_a_change_throws_away_is_counted() -> None:
    session = Session(Request("r", (3, 1), 500, deterministic=True), SessionSettings(), 0.0)
    session.candidates(0, 0, [7] * 100)
    session.turn("direct")
    assert (session.stats.rolled_back_tokens, session.dropped) == (100 - 63, 100 - 63), "more than a window"
    session.turn("verify")
    assert (session.stats.rolled_back_tokens, session.dropped) == (100, 100)
    assert session.stats.candidate_tokens == 100 and not session.proposed
