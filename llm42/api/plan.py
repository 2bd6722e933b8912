"""From a validated body to protocol requests: tokens, sampling, seeds, limits. Pure; runs in the ingress."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from dataclasses import dataclass, field
from itertools import product

from llm42.api.errors import ModelNotFound
from llm42.api.prompts import echo_start, echoes_of, prompts_of, require_unicode
from llm42.api.requests import ChatBody, CompletionBody, GenerationBody, ReceiptOptions
from llm42.api.stops import special_stops
from llm42.config import Settings
from llm42.errors import RequestRejected
from llm42.protocol import Request, SamplingParams
from llm42.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens on /v1/completions; chat defaults to what the context leaves."""

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class HttpRequestPlan:
    """One HTTP request: the choices to generate, and what the renderer has to know."""

    id: str
    created: int
    chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    num_logprobs: int | None
    deterministic: bool
    seed: int | None
    """What repeats the output; None: nothing does."""
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...] = field(repr=False)
    """Choice i is requests[i]: the n choices of the first prompt, then those of the second, ..."""
    receipt: ReceiptOptions | None = None
    prompt_logprobs: int | None = None
    echoes: tuple[str, ...] | None = None
    """Text of each prompt, where it comes before the output."""
    echo_start: int = 0
    """Offset of an echoed prompt's first token in its text: below 0 where tokens were put in front of it."""
    running_usage: bool = False
    """Whether each chunk of a stream has the usage so far."""

    def prompt_index(self, choice: int) -> int:
        """Which prompt a choice belongs to."""
        return choice * len(self.prompts) // len(self.requests)


def plan_request(
    body: GenerationBody, settings: Settings, tokenizer: Tokenizer, deterministic: bool | None = None
) -> HttpRequestPlan:
    """Turns a body into requests. Raises ModelNotFound for another model, and RequestRejected, with the
    field's name, for what cannot be served.

    deterministic: what policy has made of the body's field; None: the field, else the server's default.
    """
    if body.model != settings.model.name:
        raise ModelNotFound(body.model, settings.model.name)
    if (refused := body.unsupported()) is not None:
        field_name, message = refused
        raise RequestRejected(message, field_name)
    if deterministic is None:
        said = body.asks_for_determinism
        deterministic = settings.server.deterministic_default if said is None else said
    constraint = _constraint(body, deterministic, settings)
    seed = body.seed
    if seed is None:  # 53 bits are exact in a client's double
        seed = settings.server.default_seed if deterministic else secrets.randbits(53)
    seeded = deterministic or body.seed is not None
    receipt = _receipt(body, deterministic)
    prompts = prompts_of(body, settings.model.max_model_len, tokenizer)
    if (asked := len(prompts) * (body.n or 1)) > settings.server.max_queued:
        raise RequestRejected(
            f"{len(prompts)} prompts with n = {body.n or 1} are {asked} outputs; a replica holds at most"
            f" {settings.server.max_queued} (server.max_queued): send several smaller requests.",
            "n" if len(prompts) == 1 else "prompt",
        )
    chat = isinstance(body, ChatBody)
    unique = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
    requests = [
        Request(
            request_id=f"{unique}-{number}",
            prompt=prompt,
            max_tokens=_max_tokens(body, len(prompt), settings.model.max_model_len),
            sampling=_sampling(body, choice_seed(seed, choice), tokenizer),
            deterministic=deterministic,
            stop=_stops(body),
            stop_token_ids=_stop_ids(body, tokenizer),
            include_stop=bool(body.include_stop_str_in_output),
            num_logprobs=_num_logprobs(body) if receipt is None else _num_logprobs(body) or 0,
            seeded=seeded,
            prompt_logprobs=_prompt_logprobs(body),
            json_schema=constraint,
            stream=bool(body.stream),
            cache_salt=require_unicode(body.cache_salt or "", "cache_salt"),
        )
        for number, (prompt, choice) in enumerate(product(prompts, range(body.n or 1)))
    ]
    echoed = body if isinstance(body, CompletionBody) and body.echo else None
    return HttpRequestPlan(
        id=unique,
        created=int(time.time()),
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        num_logprobs=_num_logprobs(body),
        deterministic=deterministic,
        # vLLM draws an unseeded request's noise by itself: no seed would repeat it
        seed=seed if seeded or settings.engine.draws_by_seed else None,
        prompts=prompts,
        requests=tuple(requests),
        receipt=receipt,
        prompt_logprobs=body.prompt_logprobs,
        echoes=None if echoed is None else echoes_of(echoed, prompts, tokenizer),
        echo_start=0 if echoed is None else echo_start(echoed, tokenizer),
    )


def _receipt(body: GenerationBody, deterministic: bool) -> ReceiptOptions | None:
    if not body.receipt:
        return None
    if not deterministic:
        raise RequestRejected(
            "A receipt is evidence of a verified answer: ask for it with deterministic: true.", "receipt"
        )
    return ReceiptOptions() if body.receipt is True else body.receipt


def choice_seed(seed: int, choice: int) -> int:
    """The unsigned 64-bit seed of one of n choices: the request's own for choice 0, else derived."""
    unsigned = seed & _SEED_MASK
    if choice == 0:
        return unsigned
    signed = unsigned - 2**64 if unsigned >= 2**63 else unsigned  # -1 and 2**64 - 1 are one seed
    return int.from_bytes(hashlib.sha256(f"llm42:{signed}:{choice}".encode()).digest()[:8], "little")


def _max_tokens(body: GenerationBody, prompt_len: int, context: int) -> int:
    """The output limit; the prompt and the output together must fit the context."""
    room = context - prompt_len
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if body.max_tokens == 0:
        if room >= 0 and (_prompt_logprobs(body) is not None or getattr(body, "echo", False)):
            return 0
        raise RequestRejected(
            "max_tokens 0 needs echo or prompt_logprobs: set one of these, or 1 or more.", "max_tokens"
        )
    if room < 1:
        raise RequestRejected(
            f"The prompt has {prompt_len} tokens, which leaves no room in the context of {context}:"
            " shorten it.",
            param,
            "context_length_exceeded",
        )
    asked, field_name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, field_name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked = room if isinstance(body, ChatBody) else min(DEFAULT_COMPLETION_TOKENS, room)
    if asked > room:
        raise RequestRejected(
            f"{prompt_len} prompt tokens and {asked} of output are more than the context of {context}:"
            f" with this prompt at most {room} of output fit.",
            field_name,
            "context_length_exceeded",
        )
    if (body.min_tokens or 0) > asked:
        raise RequestRejected(
            f"min_tokens {body.min_tokens} is above max_tokens {asked}: lower it.", "min_tokens"
        )
    return asked


def _stops(body: GenerationBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _stop_ids(body: GenerationBody, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = [*(body.stop_token_ids or ()), *special_stops(_stops(body), tokenizer)]
    for token in ids:
        if token >= tokenizer.vocab_size:
            raise RequestRejected(f"stop_token_ids: {token} is outside the vocabulary.", "stop_token_ids")
    if not body.ignore_eos:
        ids += _end_ids(body, tokenizer)
    return tuple(dict.fromkeys(ids))


def _end_ids(body: GenerationBody, tokenizer: Tokenizer) -> tuple[int, ...]:
    """A chat answer ends at the chat template's own end of turn too."""
    return tokenizer.eos_token_ids + (tokenizer.turn_end_ids if isinstance(body, ChatBody) else ())


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionBody)
    return body.logprobs


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """What is to be computed: asked for by its own name, or for an echo's log-probabilities."""
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    counts = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return max(counts, default=None)


def _constraint(body: GenerationBody, deterministic: bool, settings: Settings) -> str | None:
    """The JSON schema that the engine is to keep the output to."""
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        raise RequestRejected(
            "tool_choice: a call cannot be forced here; use 'auto' or 'none'.", "tool_choice"
        )
    schema = body.response_format.constraint() if body.response_format else None
    if schema is None:
        return None
    if deterministic:
        raise RequestRejected(
            "response_format: a deterministic request cannot be constrained to JSON; the verifier decodes"
            " freely. Send it without determinism, or ask for JSON in the prompt.",
            "response_format",
        )
    if not settings.engine.takes_schemas:
        raise RequestRejected(
            "response_format: this server's engine cannot constrain its output to JSON"
            " (engine.kind vllm with engine.vllm.structured_outputs can).",
            "response_format",
        )
    if body.ignore_eos:
        raise RequestRejected(
            "ignore_eos: an answer that is constrained to JSON ends where the JSON does: leave it out.",
            "ignore_eos",
        )
    return schema


def _sampling(body: GenerationBody, seed: int, tokenizer: Tokenizer) -> SamplingParams:
    """OpenAI's defaults: temperature 1, everything else neutral. top_k -1 is vLLM's way to write 0 (off)."""
    banned = (*_stop_ids(body, tokenizer), *_end_ids(body, tokenizer)) if body.min_tokens else ()
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, tokenizer.vocab_size),
        min_tokens=body.min_tokens or 0,
        min_tokens_banned=tuple(dict.fromkeys(banned)),
    )


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Pairs in rising id order, so that the JSON object's order cannot matter."""
    pairs: dict[int, float] = {}
    for key, value in (given or {}).items():
        known = key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size
        if not known or int(key) in pairs:
            raise RequestRejected(
                f"logit_bias: '{key}' is not a token id of the vocabulary (or names one twice).", "logit_bias"
            )
        pairs[int(key)] = value
    return tuple(sorted(pairs.items()))
