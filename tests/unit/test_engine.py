"""The fast path alone, step by step and without its thread: scheduling, KV accounting and rollback.

The model is float32, so greedy tokens do not depend on the order of additions: every continuation is
compared with a recomputation of the whole sequence in one chunk of a fresh cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from llm42.cache import KVCache
from llm42.checkpoint.load import load_for
from llm42.config import EngineSettings, Settings
from llm42.engine.base import EngineOutput
from llm42.engine.torch.batch import BatchRunner, FusedAttention, PlainAttention, Rows
from llm42.engine.torch.engine import TorchEngine
from llm42.errors import Overloaded, RequestRejected
from llm42.host.threads import torch_threads
from llm42.models.weights import LoadedModel
from llm42.protocol import FinishReason, Request, SamplingParams
from llm42.sampling import draw
from llm42_kernels.cpu import cpu_operators
from tests.support import Client, check_pool, prompt_of, write_model

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    path = write_model(tmp_path_factory.mktemp("tiny"))
    settings = Settings.load({"model": {"path": str(path), "dtype": "float32", "max_model_len": 512}})
    with torch_threads(1):  # as the engine's own thread: several would wait for each other on a busy machine
        yield load_for(settings)[0]


_KNOWN: dict[tuple[int, ...], int] = {}


def next_token(model: LoadedModel, tokens: Sequence[int]) -> int:
    """The greedy token after `tokens`, from nothing."""
    key = tuple(tokens)
    if key not in _KNOWN:
        c, blocks = model.config, -(-len(key) // BLOCK)
        kv = KVCache(c.num_layers, blocks, BLOCK, c.num_kv_heads, c.head_dim, model.dtype)
        row = BatchRunner(model, cpu_operators(), kv).step([], [Rows(key, 0, list(range(blocks)))])
        _KNOWN[key] = int(row[0].argmax())
    return _KNOWN[key]


def continuation(model: LoadedModel, tokens: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `tokens`."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(model, known))
    return known[len(tokens) :]


@pytest.mark.parametrize("broken", [False, True])
def test_both_attentions_agree(model: LoadedModel, broken: bool) -> None:
    """The one for GPUs against the one for CPUs, decode rows and prompt chunks over one cache, in float32;
    with a neighbour's block in the table they do not."""
    c, rows = model.config, [prompt_of(seed, 40) for seed in range(3)]
    tables = [[3, 4, 5], [6, 7, 8], [9, 1, 2]]
    found = []
    for kind in (PlainAttention, FusedAttention):
        runner = BatchRunner(
            model, cpu_operators(), KVCache(c.num_layers, 10, BLOCK, c.num_kv_heads, c.head_dim, model.dtype)
        )
        runner.attention = kind
        first = [Rows(t[:n], 0, table) for t, table, n in zip(rows, tables, (39, 20, 17), strict=True)]
        runner.step([], first)
        table = tables[1] if broken and kind is FusedAttention else tables[0]
        decode = [Rows(rows[0][39:], 39, table)]
        chunks = [Rows(rows[1][20:], 20, tables[1]), Rows(rows[2][17:30], 17, tables[2])]
        found.append(torch.cat(runner.step(decode, chunks)))
    assert torch.allclose(*found, atol=1e-4, rtol=1e-4) != broken


def engine_of(model: LoadedModel, **settings: Any) -> TorchEngine:
    return TorchEngine(model, EngineSettings(**({"kv_tokens": 2048, "threads": 1} | settings)))


def request_of(name: str, seed: int, length: int = 20, max_tokens: int = 24, **more: Any) -> Request:
    return replace(Request(name, prompt_of(seed, length), max_tokens), **more)


def submit(engine: TorchEngine, request: Request, limit: int | None = None) -> Client:
    client = Client()
    engine.submit(request, client, request.max_tokens if limit is None else limit)
    return client


def drain(engine: TorchEngine, most: int = 3000) -> int:
    """Steps until nothing is left to do; the number of steps."""
    for count in range(most):
        if not engine.step():
            return count
        check_pool(engine._pool)
    raise AssertionError("the engine never came to rest")


def rows_of(engine: TorchEngine) -> list[int]:
    """Rows computed by each later step."""
    seen: list[int] = []
    inner = engine._runner.step

    def step(decode: list[Rows], prefill: list[Rows]) -> torch.Tensor:
        seen.append(len(decode) + sum(len(r.tokens) for r in prefill))
        return inner(decode, prefill)

    engine._runner.step = step  # type: ignore[method-assign]
    return seen


def idle(engine: TorchEngine) -> bool:
    load = engine.load()
    return load.running == load.waiting == load.kv_used == 0 and not engine._requests


@pytest.mark.parametrize("chunk", [1, 5, 17, 256])
def test_batched_requests_equal_recomputation(model: LoadedModel, chunk: int) -> None:
    engine = engine_of(model, prefill_chunk=chunk)
    requests = [request_of(f"b{n}", n, length=n) for n in (1, 15, 16, 17, 40)]
    clients = [submit(engine, r) for r in requests]
    drain(engine)
    for request, client in zip(requests, clients, strict=True):
        assert client.tokens == continuation(model, request.prompt, request.max_tokens)
        assert client.finish is FinishReason.LENGTH
    assert idle(engine)


def test_a_step_never_takes_more_prompt_rows_than_its_budget(model: LoadedModel) -> None:
    engine = engine_of(model, prefill_chunk=8)
    rows = rows_of(engine)
    clients = [submit(engine, request_of(f"c{i}", i, length=50, max_tokens=2)) for i in range(3)]
    drain(engine)
    assert max(rows) <= 8 + len(clients)
    assert all(len(c.tokens) == 2 for c in clients)


def end_order(engine: TorchEngine, priorities: Sequence[int]) -> list[int]:
    """Submits one request per priority at once; in which order they end."""
    ended: list[int] = []
    for i, priority in enumerate(priorities):

        def sink(output: EngineOutput, i: int = i) -> None:
            if output.finish is not None:
                ended.append(i)

        engine.submit(request_of(f"o{i}", i, max_tokens=3, priority=priority), sink, 3)
    drain(engine)
    return ended


def test_the_most_urgent_waiting_request_goes_first(model: LoadedModel) -> None:
    assert end_order(engine_of(model, max_batch=1), [5, 1, 3, 1, -2]) == [4, 1, 3, 2, 0]


def test_control_equal_priorities_keep_their_order(model: LoadedModel) -> None:
    assert end_order(engine_of(model, max_batch=1), [0, 0, 0, 0]) == [0, 1, 2, 3]


def test_preemption_and_recomputation_give_the_right_continuation(model: LoadedModel) -> None:
    engine = engine_of(model, kv_tokens=8 * BLOCK)
    requests = [request_of(f"p{i}", i, length=30, max_tokens=50) for i in range(4)]
    clients = [submit(engine, r) for r in requests]
    drain(engine)
    assert engine.load().preemptions > 0
    for request, client in zip(requests, clients, strict=True):
        assert client.tokens == continuation(model, request.prompt, 50)
    assert idle(engine)


def test_control_enough_memory_preempts_nobody(model: LoadedModel) -> None:
    engine = engine_of(model, kv_tokens=4 * 80 + 4 * BLOCK)
    for i in range(4):
        submit(engine, request_of(f"n{i}", i, length=30, max_tokens=50))
    drain(engine)
    assert engine.load().preemptions == 0


def test_the_least_urgent_request_is_preempted_not_the_oldest(model: LoadedModel) -> None:
    engine = engine_of(model, kv_tokens=8 * BLOCK)
    urgent = submit(engine, request_of("urgent", 1, length=40, max_tokens=80, priority=-1))
    others = [submit(engine, request_of(f"late{i}", 2 + i, length=20, max_tokens=60)) for i in range(2)]
    preempted: list[str] = []
    inner = engine._preempt
    engine._preempt = lambda r: (preempted.append(r.request.request_id), inner(r))[1]  # type: ignore
    drain(engine)
    assert preempted
    assert "urgent" not in preempted
    assert len(urgent.tokens) == 80
    assert all(len(c.tokens) == 60 for c in others)


def test_a_prompt_seen_before_is_not_computed_again(model: LoadedModel) -> None:
    engine = engine_of(model)
    first = request_of("first", 1, length=70, max_tokens=20)
    one = submit(engine, first)
    drain(engine)
    rows = rows_of(engine)
    turn = replace(first, request_id="turn", prompt=(*first.prompt, *one.tokens, 9, 10, 11), max_tokens=6)
    two = submit(engine, turn)
    hits = engine._pool.hits
    drain(engine)
    known = (70 + 20 - 1) // BLOCK  # the last output token's KV was never written
    assert engine._pool.hits - hits == known
    assert rows[0] == len(turn.prompt) - known * BLOCK
    assert two.tokens == continuation(model, turn.prompt, 6)


def test_control_another_first_token_finds_nothing(model: LoadedModel) -> None:
    engine = engine_of(model)
    first = request_of("first", 1, length=70)
    submit(engine, first)
    drain(engine)
    rows = rows_of(engine)
    submit(engine, replace(first, request_id="other", prompt=(first.prompt[0] ^ 1, *first.prompt[1:])))
    drain(engine)
    assert engine._pool.hits == 0
    assert rows[0] == 70


def test_a_held_request_stops_at_its_limit_and_goes_on_when_extended(model: LoadedModel) -> None:
    engine = engine_of(model)
    request = request_of("held", 1, deterministic=True)
    client = submit(engine, request, limit=5)
    drain(engine)
    assert len(client.tokens) == 5
    assert engine.load().running == 1
    assert drain(engine) == 0, "a held request must cost no step"
    engine.extend("held", 8)
    assert drain(engine) == 3
    assert client.tokens == continuation(model, request.prompt, 8)
    assert client.finish is None


def test_a_held_request_does_not_hold_its_companions(model: LoadedModel) -> None:
    engine = engine_of(model)
    held = submit(engine, request_of("held", 1, deterministic=True), limit=2)
    free = submit(engine, request_of("free", 2, max_tokens=30))
    assert drain(engine) == 30
    assert (len(held.tokens), len(free.tokens)) == (2, 30)


def roll_back(engine: TorchEngine, client: Client, name: str, output: Sequence[int], limit: int) -> None:
    """A rollback as the session makes it."""
    client.epoch += 1
    client.tokens = list(output)
    engine.rollback(name, output, client.epoch, limit)


@pytest.mark.parametrize("keep", [0, 1, 3, 11, 12, 13, 27, 28, 29])
def test_rollback_continues_from_exactly_the_given_output(model: LoadedModel, keep: int) -> None:
    engine = engine_of(model)
    request = request_of("r", 1, max_tokens=40, deterministic=True)
    client = submit(engine, request, limit=30)
    drain(engine)
    output = [*client.tokens[:keep], client.tokens[keep] ^ 1]
    roll_back(engine, client, "r", output, 40)
    drain(engine)
    assert client.tokens == output + continuation(model, (*request.prompt, *output), 40 - len(output))
    assert {o.epoch for o in client.outputs} == {0, 1}


def test_rollback_beyond_what_was_decoded_moves_forward(model: LoadedModel) -> None:
    """The verifier may be ahead of the fast path: a bonus token, or a whole window after a preemption."""
    engine = engine_of(model)
    request = request_of("f", 1, max_tokens=40, deterministic=True)
    client = submit(engine, request, limit=4)
    drain(engine)
    output = [*client.tokens, 7, 8, 9]
    roll_back(engine, client, "f", output, 12)
    drain(engine)
    assert client.tokens == output + continuation(model, (*request.prompt, *output), 5)


def preempted_with_published_output(
    engine: TorchEngine,
) -> tuple[Client, int, Callable[[], list[torch.Tensor]]]:
    """A deterministic request that came back after a preemption: its blocks of output are published. Also
    the second block's id, and a reader of its KV."""
    client = submit(engine, request_of("s", 1, length=18, max_tokens=80, deterministic=True), limit=40)
    drain(engine)
    running = engine._requests["s"]
    engine._preempt(running)
    engine.extend("s", 41)
    drain(engine)
    block = running.blocks[1]
    assert engine._pool.is_published(block)
    kv = engine._kv
    return client, block, lambda: [kv.keys[:, block].clone(), kv.values[:, block].clone()]


def rewrite(engine: TorchEngine, client: Client) -> list[int]:
    """Rolls back into the middle of block 1 (positions 16 to 31) and decodes on."""
    output = [*client.tokens[:6], client.tokens[6] ^ 1]
    roll_back(engine, client, "s", output, 30)
    drain(engine)
    return output


def test_rollback_into_a_published_block_never_changes_it(model: LoadedModel) -> None:
    engine = engine_of(model)
    client, block, read = preempted_with_published_output(engine)
    before = read()
    output = rewrite(engine, client)
    assert all(torch.equal(a, b) for a, b in zip(before, read(), strict=True))
    assert engine._requests["s"].blocks[1] != block
    prompt = prompt_of(1, 18)
    assert client.tokens == output + continuation(model, (*prompt, *output), 30 - len(output))


def test_control_a_cut_inside_a_published_block_changes_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    client, _, read = preempted_with_published_output(engine)
    before = read()
    monkeypatch.setattr(engine._pool, "is_published", lambda block: False)
    rewrite(engine, client)
    assert not all(torch.equal(a, b) for a, b in zip(before, read(), strict=True))


def poisoned(model: LoadedModel, token: int) -> LoadedModel:
    embed = model.weights.embed.clone()
    embed[token] = float("nan")
    return replace(model, weights=replace(model.weights, embed=embed))


def test_a_refused_candidate_with_nan_leaves_nothing_behind(model: LoadedModel) -> None:
    poison, request = 501, request_of("n", 1, length=18, max_tokens=60, deterministic=True)
    engine = engine_of(poisoned(model, poison))
    client = submit(engine, request, limit=10)
    drain(engine)
    right = client.tokens
    assert poison not in continuation(model, request.prompt, 60)
    roll_back(engine, client, "n", [*right[:3], poison], 10)  # as if the fast path had drawn it
    drain(engine)
    assert client.tokens[4:] == [0] * 6, "the poison must show, or this test shows nothing"
    roll_back(engine, client, "n", right[:4], 60)
    drain(engine)
    assert client.tokens == continuation(model, request.prompt, 60)
    engine.abort("n")
    again = submit(engine, replace(request, request_id="again", deterministic=False))
    drain(engine)
    assert again.error is None
    assert again.tokens == client.tokens


def test_a_deterministic_request_parks_after_an_end_token(model: LoadedModel) -> None:
    request = request_of("e", 1, max_tokens=30, deterministic=True)
    free = continuation(model, request.prompt, 30)
    end = next(i for i in range(4, 30) if free[i] not in free[:i])
    engine = engine_of(model)
    client = submit(engine, replace(request, stop_token_ids=(free[end],)))
    drain(engine)
    assert client.tokens == free[: end + 1]
    assert client.finish is None
    assert engine.load().running == 1
    output = [*free[:end], free[end] ^ 1]  # the verifier says: not the end
    roll_back(engine, client, "e", output, end + 2)
    drain(engine)
    assert client.tokens == [*output, next_token(model, (*request.prompt, *output))]


def test_a_best_effort_request_ends_at_its_end_token(model: LoadedModel) -> None:
    request = request_of("e", 1, max_tokens=30)
    free = continuation(model, request.prompt, 30)
    engine = engine_of(model)
    client = submit(engine, replace(request, stop_token_ids=(free[4],)))
    drain(engine)
    assert client.tokens == free[: free.index(free[4]) + 1]
    assert client.finish is FinishReason.STOP
    assert idle(engine)


def waiting(engine: TorchEngine) -> None:
    submit(engine, request_of("busy", 8, max_tokens=40))
    engine.step()
    submit(engine, request_of("x", 1, deterministic=True))
    engine.step()
    assert engine.load().waiting == 1


def queued(engine: TorchEngine) -> None:
    submit(engine, request_of("x", 1))  # not even seen by a step


def prefilling(engine: TorchEngine) -> None:
    submit(engine, request_of("x", 1, length=100))
    engine.step()
    assert 0 < engine._requests["x"].computed < 100


def decoding(engine: TorchEngine) -> None:
    submit(engine, request_of("x", 1))
    for _ in range(8):
        engine.step()
    assert engine._requests["x"].output_len > 0


def held(engine: TorchEngine) -> None:
    submit(engine, request_of("x", 1, deterministic=True), limit=3)
    drain(engine)
    assert not engine._requests["x"].runnable


def parked(engine: TorchEngine) -> None:
    submit(engine, request_of("x", 1, deterministic=True, stop_token_ids=tuple(range(512))))
    drain(engine)
    assert engine._requests["x"].parked


def rolled_back(engine: TorchEngine) -> None:
    held(engine)
    engine.rollback("x", (1, 2), 1, 9)


def preempted(engine: TorchEngine) -> None:
    decoding(engine)
    engine._preempt(engine._requests["x"])
    assert engine.load().waiting == 1


def ended(engine: TorchEngine) -> None:
    submit(engine, request_of("x", 1))
    drain(engine)


def unknown(engine: TorchEngine) -> None:
    engine.extend("x", 9)
    engine.rollback("x", (1,), 1, 9)


STATES = (waiting, queued, prefilling, decoding, held, parked, rolled_back, preempted, ended, unknown)


@pytest.mark.parametrize("state", STATES, ids=lambda s: s.__name__)
def test_abort_in_every_state_frees_everything(
    model: LoadedModel, state: Callable[[TorchEngine], None]
) -> None:
    engine = engine_of(model, max_batch=1, prefill_chunk=7)
    state(engine)
    engine.abort("x")
    engine.abort("x")
    engine.step()
    assert "x" not in engine._requests
    neighbour = submit(engine, request_of("y", 2, max_tokens=5))
    drain(engine)
    assert neighbour.tokens == continuation(model, prompt_of(2, 20), 5)
    assert idle(engine)


def test_a_request_that_can_never_fit_is_refused(model: LoadedModel) -> None:
    engine = engine_of(model, kv_tokens=4 * BLOCK)
    submit(engine, request_of("fits", 1, length=40, max_tokens=24))
    drain(engine)
    for request in (request_of("kv", 1, length=41), request_of("context", 1, length=500)):
        with pytest.raises(RequestRejected) as caught:
            submit(engine, request)
        assert caught.value.code == "context_length_exceeded"
    assert idle(engine)


def test_a_closed_engine_refuses_and_tells_those_it_had(model: LoadedModel) -> None:
    engine = engine_of(model, max_batch=1).start()
    clients = [
        submit(engine, request_of("a", 1, deterministic=True), limit=2),  # held for ever
        submit(engine, request_of("b", 2)),  # waits behind it
    ]
    assert engine.alive
    engine.close()
    assert not engine.alive
    assert [c.error for c in clients] == ["the engine stopped"] * 2
    with pytest.raises(Overloaded):
        submit(engine, request_of("c", 3))
    engine.abort("a")
    engine.extend("b", 9)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": (5, 2_000_000_000)}, "prompt"),
        ({"prompt": (5, -1)}, "prompt"),
        ({"output": (512,)}, "prompt"),
        ({"sampling": SamplingParams(logit_bias=((512, 1.0),))}, "logit_bias"),
        ({"sampling": SamplingParams(min_tokens=1, min_tokens_banned=(-3,))}, "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    model: LoadedModel, changes: dict[str, Any], param: str
) -> None:
    engine = engine_of(model)
    with pytest.raises(RequestRejected) as caught:
        submit(engine, replace(request_of("a", 1), **changes))
    assert caught.value.param == param
    assert not engine.step()


def fails_with(engine: TorchEngine, token: int) -> None:
    """Steps with this token in them fail, as a kernel's fault would have it."""
    inner = engine._runner.step

    def step(decode: list[Rows], prefill: list[Rows]) -> list[torch.Tensor]:
        if any(token in rows.tokens for rows in (*decode, *prefill)):
            raise IndexError("planted")
        return inner(decode, prefill)

    engine._runner.step = step  # type: ignore[method-assign]


def test_a_request_that_cannot_be_computed_ends_alone(model: LoadedModel) -> None:
    engine, poison = engine_of(model), 511
    fails_with(engine, poison)
    others = [submit(engine, request_of(f"o{i}", i, max_tokens=12)) for i in range(3)]
    engine.step()
    bad = submit(engine, replace(request_of("bad", 9), prompt=(7, poison, 8)))
    drain(engine)
    assert bad.error == "IndexError: planted"
    for index, client in enumerate(others):
        assert client.error is None
        assert client.tokens == continuation(model, prompt_of(index, 20), 12)
    assert idle(engine)


def test_a_request_whose_draw_fails_ends_alone(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_or_fail(logits: torch.Tensor, params: SamplingParams, *rest: Any) -> int | None:
        if params.seed == 13:
            raise IndexError("planted")
        return draw(logits, params, *rest)

    monkeypatch.setattr("llm42.engine.torch.engine.draw", draw_or_fail)
    engine = engine_of(model)
    bad = submit(engine, replace(request_of("bad", 9), sampling=SamplingParams(seed=13)))
    good = submit(engine, request_of("good", 1, max_tokens=8))
    drain(engine)
    assert bad.error == "IndexError: planted"
    assert good.tokens == continuation(model, prompt_of(1, 20), 8)
    assert idle(engine)


def test_a_lost_device_ends_the_engine_and_tells_all(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fault in a kernel nothing works any more in that process: the replica must be replaced."""
    monkeypatch.setattr("llm42.engine.torch.engine.device_lost", lambda device: True)
    engine = engine_of(model)
    fails_with(engine, 511)
    clients = [submit(engine, request_of("held", 1, deterministic=True), limit=2)]
    drain(engine)
    clients.append(submit(engine, replace(request_of("bad", 9), prompt=(7, 511))))
    engine._loop()  # in this thread: it ends by itself
    assert not engine.alive
    assert clients[0].error == "the engine stopped"
    assert clients[1].error == "IndexError: planted"


def test_a_bug_outside_a_step_ends_every_request_with_an_error(model: LoadedModel) -> None:
    engine = engine_of(model)

    late: list[Client] = []

    def broken() -> Any:
        late.append(submit(engine, request_of("late", 2)))  # while it runs: no step will see it
        raise RuntimeError("planted")

    engine._schedule = broken  # type: ignore[method-assign]
    client = submit(engine, request_of("a", 1))
    engine._loop()  # in this thread: it ends by itself
    assert client.error == late[0].error == "the engine stopped"
    with pytest.raises(Overloaded):
        submit(engine, request_of("b", 2))


def play(model: LoadedModel, engine: TorchEngine, seed: int) -> tuple[int, int]:
    """Random submits, extensions, rollbacks and aborts; then how many of those left were checked, and how
    many do not have the right continuation of the output last forced on them."""
    rng = random.Random(seed)
    clients: dict[str, tuple[Request, Client, int]] = {}
    for number in range(120):
        kind = rng.choice(["submit", "extend", "rollback", "abort", "step", "step", "step"])
        name = rng.choice(list(clients)) if clients else ""
        if kind == "submit" and len(clients) < 6:
            # few prompts, so that prefixes are found again
            base = request_of(f"q{number}", rng.randrange(3), length=rng.choice([17, 33]), max_tokens=60)
            request = replace(base, deterministic=True, priority=rng.randrange(2))
            clients[request.request_id] = request, submit(engine, request, limit=10), 0
        elif kind == "extend" and name:
            engine.extend(name, min(60, len(clients[name][1].tokens) + 20))
        elif kind == "rollback" and name and clients[name][1].tokens:
            request, client, _ = clients[name]
            kept = client.tokens[: rng.randrange(len(client.tokens))]
            # more than one token: the last one's row is computed anew in any case
            forced = [*kept, *(rng.randrange(2, 512) for _ in range(rng.randrange(1, 4)))][:59]
            roll_back(engine, client, name, forced, min(60, len(forced) + 20))
            clients[name] = request, client, len(forced)
        elif kind == "abort" and name and rng.random() < 0.3:
            engine.abort(name)
            del clients[name]
        else:
            engine.step()
            check_pool(engine._pool)
    drain(engine)
    wrong = 0
    for request, client, forced_len in clients.values():
        kept, rest = client.tokens[:forced_len], client.tokens[forced_len:]
        wrong += rest != continuation(model, (*request.prompt, *kept), len(rest))
        engine.abort(request.request_id)
    engine.step()
    return len(clients), wrong


@pytest.mark.parametrize("seed", range(8))
def test_random_commands_over_scarce_memory(model: LoadedModel, seed: int) -> None:
    engine = engine_of(model, kv_tokens=10 * BLOCK, max_batch=4, prefill_chunk=(5, 16, 64)[seed % 3])
    checked, wrong = play(model, engine, seed)
    assert checked > 2
    assert wrong == 0
    assert engine._pool.evictions > 0
    assert idle(engine)


class ForgetsToCompare(TorchEngine):
    """Keeps the KV of replaced tokens after a rollback."""

    def _roll_back(self, request_id: str, output: Sequence[int], epoch: int, limit: int) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.tokens[len(running.request.prompt) :] = output
        super()._roll_back(request_id, output, epoch, limit)


def test_control_kv_of_replaced_tokens_is_noticed(model: LoadedModel) -> None:
    settings = EngineSettings(kv_tokens=2048, threads=1)
    assert sum(play(model, ForgetsToCompare(model, settings), seed)[1] for seed in range(3)) > 0
