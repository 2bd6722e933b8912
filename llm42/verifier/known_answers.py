"""Known answers: a short canonical output, computed at certification in steps of the reference size, kept
with the certificate and named by the fingerprint. Every start computes them again, in the steps it will use.

Two verifiers that list the same inputs but compute other bits thus have other fingerprints, one that has
changed since its start can be told from one that has not, and a certificate of another machine is not used.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.verifier.scheduler import Verifier

PROMPT, OUTPUT, ALTERNATIVES = 72, 4, 20
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=42))
KNOWN_ROWS = PROMPT + OUTPUT
"""Positions that a runner needs for them."""


class GoldenFailed(LLM42Error):
    """The model's logits hold no finite value for the known prompt: nothing can be verified."""

    code = "verification_failed"


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """tokens: one output per sampling. digest: over tokens, log-probabilities and alternatives, 16 hex
    digits."""

    digest: str
    tokens: tuple[tuple[int, ...], ...]


NO_ANSWERS = KnownAnswers("", ())
_Dialogue = Generator[Window, Commit | Failure, KnownAnswers]


def _questions(verifier: Verifier, known: Sequence[Sequence[int]] = ()) -> _Dialogue:
    """Yields windows, is sent their answers. known: the outputs to expect; each is then asked for in one
    window instead of token by token, and the digest is the same if every bit is."""
    digest = hashlib.sha256()
    rng = random.Random(42)
    length = min(PROMPT, verifier.max_len - OUTPUT)
    prompt = tuple(rng.randrange(verifier.vocab_size) for _ in range(length))
    outputs = []
    for number, sampling in enumerate(SAMPLINGS):
        tokens, candidates = prompt, tuple(known[number][:-1]) if known else ()
        while len(tokens) < length + OUTPUT:
            window = Window(f"golden-{number}", tokens, length, candidates, sampling, ALTERNATIVES)
            answer = yield window
            if isinstance(answer, Failure):
                raise GoldenFailed(f"the known prompt has no answer: {answer.message}")
            tokens = (*tokens, *candidates[: answer.accepted], answer.next_token)
            candidates = ()
            for entry in answer.logprobs:
                for token, logprob in ((entry.token, entry.logprob), *entry.top):
                    digest.update(struct.pack("<qd", token, logprob))
        outputs.append(tokens[length:])
    return KnownAnswers(digest.hexdigest()[:16], tuple(outputs))


def golden_answers_now(verifier: Verifier, known: Sequence[Sequence[int]] = ()) -> KnownAnswers:
    """The known answers of a verifier whose thread has not been started: its steps run here. known: see
    `_questions`."""
    questions = _questions(verifier, known)
    answer: Commit | Failure | None = None
    try:
        while True:
            future = verifier.submit(questions.send(answer) if answer else next(questions), cold=True)
            while not future.done():
                verifier.step()
            answer = future.result()
    except StopIteration as end:
        found: KnownAnswers = end.value
        return found


async def golden_answers(verifier: Verifier) -> str:
    """Their digest from a running verifier, beside its other work; everything is computed anew."""
    questions = _questions(verifier)
    answer: Commit | Failure | None = None
    try:
        while True:
            window = questions.send(answer) if answer else next(questions)
            (answer,) = await verifier.verify([window], cold=True)
    except StopIteration as end:
        found: KnownAnswers = end.value
        return found.digest
