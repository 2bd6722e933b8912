"""Certification of a real model: it passes, and every plant is caught under its operator's name."""

from __future__ import annotations

import pytest

from llm42.models.weights import LoadedModel
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.certify.cpu import CPUCertifier
from llm42.verifier.certify.plants_cpu import PLANTS
from llm42.verifier.certify.rows import OperatorCase, Violation
from llm42_kernels import cpu
from tests.support import Lab, smollm2_settings


@pytest.mark.slow
def test_it_passes(smollm2: Lab) -> None:
    """The certificate is of this run, by this process or by one beside it (tests/support/smollm2.py)."""
    certificate = smollm2.certificate
    assert set(certificate.providers) == {*cpu.PROVIDERS, "attention", "sampling"}
    assert certificate.compared_rows > 1000
    assert certificate.buckets[-1] == smollm2.settings.verifier.buckets[-1]


class OnlyThePlanted(CPUCertifier):
    """Without the checks of other operators, which take most of the time: a plant leaves those operators as
    they were when test_it_passes ran their checks."""

    @property
    def planted(self) -> str:
        return PLANTS[self.plants[0]].operator

    def cases(self, operator: str, provider: str) -> list[OperatorCase]:
        return super().cases(operator, provider) if operator == self.planted else []

    def check_attention(self) -> Violation | None:
        return super().check_attention() if self.planted == "attention" else None


QUICK = "row-residue"
"""Caught by the first check of the first operator."""


@pytest.mark.parametrize(
    "plant", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in sorted(PLANTS)]
)
def test_every_plant_is_caught(plant: str, smollm2_parts: tuple[LoadedModel, Tokenizer]) -> None:
    with pytest.raises(CertificationFailed) as caught:
        OnlyThePlanted(smollm2_parts[0], smollm2_settings().verifier, [plant]).run()
    assert caught.value.operator == PLANTS[plant].operator
