"""What all sections of the tree have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A part of the tree: unknown fields are refused, values do not change. Its docstring and those of
    its fields are the comments in serve_config.yaml, and the descriptions in the chart's schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


TEST_PLANT = "test plant"
"""In a field's `Annotated`: it breaks something on purpose, and serve_config.yaml does not have it."""
