"""From settings to a running fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm42.config import EngineSettings, Settings
from llm42.engine.base import Engine
from llm42.engine.corrupt import CorruptingEngine
from llm42.engine.none import NoEngine

if TYPE_CHECKING:  # who only asks for the library does not load PyTorch
    from llm42.models.weights import LoadedModel
    from llm42_kernels.operators import Operators


def require_library(settings: EngineSettings) -> None:
    """Raises EngineUnavailable where the engine that `engine.kind` names is not installed."""
    if settings.kind == "vllm":
        from llm42.engine.vllm.options import require_vllm

        require_vllm()


def build_engine(
    settings: Settings, model: LoadedModel | None = None, operators: Operators | None = None
) -> Engine:
    """The engine that `engine.kind` names, started; with `engine.corrupt_share` inside the test plant. Raises
    LLM42Error.

    model: weights that this process holds already; vLLM loads its own, in a process of its own. operators:
    the torch engine's, where they are not the device's ordinary ones.
    """
    if not settings.engine.decodes:
        return NoEngine()
    if settings.engine.kind == "vllm":
        from llm42.engine.vllm.engine import VllmEngine

        engine: Engine = VllmEngine(settings).start()
    else:
        from llm42.engine.torch.engine import TorchEngine

        if model is None:
            from llm42.checkpoint.load import load_for

            model, _ = load_for(settings)
        engine = TorchEngine(model, settings.engine, operators).start()
    share = settings.engine.corrupt_share
    return CorruptingEngine(engine, share) if share else engine
