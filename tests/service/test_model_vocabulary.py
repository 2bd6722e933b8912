"""What the server may draw it takes: a model's vocabulary may be padded beyond its tokenizer's, whose ids may
have holes."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from llm42.api.plan import HttpRequestPlan, plan_request
from llm42.api.requests import ChatBody, CompletionBody, GenerationBody
from llm42.audit.claim import Claim
from llm42.audit.question import Questions
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.engine.torch.engine import TorchEngine
from llm42.errors import RequestRejected
from llm42.protocol import Request, SamplingParams
from llm42.session.driver import Generator
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import assert_error, client
from tests.support import VOCAB, write_model

ROWS = 640
MODEL = "tiny"
Loaded = tuple[Any, Tokenizer]
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|begin|>assistant\n"
)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def padded(place: Path, moved: int | None = None) -> Settings:
    """The tiny model with rows of zeros to 640. moved: the line break's new id; its own is a hole."""
    write_model(place)
    weights = load_file(place / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name]
        weights[name] = torch.cat([rows, rows.new_zeros(ROWS - VOCAB, rows.shape[1])])
    save_file(weights, place / "model.safetensors")
    for file, values in (
        ("config.json", {"vocab_size": ROWS}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        data = json.loads((place / file).read_text())
        (place / file).write_text(json.dumps(data | values))
    if moved is not None:
        data = json.loads((place / "tokenizer.json").read_text())
        data["model"]["vocab"]["\u010a"] = moved
        (place / "tokenizer.json").write_text(json.dumps(data))
    model = {"path": str(place), "name": MODEL, "max_model_len": 256}
    return Settings.load({"model": model, "engine": {"threads": 1, "kv_tokens": 2048}})


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return padded(tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def loaded(settings: Settings) -> Loaded:
    return load_for(settings)


def planned(settings: Settings, tokenizer: Tokenizer, body: dict[str, Any]) -> HttpRequestPlan:
    kind: type[GenerationBody] = ChatBody if "messages" in body else CompletionBody
    return plan_request(kind.model_validate({"model": MODEL, **body}), settings, tokenizer)


async def answer(settings: Settings, loaded: Loaded, request: Request) -> tuple[list[int], str]:
    model, tokenizer = loaded
    engine = TorchEngine(model, settings.engine).start()
    try:
        tokens: list[int] = []
        text = ""
        async with aclosing(Generator(engine, tokenizer, settings, None).generate(request)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                text += delta.text
        return tokens, text
    finally:
        await asyncio.to_thread(engine.close)


async def test_what_is_drawn_is_taken_again(settings: Settings, loaded: Loaded) -> None:
    """An answer with ids that are no tokens, as prompt, stop, bias and echo of the next request."""
    _, tokenizer = loaded
    body = {"prompt": "the tea", "max_tokens": 24, "temperature": 100, "seed": 1, "ignore_eos": True}
    (request,) = planned(settings, tokenizer, body).requests
    tokens, text = await answer(settings, loaded, request)
    high = [token for token in tokens if token >= VOCAB]
    assert high, "nothing was drawn from the padding; the test shows nothing"
    assert text == tokenizer.decode([token for token in tokens if token < VOCAB])
    ids = [*request.prompt, *tokens]
    again = {"prompt": ids, "max_tokens": 4, "stop_token_ids": high[:2], "logit_bias": {str(high[0]): 100}}
    (second,) = planned(settings, tokenizer, again).requests
    assert second.prompt == tuple(ids)
    assert await answer(settings, loaded, second) == ([high[0]], "")
    echoed = planned(settings, tokenizer, {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert echoed.echoes == (tokenizer.decode(ids, skip_special=False),)


@pytest.mark.parametrize(
    "field", [{"prompt": [ROWS]}, {"stop_token_ids": [ROWS]}, {"logit_bias": {str(ROWS): 1}}], ids=str
)
def test_beyond_the_model_is_still_refused(field: dict[str, Any], settings: Settings, loaded: Loaded) -> None:
    with pytest.raises(RequestRejected, match=r"vocabulary"):
        planned(settings, loaded[1], {"prompt": "tea"} | field)


async def test_detokenize_takes_them_too(settings: Settings, loaded: Loaded) -> None:
    _, tokenizer = loaded
    ids = tokenizer.encode("tea")
    async with client(tokenizer, settings=settings) as (http, _):
        reply = await http.post("/detokenize", json={"tokens": [*ids, ROWS - 1]})
        assert reply.json() == {"prompt": "tea"}
        refused: httpx.Response = await http.post("/detokenize", json={"tokens": [ROWS]})
        assert_error(refused, 400, "tokens")


def test_an_audit_takes_them_too(settings: Settings, loaded: Loaded) -> None:
    """The bound of the replayer, which has the tokenizer only."""
    claim = Claim(1, "a", 0, "f", prompt=(5, ROWS - 1), output=(ROWS - 2,), sampling=SamplingParams())
    request = Questions(lambda _: (), loaded[1].vocab_size).of(claim, "y")
    assert request.prompt == (5, ROWS - 1)


def test_a_hole_in_the_ids_is_the_servers_affair(tmp_path: Path) -> None:
    """The line break lies beyond the count of tokens: every chat prompt has it."""
    settings = padded(tmp_path, moved=600)
    _, tokenizer = load_for(settings)
    (request,) = planned(settings, tokenizer, {"messages": [{"role": "user", "content": "Hi"}]}).requests
    assert request.prompt.count(600) == 2
    assert tokenizer.decode(request.prompt, skip_special=False).count("\n") == 2


def test_a_chat_answer_ends_where_the_template_ends_a_turn(tmp_path: Path) -> None:
    """Also where the model's files name another end token; a completion ends at theirs alone."""
    settings = padded(tmp_path)
    for file, values in (
        ("config.json", {"eos_token_id": 1}),
        ("tokenizer_config.json", {"eos_token": "<|begin|>"}),
    ):
        data = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(data | values))
    _, tokenizer = load_for(settings)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "min_tokens": 2}
    (chat,) = planned(settings, tokenizer, body).requests
    assert (chat.stop_token_ids, chat.sampling.min_tokens_banned) == ((1, 0), (1, 0))
    (plain,) = planned(settings, tokenizer, {"prompt": "Hi"}).requests
    assert plain.stop_token_ids == (1,)
    (endless,) = planned(settings, tokenizer, body | {"ignore_eos": True}).requests
    assert endless.stop_token_ids == ()
