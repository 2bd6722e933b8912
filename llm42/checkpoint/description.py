"""What the service must know of a model without its weights: read in a second, without PyTorch.

`check_model` refuses here, before anything slow begins, what cannot be served.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from llm42.config import ModelSettings
from llm42.errors import ModelFileError, UnsupportedModel
from llm42.models import families, generation
from llm42.models.config import ModelConfig
from llm42.models.files import read_json
from llm42.models.gguf import config as gguf_config
from llm42.models.gguf.reader import contents, open_gguf
from llm42.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def read_config(place: Path) -> ModelConfig:
    """The configuration, from a GGUF file or a directory. Raises ModelFileError, or UnsupportedModel naming
    the field."""
    if not place.exists():
        raise ModelFileError(f"{place}: no such file or directory")
    if not place.is_dir():
        return gguf_config.read_config(place)
    file = place / "config.json"
    config = families.read_config(read_json(file), str(file))
    ends = generation.end_ids(place)
    return config if ends is None else dataclasses.replace(config, eos_token_ids=ends)


def load_tokenizer(model: ModelSettings) -> Tokenizer:
    """The model's tokenizer, with the setting's chat template where there is one. Raises ModelFileError when
    it does not fit the model."""
    config = read_config(Path(model.path))
    return Tokenizer.load(model.path, model.chat_template, config.vocab_size)


def require_context(place: Path, config: ModelConfig, max_model_len: int) -> None:
    """Raises UnsupportedModel for a context that the model's positions do not reach."""
    if max_model_len <= (longest := config.longest_context):
        return
    field = "max_position_embeddings" if place.is_dir() else "context_length"
    scaled = ""
    if config.rope.kind in ("linear", "yarn"):
        scaled = f", with its {config.rope.kind} scaling by {config.rope.factor:g}"
    raise UnsupportedModel(
        f"{place}: model.max_model_len {max_model_len} is beyond the model's {longest} positions ({field}"
        f" {config.max_position}{scaled}): lower model.max_model_len, or describe a rope scaling that reaches"
        " it in the model's files",
        "max_model_len",
    )


def check_model(model: ModelSettings) -> Tokenizer:
    """Reads all of the model's description, and says in the log what is not as its files have it. Raises
    UnsupportedModel or ModelFileError."""
    place = Path(model.path)
    require_context(place, read_config(place), model.max_model_len)
    tokenizer = load_tokenizer(model)
    for note in notes(place, tokenizer):
        log.warning("%s", note)
    return tokenizer


def notes(place: Path, tokenizer: Tokenizer) -> list[str]:
    """What an operator should know of the model's files: an end of turn that they do not name, defaults that
    are not applied."""
    found = []
    for token in tokenizer.turn_end_ids:
        text = tokenizer.token_text(token)
        found.append(
            f"{place}: the chat template ends an answer with {text!r} (id {token}), which is not among the"
            f" end tokens {list(tokenizer.eos_token_ids)} of the model's files: chat answers end there too"
        )
    if ignored := _recommended(place):
        found.append(
            f"{place}: the model's files recommend {ignored}: not applied; a request has OpenAI's defaults"
            " unless it says otherwise"
        )
    return found


def _recommended(place: Path) -> dict[str, Any]:
    """Sampling parameters that the files name, and that are the request's to say."""
    if place.is_dir():
        return generation.defaults_not_applied(place)
    fields = open_gguf(place).fields
    return {
        key: contents(key, field) for key, field in fields.items() if key.startswith(gguf_config.SAMPLING)
    }
