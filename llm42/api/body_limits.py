"""What all parts of request bodies have in common: null means the default, and a wrong body costs one error.

Left alone, pydantic reports every error of every element under every form that a field may have: a body of
one megabyte gives a million of them, which are seconds and a gigabyte of an ingress. So lists end at their
first wrong element (`fail_fast`), fields of several forms are held against one of them, and keys are counted
before anything else.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


def about(param: str, message: str) -> PydanticCustomError:
    """An error of the body as a whole that names the field to look at."""
    return PydanticCustomError("value_error", "{text}", {"text": message, "param": param})


def at_most(entries: int) -> BeforeValidator:
    """Refuses an object or a list with more entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and len(value) > entries:
            raise PydanticCustomError("too_long", f"has {len(value)} entries; at most {entries} are taken")
        return value

    return BeforeValidator(check)


def none_for(neutral: Any) -> BeforeValidator:
    """Takes one value of another type for null: what clients send that have nothing to say."""
    return BeforeValidator(lambda v: None if type(v) is type(neutral) and v == neutral else v)


class Part(BaseModel):
    """A JSON object in which null means: the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class ClosedPart(Part):
    """One that refuses fields which it does not know: with one error, however many they are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _all_known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise about(str(name), f"'{name}' is no field that is known here")
        return value
