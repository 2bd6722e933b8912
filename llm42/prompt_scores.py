"""Log-probabilities of a prompt's own tokens, canonical: one window whose candidates are the prompt."""

from __future__ import annotations

from llm42.config import SessionSettings
from llm42.protocol import Commit, LLM42Error, Request, RequestStats, Window
from llm42.tracing import Tracer
from llm42.verify_call import VerifierClient, verify


def scoring_window(request: Request) -> Window:
    """All of the prompt after its first token, whose log-probability nothing conditions."""
    return Window(
        request.request_id,
        request.prompt[:1],
        1,
        request.prompt[1:],
        request.sampling,
        request.prompt_logprobs or 0,
        score=True,
    )


async def score_prompt(
    client: VerifierClient, request: Request, settings: SessionSettings, tracer: Tracer, stats: RequestStats
) -> Commit:
    """The commit of the scoring window: its log-probabilities but the last are those of prompt[1:].

    Retries are counted in `stats`. Raises LLM42Error when no try was answered.
    """
    window = scoring_window(request)
    span = tracer.start("score_prompt", request.trace, candidates=len(window.candidates))

    def on_retry() -> None:
        stats.verify_retries += 1

    try:
        answer = await verify(client, window, settings, tracer, span.trace, on_retry)
    finally:
        span.end()
    if isinstance(answer, LLM42Error):
        raise answer
    stats.windows += 1
    return answer
