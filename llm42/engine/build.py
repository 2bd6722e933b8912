"""From settings to a running fast path."""

from __future__ import annotations

from pathlib import Path

from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.models.errors import ModelFileError
from llm42.models.load import read_config
from llm42.models.weights import LoadedModel
from llm42.tokenizer import Tokenizer
from llm42_kernels.operators import Operators


def build_engine(
    settings: Settings, model: LoadedModel | None = None, operators: Operators | None = None
) -> Engine:
    """The engine that `engine.kind` names, started. Raises LLM42Error.

    model: weights that this process holds already; vLLM loads its own, in a process of its own. operators:
    the torch engine's, where they are not the device's ordinary ones.
    """
    if settings.engine.kind == "vllm":
        from llm42.engine.vllm import VllmEngine

        return VllmEngine(settings).start()
    from llm42.engine.torch_engine import TorchEngine

    if model is None:
        from llm42.verifier.build import load_for

        model, _ = load_for(settings)
    return TorchEngine(model, settings.engine, operators).start()


def load_tokenizer(settings: Settings) -> Tokenizer:
    """The model's tokenizer, without its weights. Raises ModelFileError when the two do not fit together."""
    path = settings.model.path
    tokenizer, vocab_size = Tokenizer.load(path), read_config(Path(path)).vocab_size
    if tokenizer.vocab_size > vocab_size:
        sizes = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}"
        raise ModelFileError(f"{path}: {sizes}")
    return tokenizer
