"""Settings of the model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llm42.config.section import Section, or_null

_OF_GGUF = re.compile(r"([.-](i?q\d\w*|b?f16|f32))?\.gguf$", re.IGNORECASE)
"""The end of a GGUF file's name, with the type of its tensors."""


class ModelSettings(Section):
    """Which model is served, and in which arithmetic."""

    path: str = ".models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """The model: a GGUF file, or a Hugging Face directory (config.json, safetensors). A relative path starts
    at the directory in which `llm42 serve` is run; on a cluster use an absolute path that exists on every
    node."""
    name: str = Field("SmolLM2-135M-Instruct", json_schema_extra=or_null)
    """The model's name in the API. A request for another name gets a 404. null: the name of the directory, or
    of the GGUF file without its ending."""
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

    @model_validator(mode="before")
    @classmethod
    def _named_by_path(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name") is not None:
            return data
        path = data.get("path")
        rest = {key: value for key, value in data.items() if key != "name"}
        return rest | {"name": name_of(path)} if isinstance(path, str) else rest


def name_of(path: str) -> str:
    """What a model is called that nobody has named: Qwen3-8B for a directory Qwen3-8B, a file
    Qwen3-8B-Q4_K_M.gguf, or a snapshot in the cache of the Hugging Face Hub."""
    place = Path(os.path.abspath(path))
    owner = place.parent.parent.name
    if place.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.rpartition("--")[2]
    return _OF_GGUF.sub("", place.name) or "model"
