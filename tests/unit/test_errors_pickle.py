"""Every typed error crosses processes as itself: with its message and its fields."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from ray.exceptions import RayTaskError

import llm42
import llm42_serve
from llm42.api.errors import ModelNotFound
from llm42.errors import LLM42Error, RequestRejected, UnsupportedModel
from llm42.verifier.certify.certificate import CertificationFailed


def modules() -> Iterator[ModuleType]:
    """All of both packages; what needs a library that is not here is imported where it is."""
    for package in (llm42, llm42_serve):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                try:
                    yield importlib.import_module(found.name)
                except ModuleNotFoundError as error:
                    if (error.name or "").partition(".")[0] not in ("vllm", "triton"):
                        raise


def kinds() -> list[type[Exception]]:
    """Every exception class that is defined there."""
    found: dict[type[Exception], None] = {}
    for module in modules():
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Exception)
                and value.__module__ == module.__name__
            ):
                found[value] = None
    return list(found)


KINDS = kinds()


def made(kind: type[Exception]) -> Exception:
    """One of a kind, with a word of its own for each argument."""
    if kind.__init__ is Exception.__init__ or kind.__init__ is RuntimeError.__init__:
        return kind("what is wrong")
    parameters = list(inspect.signature(kind).parameters.values())
    values: dict[str, Any] = {
        p.name: ["one", "two"] if "list" in str(p.annotation) else f"a {p.name}" for p in parameters
    }
    return kind(**values)


def told(error: BaseException) -> tuple[Any, ...]:
    """All that is known of an error."""
    return type(error), str(error), error.args, vars(error), getattr(error, "code", None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_round_trip_loses_nothing(kind: type[Exception], protocol: int) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert told(again) == told(error)
    assert told(pickle.loads(pickle.dumps(again, protocol))) == told(error), "nor does a second one"


def test_the_search_finds_them() -> None:
    """Those whose constructors take something else than a message, at least, and every kind of LLM42Error."""
    wanted = {LLM42Error, RequestRejected, UnsupportedModel, CertificationFailed, ModelNotFound}
    assert wanted <= set(KINDS)
    assert len([k for k in KINDS if issubclass(k, LLM42Error)]) > 20
    assert any(vars(made(k)) for k in KINDS)


def test_what_is_set_later_goes_along() -> None:
    error = RequestRejected("wrong", "prompt")
    error.code = "context_length_exceeded"
    again = pickle.loads(pickle.dumps(error))
    assert (again.param, again.code, str(again)) == ("prompt", "context_length_exceeded", "wrong")


def test_ray_hands_a_constructors_error_on_as_itself() -> None:
    """The form in which Ray and Serve carry what a replica's constructor has raised: in bytes."""
    error = UnsupportedModel("sliding_window is not supported", "sliding_window")
    carried = RayTaskError.from_bytes(RayTaskError("Ingress.__init__", "its traceback", error).to_bytes())
    assert isinstance(carried, RayTaskError)
    assert told(carried.cause) == told(error)
    raised = carried.as_instanceof_cause()
    assert isinstance(raised, UnsupportedModel)
    assert raised.field == "sliding_window"


class Careless(Exception):
    """As an error would be without care."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def test_control_two_arguments_are_too_many_for_pickle() -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Careless("wrong", "field")))
