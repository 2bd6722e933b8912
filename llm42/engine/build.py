"""From settings to a running fast path."""

from __future__ import annotations

from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.models.weights import LoadedModel
from llm42_kernels.operators import Operators


def build_engine(
    settings: Settings, model: LoadedModel | None = None, operators: Operators | None = None
) -> Engine:
    """The engine that `engine.kind` names, started. Raises LLM42Error.

    model: weights that this process holds already; vLLM loads its own, in a process of its own. operators:
    the torch engine's, where they are not the device's ordinary ones.
    """
    if settings.engine.kind == "vllm":
        from llm42.engine.vllm.engine import VllmEngine

        return VllmEngine(settings).start()
    from llm42.engine.torch.engine import TorchEngine

    if model is None:
        from llm42.checkpoint.load import load_for

        model, _ = load_for(settings)
    return TorchEngine(model, settings.engine, operators).start()
