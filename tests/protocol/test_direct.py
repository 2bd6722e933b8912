"""Requests that the verifier decodes by itself, through the driver: the output is the oracle's, whatever
becomes of the commits, and nothing stays behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from llm42.errors import (
    FingerprintChanged,
    LLM42Error,
    Overloaded,
    RequestRejected,
    StepFailed,
    VerificationFailed,
    VerifierUnavailable,
)
from llm42.protocol import Commit, Failure, FinishReason, Request, Window
from llm42.session.driver import Generator
from llm42.session.interfaces import Sink
from llm42.session.verify_call import SEND_IN_FULL
from llm42.verifier.build import build_verifier
from tests.support import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Answer,
    Followed,
    Follower,
    Lab,
    check_pool,
    collect,
    differences,
    prompt_of,
    request_of,
    together,
    wait_until,
    window_of,
)

KINDS = (GREEDY, SAMPLED, PENALISED)


def direct(lab: Lab, client: Follower | None, **session: Any) -> Generator:
    """A driver whose engine has not even been started."""
    return lab.generator(lab.engine(start=False), client, **({"mode": "direct"} | session))


def alone(lab: Lab, client: Follower, request: Request, **session: Any) -> Answer:
    return asyncio.run(collect(direct(lab, client, **session), request))


@pytest.mark.parametrize("credit", [1, 2, 5, 64])
def test_the_output_is_the_oracles(lab: Lab, credit: int) -> None:
    """Also with several choices for one prompt, and where a token ends the output."""
    requests = [request_of(f"d{i}", i % 3, max_tokens=40, sampling=KINDS[i % 3]) for i in range(6)]
    requests += [
        replace(requests[1], request_id=f"n{i}", sampling=replace(SAMPLED, seed=i)) for i in range(3)
    ]
    ends = lab.oracle(requests[1]).tokens[11]
    requests.append(replace(requests[1], request_id="ends", stop_token_ids=(ends,)))
    client = Follower(lab.verifier().start(), credit)
    answers = together(direct(lab, client, credit=credit), requests)
    assert lab.wrong(answers, requests) == []
    assert answers[-1].finish is FinishReason.STOP
    for answer in answers:
        stats, count = answer.stats, len(answer.tokens)
        assert (stats.windows, stats.direct_tokens, stats.verified_tokens) == (1, count, count)
        assert (stats.candidate_tokens, stats.rollbacks, stats.verify_retries) == (0, 0, 0)
    longest = {r.request_id: len(r.prompt) + r.max_tokens for r in requests}
    assert all(until <= longest[name] for name, until in client.renewals)
    assert bool(client.renewals) == (credit < 64)


def test_both_ways_have_one_output(lab: Lab) -> None:
    request = request_of("both", 3, max_tokens=30)
    verifier = lab.verifier().start()
    answer = alone(lab, Follower(verifier), request)
    checked = asyncio.run(collect(lab.generator(lab.engine(), verifier), request))
    assert differences(answer, checked) == []
    assert answer.stats.direct_tokens == 30
    assert checked.stats.direct_tokens == 0


class Unreliable(Follower):
    """Loses commits, says them twice, holds them back for the next one, or dies."""

    lost = 0
    held: Commit | None = None

    def deliver(self, one: Followed, commit: Commit) -> None:
        fate = self.rng.choice(["good"] * 6 + ["lost", "twice", "late", "died"])
        self.lost += fate in ("lost", "died")
        if fate == "late":
            self.held = commit
        elif fate == "died":
            one.over = True
            one.sink(VerifierUnavailable("planted"))
        elif fate != "lost":
            one.sink(commit)
            if fate == "twice":
                one.sink(commit)
            if self.held is not None and self.held.request_id == commit.request_id:
                one.sink(self.held)
                self.held = None


@pytest.mark.parametrize("seed", range(4))
def test_lost_repeated_and_late_commits_change_nothing(lab: Lab, seed: int) -> None:
    request = request_of(f"u{seed}", seed, max_tokens=60, sampling=KINDS[seed % 3])
    verifier = lab.verifier().start()
    client = Unreliable(verifier, seed)
    answer = alone(lab, client, request, credit=8, verify_timeout_s=0.3, verify_attempts=20)
    assert differences(answer, lab.oracle(request)) == []
    assert client.lost
    assert answer.stats.windows == len(client.windows) > 1
    assert answer.stats.verify_retries <= answer.stats.windows - 1  # a gap is no retry


class Wrong(Follower):
    """Says another token where it has said one before."""

    def deliver(self, one: Followed, commit: Commit) -> None:
        super().deliver(one, commit)
        super().deliver(one, replace(commit, next_token=commit.next_token ^ 1))


def test_control_a_verifier_that_changes_its_mind_is_heard(lab: Lab) -> None:
    with pytest.raises(ValueError, match="a broken promise"):
        alone(lab, Wrong(lab.verifier().start()), request_of("w", 1))


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_in_the_middle_of_a_commit(lab: Lab, include: bool) -> None:
    """What was decoded behind it is neither sent nor counted as used."""
    free = request_of("free", 4, max_tokens=40)
    text = lab.oracle(free).text
    at = next(i for i in range(30, len(text)) if text.find(text[i : i + 3]) == i)
    request = replace(free, request_id="s", stop=(text[at : at + 3],), include_stop=include)
    client = Follower(lab.verifier().start(), together=40)
    client.rng.randrange = lambda *_: 40  # type: ignore[method-assign,assignment]
    answer = alone(lab, client, request)
    assert differences(answer, lab.oracle(request)) == []
    assert answer.finish is FinishReason.STOP
    assert len(answer.tokens) < 40 == answer.stats.direct_tokens, "all were decoded before it was seen"
    assert not client.followed


class RunsOn(Follower):
    """Takes no notice of where the output ends."""

    def ended(self, one: Followed, tokens: list[int]) -> bool:
        return len(tokens) > one.window.max_len + 5

    def follow(self, window: Window, sink: Sink) -> None:
        super().follow(replace(window, max_len=window.max_len + 50, credit=60), sink)


def test_tokens_past_max_tokens_are_dropped(lab: Lab) -> None:
    request = request_of("m", 5, max_tokens=21)
    answer = alone(lab, RunsOn(lab.verifier().start(), together=8), request)
    assert differences(answer, lab.oracle(request)) == []
    assert answer.finish is FinishReason.LENGTH


def test_what_the_client_has_is_where_it_begins(lab: Lab) -> None:
    whole = request_of("f", 6, max_tokens=30)
    had = lab.oracle(whole).tokens[:12]
    client = Follower(lab.verifier().start())
    answer = alone(lab, client, replace(whole, output=had))
    assert (*had, *answer.tokens) == lab.oracle(whole).tokens
    assert client.windows[0].tokens == (*whole.prompt, *had)
    assert client.windows[0].max_len == len(whole.prompt) + 30


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_the_prompt_is_scored_as_ever(lab: Lab, max_tokens: int) -> None:
    request = request_of("p", 7, max_tokens=max_tokens, prompt_logprobs=1)

    async def first(generator: Generator) -> Any:
        async with aclosing(generator.generate(request)) as deltas:
            return (await anext(deltas)).prompt_logprobs

    verifier = lab.verifier().start()
    found = asyncio.run(first(direct(lab, Follower(verifier))))
    assert found == asyncio.run(first(lab.generator(lab.engine(), verifier)))
    assert len(found) == len(request.prompt) - 1


def test_a_client_that_leaves_frees_everything(lab: Lab) -> None:
    verifier = lab.verifier().start()
    client = Follower(verifier, together=2)

    async def leave() -> None:
        async with aclosing(direct(lab, client).generate(request_of("l", 8, max_tokens=400))) as deltas:
            await anext(deltas)

    asyncio.run(leave())
    assert not client.followed
    assert wait_until(lambda: not any(t.is_alive() for t in client.threads))
    verifier.release("l")  # its last token was under way
    assert wait_until(lambda: verifier.stats().kv_held_blocks == verifier.stats().idle_sequences == 0)
    check_pool(verifier._pool)


class Silent(Follower):
    """Commits nothing."""

    def deliver(self, one: Followed, commit: Commit) -> None:
        pass


def test_a_verifier_that_commits_nothing_is_given_up_after_the_attempts(lab: Lab) -> None:
    client = Silent(lab.verifier().start())
    with pytest.raises(VerifierUnavailable, match=r"no answer from the verifier in 0\.05 s"):
        alone(lab, client, request_of("q", 1), verify_timeout_s=0.05, verify_attempts=3)
    assert len(client.windows) == 3
    assert not client.followed


class Slow(Follower):
    """A commit every 0.2 seconds."""

    def deliver(self, one: Followed, commit: Commit) -> None:
        time.sleep(0.2)
        super().deliver(one, commit)


@pytest.mark.usefixtures("awake")
def test_time_counts_from_the_last_commit(lab: Lab) -> None:
    request = request_of("slow", 2, max_tokens=8)
    client = Slow(lab.verifier().start(), together=1)
    answer = alone(lab, client, request, verify_timeout_s=1.0, verify_attempts=1)
    assert differences(answer, lab.oracle(request)) == []
    assert len(client.windows) == 1


class Fails(Follower):
    """Every so many commits something is the matter instead. how: a call that raises, or a commit's place."""

    def __init__(self, lab: Lab, failure: Failure | LLM42Error, how: str, every: int) -> None:
        super().__init__(lab.verifier().start(), together=1)
        self.failure, self.how, self.every, self.count = failure, how, every, 0

    @property
    def turn(self) -> bool:
        self.count += 1
        return bool(self.count % self.every)

    def follow(self, window: Window, sink: Sink) -> None:
        if self.how == "call" and self.turn:
            self.windows.append(window)
            raise self.failure  # type: ignore[misc]
        super().follow(window, sink)

    def deliver(self, one: Followed, commit: Commit) -> None:
        if self.how == "commit" and not self.turn:
            one.over = True
            one.sink(self.failure)
        else:
            super().deliver(one, commit)


UNAVAILABLE, IN_FULL = VerifierUnavailable("planted"), Failure("d", SEND_IN_FULL, "who is that?")


@pytest.mark.parametrize(
    ("failure", "how", "every"),
    [
        (UNAVAILABLE, "call", 4),
        (Overloaded("planted"), "call", 4),
        (UNAVAILABLE, "commit", 5),
        (StepFailed("planted"), "commit", 5),
        (IN_FULL, "commit", 5),
    ],
)
def test_what_may_pass_is_asked_again(lab: Lab, failure: Failure | LLM42Error, how: str, every: int) -> None:
    """Refusals are no attempts, and after a commit everything counts anew."""
    request = request_of("d", 2, max_tokens=16)
    client = Fails(lab, failure, how, every)
    answer = alone(lab, client, request, verify_attempts=2)
    assert differences(answer, lab.oracle(request)) == []
    assert answer.stats.verify_retries == len(client.windows) - 1 == 3
    assert client.windows[-1].tokens == (*request.prompt, *answer.tokens)[: len(client.windows[-1].tokens)]


@pytest.mark.usefixtures("awake")
@pytest.mark.parametrize(
    ("failure", "error", "windows"),
    [
        (StepFailed("planted"), VerifierUnavailable, 2),
        (Failure("d", "non_finite_logits", "planted"), VerificationFailed, 1),
        (FingerprintChanged("planted"), VerifierUnavailable, 4),
    ],
)
def test_what_does_not_pass_ends_it(
    lab: Lab, failure: Failure | LLM42Error, error: type[LLM42Error], windows: int
) -> None:
    client = Fails(lab, failure, "commit", 1)
    with pytest.raises(error, match="planted") as caught:
        alone(lab, client, request_of("d", 2), verify_attempts=2, verify_timeout_s=0.7)
    assert len(client.windows) == windows
    assert caught.value.code == (failure.code if isinstance(failure, Failure) else error.code)


class Forgets(Follower):
    """Drops a request that is out of credit, as a verifier does after a while."""

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        self._end(request_id)
        super().renew(request_id, until, told)


def test_a_verifier_that_does_not_hold_the_request_gets_it_in_full(lab: Lab) -> None:
    request = request_of("forgotten", 2, max_tokens=16)
    client = Forgets(lab.verifier().start(), together=1)
    answer = alone(lab, client, request, credit=4, verify_timeout_s=20.0)
    assert differences(answer, lab.oracle(request)) == []
    assert len(client.windows) == 1 + len(client.renewals) > 2


class DiesWhenRenewed(Follower):
    """Is gone when credit is to be renewed, once."""

    dead = False

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        if not self.dead:
            self.dead = True
            self._end(request_id)
            raise VerifierUnavailable("planted")
        super().renew(request_id, until, told)


def test_a_renewal_that_is_refused_is_a_retry(lab: Lab) -> None:
    request = request_of("renewed", 2, max_tokens=24)
    client = DiesWhenRenewed(lab.verifier().start(), together=1)
    answer = alone(lab, client, request, credit=4, verify_timeout_s=20.0)
    assert differences(answer, lab.oracle(request)) == []
    assert answer.stats.windows == 1 + answer.stats.verify_retries == 2


@pytest.mark.parametrize("credit", [1, 2, 64])
def test_the_verifier_itself(lab: Lab, credit: int) -> None:
    requests = [request_of(f"v{i}", i % 3, max_tokens=60, sampling=KINDS[i % 3]) for i in range(8)]
    requests.append(
        replace(requests[1], request_id="ends", stop_token_ids=(lab.oracle(requests[1]).tokens[11],))
    )
    verifier: Any = lab.verifier(kv_tokens=1024).start()
    answers = together(direct(lab, verifier, credit=credit), requests)
    assert lab.wrong(answers, requests) == []
    assert {a.stats.windows for a in answers} == {1}
    assert wait_until(lambda: verifier.stats().kv_held_blocks == 0)
    check_pool(verifier._pool)


def test_every_commit_names_the_fingerprint_of_a_built_verifier(lab: Lab) -> None:
    """It is known only when the verifier has been built."""
    built = build_verifier(lab.settings, lab.model, lab.tokenizer, lab.certificate).start()
    lab.parts.append(built)
    request, heard = request_of("f", 1, max_tokens=20), list[Any]()
    answer = asyncio.run(collect(direct(lab, built, credit=4), request))  # type: ignore[arg-type]
    assert differences(answer, lab.oracle(request)) == []
    built.follow(replace(window_of(request, []), credit=8, max_len=len(request.prompt) + 8), heard.append)
    assert wait_until(lambda: len(heard) == 8)
    assert {commit.fingerprint for commit in heard} == {built.fingerprint} != {""}


class OtherFingerprint(Follower):
    """Its second commit is another verifier's."""

    def deliver(self, one: Followed, commit: Commit) -> None:
        first = commit.base == len(one.window.tokens)
        super().deliver(one, commit if first else replace(commit, fingerprint="another"))


def test_a_reply_has_one_fingerprint(lab: Lab) -> None:
    with pytest.raises(FingerprintChanged):
        alone(lab, OtherFingerprint(lab.verifier().start()), request_of("o", 1))


def test_a_request_beyond_a_verifiers_cache_is_refused_before_it_starts(lab: Lab) -> None:
    client = Follower(lab.verifier(kv_tokens=256).start())
    generator = direct(lab, client)
    smaller = generator.settings.verifier.model_copy(update={"kv_tokens": 256})
    generator.settings = generator.settings.model_copy(update={"verifier": smaller})
    with pytest.raises(RequestRejected, match=r"verifier\.kv_tokens"):
        asyncio.run(collect(generator, Request("b", prompt_of(8, 100), 157, SAMPLED, True)))
    assert not client.windows


def test_best_effort_is_the_engines(lab: Lab) -> None:
    client = Follower(lab.verifier().start())
    generator = lab.generator(lab.engine(), client, mode="direct")
    best = replace(request_of("best", 5, max_tokens=20), deterministic=False)
    assert len(asyncio.run(collect(generator, best)).tokens) == 20
    assert not client.windows
