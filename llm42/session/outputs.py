"""From what an engine says to what a client gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llm42.engine.base import EngineOutput
from llm42.errors import LLM42Error, RequestRejected
from llm42.protocol import Delta, FinishReason, Request, TokenLogprob
from llm42.session.machine import Session
from llm42.text.output_text import OutputText
from llm42.text.tokenizer import Tokenizer


class EngineFailed(LLM42Error):
    """The fast path ended a request with an error (HTTP 500)."""

    code = "engine_error"


def to_delta(
    tokenizer: Tokenizer,
    request: Request,
    text: OutputText,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    finish: FinishReason | None,
    session: Session | None = None,
    fingerprint: str | None = None,
) -> Delta:
    """Turns tokens into what the client gets; a stop string in their text, or a stop token, ends it."""
    piece, used = text.push(tokens)
    if finish is not None and not text.stopped:
        piece += text.flush()
    if text.stopped:
        finish = FinishReason.STOP
        if session is not None:
            session.stop()
    wanted = request.num_logprobs is not None
    return Delta(
        token_ids=tuple(tokens[:used]),
        text=piece,
        logprobs=tuple(logprobs[:used]) if wanted else (),
        token_texts=tuple(tokenizer.token_text(t) for t in tokens[:used]) if wanted else (),
        finish_reason=finish,
        fingerprint=fingerprint,
        stats=session.stats if session is not None and finish is not None else None,
    )


def require_no_error(output: EngineOutput) -> None:
    """Raises what the engine says of the request: RequestRejected, EngineFailed."""
    if output.error is not None and output.param is not None:
        raise RequestRejected(output.error, output.param)
    if output.error is not None:
        raise EngineFailed(output.error)


def prompt_alone(output: EngineOutput) -> Delta:
    """The whole answer to a request for no tokens."""
    require_no_error(output)
    return Delta(
        (),
        "",
        finish_reason=FinishReason.LENGTH,
        prompt_logprobs=output.prompt_logprobs,
        cached_tokens=output.cached_tokens,
    )


def joined(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """Neighbouring outputs of a best-effort request as one; `outputs` is not empty."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return replace(
        first,
        tokens=tuple(t for o in outputs for t in o.tokens),
        logprobs=tuple(p for o in outputs for p in o.logprobs),
        finish=last.finish,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        cached_tokens=next((o.cached_tokens for o in outputs if o.cached_tokens is not None), None),
    )
