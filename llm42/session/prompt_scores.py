"""Log-probabilities of a prompt's own tokens, canonical: windows whose candidates are the prompt.

A long prompt takes several windows, one after the other. A row's bits depend on the tokens before it alone,
so the pieces are those of the whole; the verifier keeps what it has computed under the request's id, so each
piece costs its own rows and one more; and a try that fails, or is not answered in time, costs one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

from llm42.config import SessionSettings
from llm42.errors import FingerprintChanged, LLM42Error, VerificationFailed
from llm42.protocol import Commit, Request, RequestStats, TokenLogprob, Window
from llm42.session.interfaces import VerifierClient
from llm42.session.verify_call import verify
from llm42.telemetry.tracing import Tracer

CHUNK = 512
"""Most tokens that are scored in one window: half of a GPU's largest step, some seconds of a CPU."""


def scoring_windows(request: Request, chunk: int = CHUNK) -> Iterator[Window]:
    """All of the prompt after its first token, whose log-probability nothing conditions."""
    prompt = request.prompt
    for begin in range(1, max(2, len(prompt)), chunk):
        yield Window(
            request.request_id,
            prompt[:begin],
            1,
            prompt[begin : begin + chunk],
            request.sampling,
            request.prompt_logprobs or 0,
            score=True,
            cache_salt=request.cache_salt,
        )


async def score_prompt(
    client: VerifierClient, request: Request, settings: SessionSettings, tracer: Tracer, stats: RequestStats
) -> tuple[tuple[TokenLogprob, ...], str]:
    """The log-probabilities of prompt[1:], and the fingerprint that they were all computed under.

    Windows and retries are counted in `stats`. Raises LLM42Error when no try of a window was answered, and
    when the verifiers were replaced meanwhile.
    """
    span = tracer.start("score_prompt", request.trace, candidates=len(request.prompt) - 1)
    found: list[TokenLogprob] = []
    fingerprint = request.fingerprint

    def on_retry() -> None:
        stats.verify_retries += 1

    try:
        for window in scoring_windows(request):
            answer = await verify(client, window, settings, tracer, span.trace, on_retry)
            if isinstance(answer, LLM42Error):
                raise answer
            stats.windows += 1
            fingerprint = fingerprint or answer.fingerprint
            found += _scores(window, answer, fingerprint)
    finally:
        span.end()
    assert fingerprint is not None
    return tuple(found), fingerprint


def _scores(window: Window, commit: Commit, fingerprint: str) -> tuple[TokenLogprob, ...]:
    """Those of the window's candidates; the last one of a commit is of a token that nobody asked for."""
    if commit.fingerprint != fingerprint:
        raise FingerprintChanged("the verifiers now have another fingerprint: send the request again")
    if not len(window.candidates) == commit.accepted == len(commit.logprobs) - 1:
        raise VerificationFailed(f"{commit.accepted} of {len(window.candidates)} given tokens were scored")
    return commit.logprobs[:-1]
