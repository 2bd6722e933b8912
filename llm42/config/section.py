"""What all sections of the tree have in common."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A part of the tree: unknown fields are refused, values do not change. Its docstring and those of
    its fields are the comments in serve_config.yaml, and the descriptions in the chart's schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1, and YAML reads `yes` and `on` as true."""
        wanted = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (wanted, *get_args(wanted)):
            raise ValueError(
                "true and false are no values for it (YAML reads yes, no, on and off as these: use quotes)"
            )
        return value


TEST_PLANT = "test plant"
"""In a field's `Annotated`: it breaks something on purpose, and serve_config.yaml does not have it."""


def or_null(schema: dict[str, Any]) -> None:
    """The schema of a field whose null `Settings` replaces."""
    alone = {key: schema.pop(key) for key in set(schema) - {"title", "description", "default"}}
    schema["anyOf"] = [alone, {"type": "null"}]
