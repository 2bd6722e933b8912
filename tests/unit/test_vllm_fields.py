"""What the vLLM adapter makes of scores of the prompt and of schemas, over a fake AsyncLLM."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from llm42.engine.vllm.sampling import arguments_of
from llm42.protocol import SamplingParams
from tests.unit.fake_vllm import FakeLLM, Make, request_of

SCHEMA = '{"type": "object"}'


def test_only_best_effort_requests_ask_vllm_for_scores_and_schemas() -> None:
    request = request_of("r", deterministic=False, prompt_logprobs=2, json_schema=SCHEMA)
    arguments = arguments_of(request, 0)
    assert (arguments["prompt_logprobs"], arguments["json_schema"]) == (2, SCHEMA)
    assert "prompt_logprobs" not in arguments_of(replace(request, output=(1,)), 1), "the client has them"
    plain = arguments_of(request_of("r", deterministic=False), 0)
    verified = arguments_of(replace(request, deterministic=True), 0)
    assert not {"prompt_logprobs", "json_schema"} & {*plain, *verified}


def test_a_schema_that_vllm_refuses_is_the_request_s_fault(make: Make) -> None:
    """The same refusal of a request without a schema is the server's."""
    scene = make(FakeLLM())
    scene.llm.refuse = lambda _: True
    blamed = []
    for name, schema in (("with", SCHEMA), ("without", None)):
        client = scene.submit(request_of(name, deterministic=False, json_schema=schema))
        scene.steps(2)
        assert client.error is not None
        blamed.append(client.outputs[-1].param)
    assert blamed == ["response_format", None]


class VLLMClientError(Exception):
    """As vLLM 0.27 names what a request is to blame for."""


class EngineGenerateError(Exception):
    """As vLLM names anything else, without a word about it."""


def wrapped(cause: Exception) -> EngineGenerateError:
    error = EngineGenerateError()
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "text", "param"),
    [
        (VLLMClientError("bad schema"), "VLLMClientError: bad schema", "response_format"),
        (wrapped(ValueError("bad schema")), "ValueError: bad schema", "response_format"),
        (wrapped(wrapped(VLLMClientError("bad"))), "VLLMClientError: bad", "response_format"),
        (wrapped(OSError("a disk")), "OSError: a disk", None),
        (EngineGenerateError(), "EngineGenerateError: ", None),
    ],
    ids=repr,
)
def test_what_vllm_says_is_found_where_it_says_it(
    make: Make, error: Exception, text: str, param: str | None
) -> None:
    scene = make(FakeLLM())
    scene.llm.refusal, scene.llm.refuse = error, lambda _: True
    client = scene.submit(request_of("r", deterministic=False, json_schema=SCHEMA))
    scene.steps(2)
    assert (client.error, client.outputs[-1].param) == (text, param)


@pytest.mark.parametrize("agree", [False, True])
def test_numbers_that_vllm_cannot_carry_mean_what_they_say(agree: bool) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=2**70, min_tokens=2**70, min_tokens_banned=(1,))
    for deterministic in (False, True):
        request = request_of("r", deterministic=deterministic, sampling=sampling, max_tokens=9)
        told = json.dumps(arguments_of(request, 0, agree))
        assert max(map(int, re.findall(r"[0-9]+", told))) < 2**63
