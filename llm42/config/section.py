"""What all sections of the tree have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the tree: unknown fields are refused, values do not change. Its docstring and its fields'
    descriptions are the comments in serve_config.yaml, and the descriptions in the chart's schema."""

    model_config = ConfigDict(extra="forbid", frozen=True)


TEST_PLANT = "test plant"
"""In a field's `Annotated`: it breaks something on purpose, and serve_config.yaml does not have it."""
