"""Configured step sizes, block sizes and cache sizes decide how fast a verifier is and nothing else; a kept
certificate is used only where its known answers come out."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.fingerprint import digest
from llm42.host.threads import torch_threads
from llm42.models.weights import LoadedModel
from llm42.text.tokenizer import Tokenizer
from llm42.verifier import manifest
from llm42.verifier.build import build_verifier, certificate_for
from llm42.verifier.certify import steps_cpu as step_checks
from llm42.verifier.certify.certificate import CertificationFailed
from llm42.verifier.scheduler import Verifier
from llm42.verifier.sizes import PROVIDER_ROWS, REFERENCE_ROWS
from llm42_kernels import linear_cpu
from tests.support import SAMPLED, answer_of, request_of, sweep, window_of, write_model


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is not what these tests are about, and its long probe takes most of the time."""
    monkeypatch.setattr(step_checks, "PROBE_LENGTHS", (40,))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = str(write_model(tmp_path_factory.mktemp("tiny")))
    return Settings.load(
        {
            "model": {"path": path, "max_model_len": 512},
            "verifier": {"certificate_dir": None, "kv_tokens": 2048, "threads": 1},
        }
    )


@pytest.fixture(scope="module")
def loaded(base: Settings) -> tuple[LoadedModel, Tokenizer]:
    return load_for(base)


def changed(base: Settings, **verifier: Any) -> Settings:
    return base.model_copy(update={"verifier": base.verifier.model_copy(update=verifier)})


def answers(verifier: Verifier) -> list[Any]:
    """What it says to windows that take every size of step: whole, in pieces, with candidates."""
    found = []
    with torch_threads(1):
        for number, length in enumerate((1, 3, 12, 19, 40, 77, 130, 300)):
            request = request_of(f"r{number}", number, length=length, sampling=SAMPLED)
            first = answer_of(verifier, window_of(request, []))
            more = answer_of(verifier, window_of(request, [first.next_token], range(5, 5 + number)))
            found += [(c.accepted, c.next_token, c.logprobs) for c in (first, more)]
    return found


def plant(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """The fastest product gets another last bit in steps of these sizes; else it is one call per row, which
    is row-invariant on every machine. One provider remains behind it: that one."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = linear_cpu.linear_row(x, weight, bias)
        return torch.nextafter(y, y + 1) if x.shape[0] in sizes else y

    monkeypatch.setitem(linear_cpu.CPU_PROVIDERS, "mkl", product)
    monkeypatch.delitem(linear_cpu.CPU_PROVIDERS, "mkl-tile")


LISTS: tuple[tuple[int, ...], ...] = ((5, 64), (1, 20, 200), (REFERENCE_ROWS["cpu"],))


def test_other_lists_same_fingerprint_same_bits(
    base: Settings, loaded: tuple[LoadedModel, Tokenizer]
) -> None:
    found = [build_verifier(changed(base, buckets=sizes), *loaded) for sizes in LISTS]
    assert len({v.fingerprint for v in found}) == 1
    want = answers(found[0])
    assert all(answers(v) == want for v in found[1:])


@pytest.mark.slow
def test_a_size_with_other_bits_is_not_used(
    base: Settings,
    loaded: tuple[LoadedModel, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch, 20)
    verifiers = []
    for sizes, used in (((8, 20, 64), (8, 64)), ((8, 64), (8, 64)), ((20,), (REFERENCE_ROWS["cpu"],))):
        settings = changed(base, buckets=sizes)
        caplog.clear()
        certificate = certificate_for(settings, *loaded)
        assert certificate.buckets == used
        assert certificate.providers["linear"] == "mkl", "a configured size does not choose the arithmetic"
        verifiers.append(build_verifier(settings, *loaded, certificate))
        assert ("steps of 20 rows (verifier.buckets) are not used" in caplog.text) == (20 in sizes)
    assert len({v.fingerprint for v in verifiers}) == 1
    want = answers(verifiers[0])
    assert all(answers(v) == want for v in verifiers[1:])


def test_the_control_a_size_with_other_bits_would_show(
    base: Settings, loaded: tuple[LoadedModel, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plant is there to be found, and the known answers find it when certification has not."""
    plant(monkeypatch, 20)
    settings = changed(base, buckets=(8, 20, 64))
    right = certificate_for(settings, *loaded)
    with pytest.raises(CertificationFailed, match="known answers"):
        build_verifier(settings, *loaded, replace(right, buckets=(8, 20, 64)))


@pytest.mark.slow
def test_the_list_does_not_choose_the_provider(
    base: Settings, loaded: tuple[LoadedModel, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, PROVIDER_ROWS["cpu"][2])
    found = [build_verifier(changed(base, buckets=sizes), *loaded) for sizes in ((24, 64), (7,))]
    assert {v.manifest["providers"]["linear"] for v in found} == {"row"}
    assert len({v.fingerprint for v in found}) == 1


@pytest.mark.parametrize("size", sweep([1, 4, 8], quick=(4,)))
def test_block_and_cache_size_change_no_bit(
    base: Settings, loaded: tuple[LoadedModel, Tokenizer], size: int
) -> None:
    usual = build_verifier(base, *loaded)
    other = build_verifier(changed(base, block_size=size, kv_tokens=1024), *loaded)
    assert other.fingerprint == usual.fingerprint
    assert answers(other) == answers(usual)


def test_what_keys_a_certificate_and_not_the_fingerprint(
    base: Settings, loaded: tuple[LoadedModel, Tokenizer]
) -> None:
    model, tokenizer = loaded

    def both(settings: Settings) -> tuple[str, str]:
        known = manifest.inputs(model, settings, tokenizer.identity)
        return digest(known), manifest.certificate_key(known, settings)

    inputs, key = both(base)
    for change in ({"buckets": (8, 64)}, {"block_size": 8}):
        assert both(changed(base, **change))[0] == inputs
        assert both(changed(base, **change))[1] != key
    named = base.model_copy(update={"model": base.model.model_copy(update={"name": "another"})})
    assert both(named) == both(changed(base, kv_tokens=1024)) == (inputs, key)
    tree = base.model_dump(mode="json") | {"session": {}, "engine": {"kind": "canonical"}}
    alone = Settings.load(tree)
    assert alone.session.mode == "direct"
    assert both(alone) == both(changed(alone, gpu_memory_utilization=0.5)) == (inputs, key)
    assert both(changed(alone, kv_tokens=None)) == (inputs, key), "however much is left"


@pytest.fixture
def kept(base: Settings, tmp_path: Path) -> Settings:
    return changed(base, certificate_dir=str(tmp_path))


def test_known_answers_are_kept_and_come_out_again(
    kept: Settings, loaded: tuple[LoadedModel, Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    first = certificate_for(kept, *loaded)
    again = certificate_for(kept, *loaded)
    assert again.cached
    assert again.golden == first.golden
    assert [len(tokens) for tokens in again.golden.tokens] == [4, 4]
    caplog.set_level(logging.WARNING)
    assert build_verifier(kept, *loaded).manifest["golden"] == first.golden.digest
    assert not caplog.records


def test_a_certificate_of_another_machine_is_made_anew(
    kept: Settings,
    loaded: tuple[LoadedModel, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A library computes other bits, and nothing that the key holds tells."""
    plant(monkeypatch)
    before = build_verifier(kept, *loaded)
    plant_everywhere(monkeypatch)
    after = build_verifier(kept, *loaded)
    assert "certifying anew" in caplog.text
    assert after.manifest["golden"] != before.manifest["golden"]
    assert after.fingerprint != before.fingerprint
    caplog.clear()
    assert build_verifier(kept, *loaded).fingerprint == after.fingerprint
    assert not caplog.records, "the new certificate is kept in place of the old one"


def plant_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = linear_cpu.linear_row(x, weight, bias)
        return torch.nextafter(y, y + 1)

    monkeypatch.setitem(linear_cpu.CPU_PROVIDERS, "mkl", product)


@pytest.mark.parametrize("damage", sweep(["digest", "tokens", "missing"], quick=["digest"]))
def test_a_damaged_certificate_is_made_anew(
    kept: Settings, loaded: tuple[LoadedModel, Tokenizer], damage: str
) -> None:
    certificate = certificate_for(kept, *loaded)
    (file,) = Path(kept.verifier.certificate_dir or "").glob("*.certificate")
    data = json.loads(file.read_text())
    wrong: dict[str, Any] = {"digest": "0" * 16, "tokens": [[1, 1, 1, 1]] * 2}
    if damage == "missing":
        del data["golden"]
    else:
        data["golden"][damage] = wrong[damage]
    file.write_text(json.dumps(data))
    assert build_verifier(kept, *loaded).manifest["golden"] == certificate.golden.digest
    assert json.loads(file.read_text())["golden"]["digest"] == certificate.golden.digest


@pytest.mark.parametrize(
    "damage",
    sweep(
        [
            {"providers": {"linear": "gone"}},
            {"providers": {"attention": 5}},
            {"buckets": ["8"]},
            {"providers": []},
        ],
        quick=[{"providers": {"linear": "gone"}}],
    ),
    ids=str,
)
def test_a_certificate_that_cannot_be_run_is_made_anew(
    kept: Settings,
    loaded: tuple[LoadedModel, Tokenizer],
    damage: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    certificate = certificate_for(kept, *loaded)
    (file,) = Path(kept.verifier.certificate_dir or "").glob("*.certificate")
    data = json.loads(file.read_text())
    for name, value in damage.items():
        data[name] = data[name] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(data))
    verifier = build_verifier(kept, *loaded)
    assert verifier.manifest["providers"] == certificate.providers
    assert "the kept certificate cannot be used" in caplog.text
    caplog.clear()
    assert build_verifier(kept, *loaded).fingerprint == verifier.fingerprint
    assert not caplog.records, "it is healed"
    if damage == {"providers": {"linear": "gone"}}:  # one that is not kept has no second try
        broken = replace(certificate, providers=certificate.providers | {"linear": "gone"}, cached=False)
        with pytest.raises(KeyError):
            build_verifier(kept, *loaded, broken)


def test_sizes_are_reference_last() -> None:
    for kind, sizes in PROVIDER_ROWS.items():
        assert sizes[-1] == REFERENCE_ROWS[kind]
        assert list(sizes) == sorted(set(sizes))


def test_all_sizes_over_which_providers_are_chosen_are_used() -> None:
    """By default; and a CPU, where certification takes longer, has no others."""

    def configured(device: str) -> Sequence[int]:
        return Settings.load({"model": {"device": device}}).verifier.buckets

    for kind, sizes in PROVIDER_ROWS.items():
        assert set(sizes) <= set(configured(kind))
    assert set(configured("cpu")) == set(PROVIDER_ROWS["cpu"])
