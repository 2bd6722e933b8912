"""What the vLLM adapter makes of scores of the prompt and of schemas, over a fake AsyncLLM."""

from __future__ import annotations

from dataclasses import replace

from fake_vllm import FakeLLM, Make, request_of

from llm42.engine.vllm_sampling import arguments_of

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
