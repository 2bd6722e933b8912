"""Settings of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llm42.config.section import Section


class ModelSettings(Section):
    """Which model is served, and in which arithmetic."""

    path: str = ".models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """The model: a GGUF file, or a Hugging Face directory (config.json, safetensors). A relative path starts
    at the directory in which `llm42 serve` is run; on a cluster use an absolute path that exists on every
    node."""
    name: str = "SmolLM2-135M-Instruct"
    """The model's name in the API. A request for another name gets a 404."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Activation dtype: bfloat16, float16 or float32. Weights are rounded to it; on a CPU, matrix products
    run in float32. Part of the fingerprint."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the model runs on: cpu or cuda. Defaults that are null follow from it."""
    max_model_len: Annotated[int, Field(ge=16)] = 2048
    """Context: the most tokens that prompt and output of a request may have together. A longer request gets a
    400. Raising it needs more KV cache."""
    chat_template: str | None = None
    """A Jinja file that is used as the chat template, for a model without one or with a poor one. null: the
    model's own."""
