"""Errors of model loading; each message names the file and the field or tensor."""

from __future__ import annotations

from llm42.protocol import LLM42Error


class UnsupportedModel(LLM42Error):
    """The model's mathematics is not (fully) implemented; `field` names the configuration field."""

    code = "unsupported_model"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ModelFileError(LLM42Error):
    """A model file is missing, truncated, or does not hold what its configuration promises."""

    code = "model_file_error"
