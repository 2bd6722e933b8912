"""Settings of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llm42.config.section import Section


class ModelSettings(Section):
    """Which model is served, and in which arithmetic."""

    path: str = ".models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A GGUF file or a Hugging Face directory (config.json, safetensors). Relative paths: from the
    directory in which `llm42 serve` is started; on a cluster use absolute ones that exist on every node."""
    name: str = "SmolLM2-135M-Instruct"
    """The model's name in the API; other names get a 404."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Activation dtype: bfloat16, float16 or float32. Weights are rounded to it. On a CPU, products run in
    float32."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda."""
    max_model_len: Annotated[int, Field(ge=16)] = 2048
    """Longest prompt plus output, in tokens."""
    chat_template: str | None = None
    """A Jinja file that is the chat template instead of the model's own, for models that have none (or a
    poor one). null: the model's."""
