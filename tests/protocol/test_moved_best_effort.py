"""Best-effort requests that a verifier decodes for a while: they never fail or wait because of it."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llm42.errors import Overloaded, RequestRejected
from llm42.protocol import Commit, FinishReason, Request, RequestStats, SamplingParams, Window
from llm42.session import backoff, policy, ways
from llm42.session import best_effort as best_effort_module
from llm42.session.best_effort import Moved
from llm42.session.direct import DirectDrive
from llm42.session.driver import Generator
from llm42.session.load import Load, Progress, Way
from llm42.session.ways import may_move
from llm42.step_times import Costs, VerifierLoad
from llm42.telemetry import metrics as m
from llm42.verifier.scheduler import Verifier
from tests.protocol.switching import KINDS, Counts, Starves, nothing_left, switching
from tests.support import (
    GREEDY,
    PATIENCE_S,
    SAMPLED,
    Answer,
    Lab,
    RandomWays,
    Wrapped,
    check_blocks,
    check_pool,
    collect,
    request_of,
    sweep,
    together,
    wait_until,
)


def moving(lab: Lab, seed: int) -> Lab:
    """Both classes change their ways at random."""
    return replace(switching(lab, seed)[0], decide_best_effort=RandomWays(seed + 50), parts=lab.parts)


@pytest.mark.parametrize("seed", sweep(range(4), quick=(0,)))
def test_best_effort_that_moves(lab: Lab, seed: int) -> None:
    """It has all of its tokens, whoever decoded them, and deterministic requests beside it theirs."""
    engine, verifier = lab.engine(kv_tokens=1024), lab.verifier(1024).start()
    metrics = Counts()
    generator = moving(lab, seed).generator(engine, verifier, min_window=1, start_window=3)
    generator.metrics = metrics
    requests = [request_of(f"m{i}", i, max_tokens=40, sampling=KINDS[i % 3]) for i in range(4)]
    plain = [
        replace(r, request_id=f"b{i}", deterministic=False, seeded=False, num_logprobs=2, stream=i % 2 == 0)
        for i, r in enumerate(requests)
    ]
    found = together(generator, [*requests, *plain])
    assert lab.wrong(found[:4], requests) == []
    for answer in found[4:]:
        assert (len(answer.tokens), len(answer.logprobs), answer.finish) == (40, 40, FinishReason.LENGTH)
        assert answer.text == lab.tokenizer.decode(answer.tokens)
        assert answer.stats == RequestStats()
    assert 0 < metrics.found[m.MOVED_TOKENS] < 160
    assert nothing_left(generator)
    assert wait_until(lambda: engine.load().kv_used == 0 and verifier.stats().kv_held_blocks == 0)
    check_pool(verifier._pool)
    check_blocks(engine)


def always_moved(lab: Lab, verifier: Any, **session: Any) -> Generator:
    """A verifier has all best effort from its beginning. Nobody waits in vain for it, unless a test says so:
    how soon a token comes is the machine's."""
    session = {"commit_deadline_s": PATIENCE_S} | session
    lab = replace(lab, mode="auto", decide_best_effort=lambda *_: "direct", parts=lab.parts)
    generator = lab.generator(lab.engine(), verifier, **session)
    generator.metrics = Counts()
    return generator


def best_effort(count: int, **more: Any) -> list[Request]:
    made = [request_of(f"e{i}", i, max_tokens=40, deterministic=False) for i in range(count)]
    return [replace(r, seeded=False, **more) for r in made]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_moved_request_gets_what_the_verifier_says(lab: Lab, greedy: bool) -> None:
    generator = always_moved(lab, lab.verifier().start())
    requests = best_effort(3, sampling=GREEDY if greedy else SAMPLED)
    assert (
        lab.wrong([replace(a, stats=RequestStats()) for a in together(generator, requests)], requests) == []
    )
    assert generator.metrics.found[m.MOVED_TOKENS] == 120  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_moved_request_outlives_its_verifier(lab: Lab, tokens: int) -> None:
    """It dies at the beginning, or after so many commits: the engine goes on behind what the client has."""
    verifier = lab.verifier().start()
    generator, requests = always_moved(lab, verifier, credit=2), best_effort(3)
    if not tokens:
        verifier.close()

    async def read(request: Request) -> list[int]:
        found = list[int]()
        async for delta in generator.generate(request):
            found += delta.token_ids
            if tokens and len(found) >= tokens:
                await asyncio.to_thread(verifier.close)
        return found

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*map(read, requests)))

    for request, found in zip(requests, asyncio.run(all_of_them()), strict=True):
        assert len(found) == 40
        assert tuple(found[:tokens]) == lab.oracle(request).tokens[:tokens]
    assert nothing_left(generator)


class Full(Starves):
    """Or refuses who is to be decoded there."""

    refuses = True

    def follow(self, window: Window, sink: Any) -> None:
        super().follow(window, sink)
        if self.refuses:
            raise Overloaded("planted")


@pytest.mark.parametrize("kind", [Full, Starves])
def test_a_moved_request_does_not_wait(
    lab: Lab, kind: type[Starves], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a verifier that is full, or works on others alone."""
    monkeypatch.setattr(backoff, "FIRST_S", 0.0)
    verifier = kind(lab.verifier().start())
    generator = always_moved(lab, verifier, commit_deadline_s=0.02)
    assert [len(a.tokens) for a in together(generator, best_effort(3))] == [40, 40, 40]
    assert verifier.followed >= 3
    assert nothing_left(generator)


class Late(Wrapped):
    """It works on others' prompts, as where many come at once: it begins with nobody before somebody has
    waited for as long as for a verifier without any. Or with nobody at all."""

    begins, hangs = True, False

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self.waiting: list[tuple[Window, Any]] = []

    def follow(self, window: Window, sink: Any) -> None:
        """As it says."""
        self.waiting.append((window, sink))

    def renew(self, *args: Any) -> None:
        """As ever."""
        self.verifier.renew(*args)

    def progressed_s(self, request_id: str) -> float:
        """Asked by those who have waited for so long."""
        while self.begins and self.waiting:
            self.verifier.follow(*self.waiting.pop())
        return math.inf if self.hangs else 0.0


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("prompts", [False, True])
def test_a_moved_request_waits_for_prompts_as_it_would_elsewhere(
    lab: Lab, hangs: bool, prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its verifier completes steps. Where that hangs, or no prompts are to be computed, the engine has
    it soon."""
    verifier = Late(lab.verifier().start())
    verifier.begins, verifier.hangs = prompts and not hangs, hangs
    generator = always_moved(lab, verifier, commit_deadline_s=0.05)
    if verifier.begins:  # what it waits for comes, however slow this machine is
        monkeypatch.setattr(policy, "WAIT_MORE", 1e9)
    asked = VerifierLoad(Costs(((1.0, 0.01),), 1e3 if prompts else 1e-9), direct=64)
    monkeypatch.setattr(generator.ways, "load", lambda *_: Load(verifier=asked))
    assert len(together(generator, best_effort(1))[0].tokens) == 40
    moved = generator.metrics.found[m.MOVED_TOKENS]  # type: ignore[attr-defined]
    assert moved == (40 if verifier.begins else 0)
    assert nothing_left(generator)


@pytest.mark.parametrize("kind", [Full, Starves])
@pytest.mark.parametrize("learnt", [True, False])
def test_the_next_ones_are_not_moved_in_vain(
    lab: Lab, kind: type[Starves], learnt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not learnt, the control: each waits."""
    monkeypatch.setattr(backoff, "FIRST_S", 1e6 if learnt else 0.0)
    monkeypatch.setattr(backoff, "MOST_S", 1e6)
    verifier = kind(lab.verifier().start())
    generator = always_moved(lab, verifier, commit_deadline_s=0.02)
    for request in best_effort(3):
        assert len(together(generator, [request])[0].tokens) == 40
    assert verifier.followed == (1 if learnt else 3)
    assert nothing_left(generator)


def test_how_long_nobody_is_moved(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer each time, once for those that come back together, and as at first after one was decoded."""
    now = [100.0]
    monkeypatch.setattr(ways, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = always_moved(lab, verifier := lab.verifier()).ways
    (request,) = best_effort(1)

    def shy_s() -> float:
        begun = now[0]
        while found.next_best_effort(request, 0, None, 0, verifier) == "verify":
            assert found.next_best_effort(request, 9, "direct", 0, verifier) == "direct", "who is there stays"
            now[0] += 1.0
        return now[0] - begun

    assert shy_s() == 0.0
    for expected in (1, 2, 4, 8, 16, 32, 64, 128, 160, 160):
        found.came_back()
        found.came_back()
        assert shy_s() == expected
    found.came_on()
    found.came_back()
    assert shy_s() == 1


class Holds(Wrapped):
    """Its step thread waits, when it has decoded a few tokens of best effort, until the deterministic request
    has come."""

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self.come = threading.Event()

    def follow(self, window: Window, sink: Any) -> None:
        """As it says."""
        said = 0

        def heard(answer: Any) -> None:
            nonlocal said
            said += 1
            sink(answer)
            if said == 5:
                assert self.come.wait(PATIENCE_S)

        deterministic = window.request_id == "det"
        self.verifier.follow(window, sink if deterministic else heard)
        if deterministic:
            self.come.set()

    def renew(self, *args: Any) -> None:
        """As ever."""
        self.verifier.renew(*args)

    def stop(self, request_id: str) -> None:
        """As ever."""
        self.verifier.stop(request_id)


@pytest.mark.parametrize("yields", [True, False])
def test_a_moved_request_gives_way_to_a_deterministic_one(
    lab: Lab, yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier with KV for one: the later one gets it, and the engine goes on with the other. As any
    request, the control, it has it until it ends."""
    if not yields:
        monkeypatch.setattr(Moved, "_send", DirectDrive._send)
    client = Holds(lab.verifier(256).start())
    lab = replace(lab, decide=lambda *_: "direct", parts=lab.parts)
    generator = always_moved(lab, client, credit=64)
    second = request_of("det", 1, length=150, max_tokens=40)
    first = replace(request_of("first", 0, length=150, max_tokens=40), deterministic=False, seeded=False)

    async def both() -> tuple[Answer, Answer]:
        begun = asyncio.create_task(collect(generator, first))
        while not generator.metrics.found[m.MOVED_TOKENS]:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        return await collect(generator, second), await begun

    answer, other = asyncio.run(both())
    assert lab.wrong([answer], [second]) == []
    assert len(other.tokens) == 40
    moved = generator.metrics.found[m.MOVED_TOKENS]  # type: ignore[attr-defined]
    assert other.tokens[:moved] == lab.oracle(first).tokens[:moved]
    assert (0 < moved < 40) if yields else moved == 40
    assert client.verifier.stats().preemptions == yields
    assert nothing_left(generator)


def test_control_it_would_wait(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moved, "may_turn", False)
    generator = always_moved(lab, Starves(lab.verifier().start()), commit_deadline_s=0.02)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(collect(generator, best_effort(1)[0]), 3.0))


@pytest.mark.parametrize(
    "more",
    [
        {"seeded": True, "sampling": SAMPLED},
        {"json_schema": "{}"},
        {"prompt_logprobs": 1},
        {"max_tokens": 0},
        {"sampling": SamplingParams(presence_penalty=1.5)},
        {"sampling": SamplingParams(frequency_penalty=-0.5)},
    ],
)
def test_what_only_an_engine_does_stays_there(more: dict[str, Any]) -> None:
    plain = Request("r", (1, 2), 9, seeded=False)
    assert may_move(plain) and may_move(replace(plain, seeded=True))
    assert may_move(replace(plain, sampling=SamplingParams(repetition_penalty=1.2))), "of prompt and output"
    assert not may_move(replace(plain, **more))


def test_what_the_engine_refuses_is_refused_in_any_way(lab: Lab) -> None:
    generator = always_moved(lab, lab.verifier().start())
    generator.engine = lab.engine(kv_tokens=32)
    with pytest.raises(RequestRejected):
        together(generator, best_effort(1))
    assert nothing_left(generator)


class Watched:
    """An engine that counts what it is given, and gives nothing before it is told to."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.submitted, self.held = engine, 0, list[Any]()
        self.holds = False

    def submit(self, *args: Any) -> None:
        """As it says."""
        self.submitted += 1
        if self.holds:
            self.held.append(args)
        else:
            self.engine.submit(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_the_engine_computes_nothing_of_who_is_moved(lab: Lab) -> None:
    """Two processes with work share a GPU in halves. The control: who stays is submitted."""
    for stays in (False, True):
        generator = always_moved(lab, lab.verifier().start())
        engine = generator.engine = Watched(generator.engine)  # type: ignore[assignment]
        if stays:
            generator.ways.decide_best_effort = lambda *_: "verify"
        assert [len(a.tokens) for a in together(generator, best_effort(3))] == [40, 40, 40]
        assert engine.submitted == (3 if stays else 0)


@pytest.mark.parametrize("asks", [True, False])
def test_who_has_no_token_yet_is_asked_again(lab: Lab, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a burst did not know of the others. Not asked, the control: it waits for the
    engine."""
    monkeypatch.setattr(best_effort_module, "ASKS", 10 if asks else 0)
    monkeypatch.setattr(best_effort_module, "ASK_S", 0.01)
    generator = always_moved(lab, lab.verifier().start())
    engine = generator.engine = Watched(generator.engine)  # type: ignore[assignment]
    engine.holds, answers = True, list[Way]()

    def decide(*_: Any) -> Way:
        answers.append("direct" if answers else "verify")
        return answers[-1]

    generator.ways.decide_best_effort = decide
    reading = collect(generator, best_effort(1)[0])
    if asks:
        assert len(asyncio.run(reading).tokens) == 40
        assert generator.metrics.found[m.MOVED_TOKENS] == 40  # type: ignore[attr-defined]
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(reading, 1.0))
        assert answers == ["verify"]
    assert engine.submitted == 1


class Contradicts(Wrapped):
    """Says another token, at the second look, of a position that it has said something of."""

    lies = 0

    def follow(self, window: Window, sink: Any) -> None:
        said = 0

        def heard(answer: Any) -> None:
            nonlocal said
            said += isinstance(answer, Commit)
            sink(answer)
            if said == 3 and isinstance(answer, Commit):
                wrong = replace(answer.logprobs[-1], token=answer.logprobs[-1].token ^ 1)
                last = {"next_token": wrong.token} if not answer.decoded else {"decoded": (wrong.token,)}
                self.lies += 1
                sink(replace(answer, logprobs=(*answer.logprobs[:-1], wrong), **last))

        self.verifier.follow(window, heard)


@pytest.mark.parametrize("planted", [False, True])
def test_a_verifier_that_contradicts_itself_ends_no_best_effort(
    lab: Lab, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """planted: as any request, the control."""
    if planted:
        monkeypatch.setattr(Moved, "commit", DirectDrive.commit)
    verifier = Contradicts(lab.verifier().start())
    generator = always_moved(lab, verifier)
    if planted:
        with pytest.raises(ValueError, match="a broken promise"):
            together(generator, best_effort(1))
    else:
        assert [len(a.tokens) for a in together(generator, best_effort(2))] == [40, 40]
    assert verifier.lies >= 1
    assert nothing_left(generator)


def test_moved_requests_are_soon_asked_whether_they_go_back(lab: Lab) -> None:
    """However often they have changed; who is not moved is asked the later the more."""
    asked = list[tuple[Way | None, int]]()

    def decide(request: Progress, load: Load) -> Way:
        asked.append((request.way, request.output))
        return "verify" if request.way == "direct" else "direct"

    lab = replace(lab, mode="auto", decide_best_effort=decide, parts=lab.parts)
    generator = lab.generator(lab.engine(), lab.verifier().start(), credit=2)
    generator.ways.hold = 4
    (request,) = best_effort(1, sampling=GREEDY, stream=True)
    assert len(together(generator, [replace(request, max_tokens=300)])[0].tokens) == 300
    assert [way for way, _ in asked[:4]] == [None, "direct", "verify", "direct"]
    _, moved, back, again = (output for _, output in asked[:4])
    assert moved >= 4 and back - moved >= 4 << 2
    assert 4 <= again - back < 4 << 3
