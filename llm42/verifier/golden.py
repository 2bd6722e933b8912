"""Known answers: a short canonical output, computed when a verifier starts and named by its fingerprint.

Two verifiers that list the same inputs but compute other bits thus have other fingerprints, and one that has
changed since its start can be told from one that has not.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Generator

from llm42.protocol import Commit, Failure, LLM42Error, SamplingParams, Window
from llm42.verifier.core import Verifier

PROMPT, OUTPUT, ALTERNATIVES = 72, 4, 20
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=42))


class GoldenFailed(LLM42Error):
    """The model's logits hold no finite value for the known prompt: nothing can be verified."""

    code = "verification_failed"


def _questions(verifier: Verifier) -> Generator[Window, Commit | Failure, str]:
    """Yields windows, is sent their answers, returns the digest."""
    digest = hashlib.sha256()
    rng = random.Random(42)
    length = min(PROMPT, verifier.max_len - OUTPUT)
    prompt = tuple(rng.randrange(verifier.vocab_size) for _ in range(length))
    for number, sampling in enumerate(SAMPLINGS):
        tokens = prompt
        for _ in range(OUTPUT):
            answer = yield Window(f"golden-{number}", tokens, length, (), sampling, ALTERNATIVES)
            if isinstance(answer, Failure):
                raise GoldenFailed(f"the known prompt has no answer: {answer.message}")
            (entry,) = answer.logprobs
            tokens = (*tokens, answer.next_token)
            for token, logprob in ((entry.token, entry.logprob), *entry.top):
                digest.update(struct.pack("<qd", token, logprob))
    return digest.hexdigest()[:16]


def golden_answers_now(verifier: Verifier) -> str:
    """Digest of the known answers from a verifier whose thread has not been started: its steps run here."""
    questions = _questions(verifier)
    answer: Commit | Failure | None = None
    try:
        while True:
            future = verifier.submit(questions.send(answer) if answer else next(questions), cold=True)
            while not future.done():
                verifier.step()
            answer = future.result()
    except StopIteration as end:
        return str(end.value)


async def golden_answers(verifier: Verifier) -> str:
    """The same from a running verifier, beside its other work; everything is computed anew."""
    questions = _questions(verifier)
    answer: Commit | Failure | None = None
    try:
        while True:
            window = questions.send(answer) if answer else next(questions)
            (answer,) = await verifier.verify_async([window], cold=True)
    except StopIteration as end:
        return str(end.value)
