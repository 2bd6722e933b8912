"""The oracle of every guarantee, and the comparison with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llm42.protocol import Commit, FinishReason, Request, RequestStats, TokenLogprob, Window
from llm42.text.detokenizer import Detokenizer
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.scheduler import Verifier
from tests.support.requests import window_of


@dataclass(frozen=True, slots=True)
class Answer:
    """An output: what must be equal, with `==`. Log-probabilities are compared with the alternatives asked
    for."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    text: str
    finish: FinishReason | None
    stats: RequestStats = field(default_factory=RequestStats, compare=False)

    @property
    def sent(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What HTTP carries of it: ids, and log-probabilities as floats."""
        return self.tokens, tuple(x.logprob for x in self.logprobs)


def differences(got: Answer, want: Answer) -> list[str]:
    """In which ways an output is not the oracle's; an output that goes on too long or ends early counts."""
    found = []
    for name in ("tokens", "logprobs"):
        a, b = getattr(got, name), getattr(want, name)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            found.append(f"{name}[{at}]: {a[at]} instead of {b[at]}")
        if len(a) != len(b):
            found.append(f"{len(a)} {name} instead of {len(b)}")
    if got.text != want.text:
        found.append(f"text {got.text!r} instead of {want.text!r}")
    if got.finish != want.finish:
        found.append(f"finish {got.finish} instead of {want.finish}")
    return found


def decode_alone(verifier: Verifier, tokenizer: Tokenizer, request: Request) -> Answer:
    """The verifier decoding alone, one token at a time: written without the session, the driver and
    OutputText. `verifier`: one that has no thread; its cache is cold, unless it was asked before."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish, text = None, ""
    while finish is None:
        commit = answer_of(verifier, window_of(request, tokens))
        assert isinstance(commit, Commit), commit
        tokens.append(commit.next_token)
        logprobs += commit.logprobs
        finish = _ended(request, tokens)
        if finish or request.stop:
            ended = tokens[-1] in request.stop_token_ids and not request.include_stop
            text = tokenizer.decode(tokens[:-1] if ended else tokens)
            least = len(Detokenizer(tokenizer).push(tokens[: request.sampling.min_tokens]))
            if (cut := _first_stop(text, request, least)) is not None:
                finish, text = FinishReason.STOP, text[:cut]
    verifier.release(request.request_id)
    shown = tuple(logprobs) if request.num_logprobs is not None else ()
    return Answer(tuple(tokens), shown, text, finish)


def _ended(request: Request, tokens: list[int]) -> FinishReason | None:
    if tokens[-1] in request.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= request.max_tokens else None


def _first_stop(text: str, request: Request, least: int) -> int | None:
    """Where the text ends because of a stop string that is complete only after `least` characters, or
    None."""
    starts = [(at, s) for s in request.stop for at in range(len(text)) if text.startswith(s, at)]
    found = [(at, s) for at, s in starts if not request.sampling.min_tokens or at + len(s) > least]
    if not found:
        return None
    at, stop = min(found)
    return at + (len(stop) if request.include_stop else 0)


def answer_of(verifier: Verifier, window: Window) -> Any:
    """Steps a verifier that has no thread until the window is answered."""
    future = verifier.submit(window)
    while not future.done():
        verifier.step()
    return future.result()
