"""Certification passes on this machine, every plant is caught under its operator's name, and providers
fall back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from llm42 import fingerprint as fp
from llm42.checkpoint.load import load_for, load_model, sampled_identity
from llm42.cli.main import app
from llm42.config import Settings
from llm42.fingerprint import device, digest, libraries
from llm42.models.weights import LoadedModel
from llm42.protocol import Commit, Failure, SamplingParams, Window
from llm42.text.tokenizer import Tokenizer
from llm42.verifier import manifest
from llm42.verifier.build import build_verifier, certificate_for
from llm42.verifier.certify.certificate import (
    Certificate,
    CertificationFailed,
    load_certificate,
    save_certificate,
)
from llm42.verifier.certify.cpu import CPUCertifier
from llm42.verifier.certify.plants import broken
from llm42.verifier.certify.plants_cpu import PLANTS
from llm42.verifier.certify.rows import OperatorCase, Tally, check_rows, same_bits
from llm42.verifier.sizes import PROVIDER_ROWS
from llm42_kernels import attention_cpu, cpu, linear_cpu
from tests.support import Lab, write_model
from tests.unit.model_oracle import save_tiny

CAUGHT_AS = {
    "row-position": "linear",
    "row-count": "linear",
    "row-residue": "linear",
    "one-ulp": "rms_norm",
    "attention-split": "attention",
    "attention-tile": "attention",
    "dirty-tail": "attention",
    "topp-scan": "sampling",
}


@pytest.fixture(scope="module")
def settings(tiny: Lab, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    directory = str(tmp_path_factory.mktemp("certificates"))
    model = {"path": tiny.settings.model.path, "max_model_len": 768}
    return Settings.load({"model": model, "verifier": {"certificate_dir": directory, "buckets": (8, 16, 64)}})


@pytest.fixture(scope="module")
def loaded(settings: Settings) -> tuple[LoadedModel, Tokenizer]:
    return load_for(settings)


@pytest.fixture(scope="module")
def certificate(settings: Settings, loaded: tuple[LoadedModel, Tokenizer]) -> Certificate:
    return certificate_for(settings, *loaded)


def test_this_machine_passes(certificate: Certificate) -> None:
    assert set(certificate.providers) == {*cpu.PROVIDERS, "attention", "sampling"}
    assert certificate.compared_rows > 1000
    assert certificate.buckets[-1] == 64


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_every_plant_is_caught(plant: str, settings: Settings, loaded: tuple[LoadedModel, Tokenizer]) -> None:
    with pytest.raises(CertificationFailed) as caught:
        CPUCertifier(loaded[0], settings.verifier, [plant]).run()
    assert caught.value.operator == CAUGHT_AS[plant]


def test_the_certificate_is_kept_by_its_inputs(
    settings: Settings, loaded: tuple[LoadedModel, Tokenizer], certificate: Certificate
) -> None:
    again = certificate_for(settings, *loaded)
    assert again.cached
    assert replace(again, cached=False) == certificate
    kept = Path(settings.verifier.certificate_dir or "") / f"{certificate.key}.certificate"
    kept.write_text("not json")
    assert not certificate_for(settings, *loaded).cached


def test_a_folder_that_cannot_be_written_does_not_fail_the_verifier(
    certificate: Certificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    save_certificate(str(tmp_path / "file"), certificate)
    assert "could not be kept" in caplog.text


def test_a_planted_run_is_never_kept(settings: Settings, loaded: tuple[LoadedModel, Tokenizer]) -> None:
    with pytest.raises(CertificationFailed):
        certificate_for(settings, *loaded, plants=["one-ulp"])
    directory = Path(settings.verifier.certificate_dir or "")
    assert all(not json.loads(f.read_text())["plants"] for f in directory.glob("*.certificate"))


def _depends_on_the_step(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Row by row, but for another last bit in steps of 8 rows."""
    y = linear_cpu.linear_row(x, weight, bias)
    return y if x.shape[0] != 8 else torch.nextafter(y, y + 1)


@pytest.fixture
def by_row(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Products whose rows cannot depend on each other on any machine, whatever its library does; the table of
    the linear operator's providers, to be changed."""
    monkeypatch.setitem(cpu.PROVIDERS, "lm_head", {"row": linear_cpu.lm_head_row})
    table = {"row": linear_cpu.linear_row}
    monkeypatch.setitem(cpu.PROVIDERS, "linear", table)
    return table


def test_the_next_provider_is_used(
    by_row: dict[str, Any], settings: Settings, loaded: tuple[LoadedModel, Tokenizer]
) -> None:
    right = by_row.pop("row")
    by_row |= {"broken": _depends_on_the_step, "row": right}
    certificate = CPUCertifier(loaded[0], settings.verifier).run()
    assert certificate.providers["linear"] == "row"
    failed = [r for r in certificate.reports if not r.passed]
    assert [(r.operator, r.provider) for r in failed] == [("linear", "broken")]
    assert certificate.buckets == (8, 16, 64), "the next one is right at every step size"


def test_small_steps_are_dropped_when_only_large_ones_agree(
    by_row: dict[str, Any], settings: Settings, loaded: tuple[LoadedModel, Tokenizer]
) -> None:
    by_row.clear()
    by_row["broken"] = _depends_on_the_step
    certificate = CPUCertifier(loaded[0], settings.verifier).run()
    assert certificate.providers["linear"] == "broken"
    assert certificate.buckets == (16, 64)
    found = [r.buckets for r in certificate.reports if r.provider == "broken"]
    assert found == [(), tuple(rows for rows in PROVIDER_ROWS["cpu"] if rows != 8)]


class KeepsSizes(CPUCertifier):
    """A device on which every provider must pass at every size, as on a GPU."""

    drops_sizes = False


def test_where_no_size_may_be_dropped_the_operator_fails(
    by_row: dict[str, Any], settings: Settings, loaded: tuple[LoadedModel, Tokenizer]
) -> None:
    """The control is the test above: where sizes may be dropped the same operators pass."""
    right = by_row.pop("row")
    by_row["broken"] = _depends_on_the_step
    with pytest.raises(CertificationFailed, match="broken: linear: step size"):
        KeepsSizes(loaded[0], settings.verifier).run()
    by_row["row"] = right
    certificate = KeepsSizes(loaded[0], settings.verifier).run()
    assert certificate.providers["linear"] == "row"
    assert [(r.provider, r.passed) for r in certificate.reports[:2]] == [("broken", False), ("row", True)]
    assert certificate.buckets == settings.verifier.buckets


def test_nan_and_minus_zero_count_as_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)


def test_a_row_operator_that_mixes_rows_is_caught() -> None:
    def mean_shift(x: Tensor) -> tuple[Tensor]:
        return (x + 0.0 * x.mean(),)

    case = OperatorCase("op", "test", lambda n, g: (torch.randn(n, 8, generator=g),), mean_shift)
    good, violation = check_rows(case, [4, 8], Tally())
    assert good == []
    assert violation is not None
    assert "NaN" in violation.detail  # 0 * finite is invisible; 0 * NaN is not


def test_the_command_names_the_operator(settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(json.dumps(settings.model_dump(mode="json")))
    result = CliRunner().invoke(app, ["certify", "--config", str(config), "--json", "--plant", "row-count"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["operator"] == "linear"
    assert CliRunner().invoke(app, ["certify", "--config", str(config), "--plant", "nope"]).exit_code == 2


def test_the_command_passes_without_plants(settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(json.dumps(settings.model_dump(mode="json")))
    result = CliRunner().invoke(app, ["certify", "--config", str(config), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["passed"] is True


class TestFingerprint:
    """Each component changes it, and nothing else does."""

    def test_it_is_stable(self, settings: Settings, loaded: tuple[LoadedModel, Tokenizer]) -> None:
        model, tokenizer = loaded
        first = manifest.inputs(model, settings, tokenizer.identity)
        assert digest(first) == digest(manifest.inputs(model, settings, tokenizer.identity))

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("model", lambda m: replace(m, identity="other weights")),
            ("dequantiser", lambda m: replace(m, dequantiser="other")),
            ("dtype", lambda m: replace(m, dtype=torch.float32)),
            ("architecture", lambda m: replace(m, config=replace(m.config, architecture="other"))),
        ],
    )
    def test_the_model(
        self, settings: Settings, loaded: tuple[LoadedModel, Tokenizer], field: str, change: object
    ) -> None:
        model, tokenizer = loaded
        before = manifest.inputs(model, settings, tokenizer.identity)
        after = manifest.inputs(change(model), settings, tokenizer.identity)  # type: ignore[operator]
        assert list(fp.differing_fields(before, after)) == [field]
        assert digest(before) != digest(after)

    @pytest.mark.parametrize(
        ("field", "section", "value"),
        [
            ("device.threads", "verifier", {"threads": 1 + Settings().verifier.threads % 2}),
            ("max_model_len", "model", {"max_model_len": 512}),
        ],
    )
    def test_the_settings(
        self,
        settings: Settings,
        loaded: tuple[LoadedModel, Tokenizer],
        field: str,
        section: str,
        value: dict[str, object],
    ) -> None:
        model, tokenizer = loaded
        changed = settings.model_copy(update={section: getattr(settings, section).model_copy(update=value)})
        before = manifest.inputs(model, settings, tokenizer.identity)
        after = manifest.inputs(model, changed, tokenizer.identity)
        assert list(fp.differing_fields(before, after)) == [field]
        assert digest(before) != digest(after)

    @pytest.mark.parametrize(
        "value", [{"mode": "direct"}, {"mode": "direct", "credit": 1}, {"commit_interval_s": 1.0}], ids=str
    )
    def test_the_way_to_a_commit_is_not_in_it(
        self, settings: Settings, loaded: tuple[LoadedModel, Tokenizer], value: dict[str, object]
    ) -> None:
        """Nor in what a certificate is kept under: either way needs no other one."""
        model, tokenizer = loaded
        tree = settings.model_dump(mode="json")
        changed = Settings.load(tree | {"session": tree["session"] | value})
        assert changed.session != settings.session
        before, after = (manifest.inputs(model, s, tokenizer.identity) for s in (settings, changed))
        assert before == after
        keys = (manifest.certificate_key(before, settings), manifest.certificate_key(after, changed))
        assert keys[0] == keys[1]

    def test_tokenizer_environment_libraries_code_device(
        self, settings: Settings, loaded: tuple[LoadedModel, Tokenizer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, tokenizer = loaded
        before = manifest.inputs(model, settings, tokenizer.identity)
        assert list(fp.differing_fields(before, manifest.inputs(model, settings, "x"))) == ["tokenizer"]
        with monkeypatch.context() as m:
            m.setenv("MKL_CBWR", "not what it is")
            after = manifest.inputs(model, settings, tokenizer.identity)
            assert list(fp.differing_fields(before, after)) == ["environment.MKL_CBWR"]
        for module, name, field in (
            (manifest, "code_hash", "code"),
            (device, "_cpu_name", "device.name"),
            (device, "cpu_identity", "device.identity"),
            (libraries, "installed_version", "libraries."),
        ):
            with monkeypatch.context() as m:
                m.setattr(module, name, lambda *_: "changed")
                after = manifest.inputs(model, settings, tokenizer.identity)
                assert all(f.startswith(field) for f in fp.differing_fields(before, after))
                assert digest(before) != digest(after)
        monkeypatch.setattr(manifest, "SCHEDULE_VERSION", 99)
        after = manifest.inputs(model, settings, tokenizer.identity)
        assert list(fp.differing_fields(before, after)) == ["schedule"]

    def test_the_outcome(self, certificate: Certificate) -> None:
        known = {"model": "x"}
        full = manifest.complete(known, certificate.providers, "g")
        other = manifest.complete(known, {**certificate.providers, "linear": "other"}, "g")
        changed = manifest.complete(known, certificate.providers, "h")
        assert len({fp.fingerprint(m) for m in (full, other, changed)}) == 3


@pytest.fixture(scope="module")
def normed_heads(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small random Qwen3: its heads have norms of their own."""
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny(directory, "qwen3")
    return load_model(directory, "bfloat16", "cpu", 200)


def _breaks_rows(wanted: Callable[[Tensor], bool], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with an error in the last row, for the inputs that `wanted` picks."""

    def broken(x: Tensor, *rest: Any) -> Any:
        first, second = run(x, *rest)
        if wanted(x):
            first = first.clone()
            first[-1, ..., 0] += 1.0
        return first, second

    return broken


@pytest.mark.parametrize(
    ("operator", "case", "wanted"),
    [
        ("rms_norm", "heads of k", lambda x, c: x.dim() == 3 and x.shape[1] == c.num_kv_heads),
        pytest.param(
            *("rms_norm", "heads of q", lambda x, c: x.dim() == 3 and x.shape[1] == c.num_heads),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("rotary", "views of the product", lambda x, c: not x.is_contiguous()), marks=pytest.mark.slow
        ),
    ],
)
def test_every_form_in_which_the_decoder_calls_an_operator_is_checked(
    operator: str,
    case: str,
    wanted: Callable[[Tensor, Any], bool],
    normed_heads: LoadedModel,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator that is wrong in one form only: certification without that form would pass."""
    table, config = cpu.PROVIDERS[operator], normed_heads.config
    for name, run in list(table.items()):
        monkeypatch.setitem(table, name, _breaks_rows(lambda x: wanted(x, config), run))
    with pytest.raises(CertificationFailed) as caught:
        CPUCertifier(normed_heads, settings.verifier).run()
    assert caught.value.operator == operator, case


def test_the_first_norm_without_residual_is_checked(
    normed_heads: LoadedModel, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cpu.PROVIDERS["rms_norm"]
    for name, run in list(table.items()):

        def broken(x: Tensor, residual: Tensor | None, *rest: Any, run: Any = run) -> Any:
            wide = residual is None and x.dim() == 2
            return _breaks_rows(lambda _: wide, run)(x, residual, *rest)

        monkeypatch.setitem(table, name, broken)
    with pytest.raises(CertificationFailed, match="rms_norm"):
        CPUCertifier(normed_heads, settings.verifier).run()


def test_attention_is_checked_beyond_short_contexts(
    loaded: tuple[LoadedModel, Tokenizer], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split of long contexts that depends on companions is caught, though short ones are right."""
    right = attention_cpu.CPU_PROVIDERS["tiled"]
    split = broken(PLANTS, ["attention-split"], "attention", right)

    def run(q: Tensor, k: Tensor, v: Tensor, groups: Any, scale: float) -> Tensor:
        long = max(g.start + g.count for g in groups) > 600
        return (split if long else right)(q, k, v, groups, scale)

    monkeypatch.setitem(attention_cpu.CPU_PROVIDERS, "tiled", run)
    with pytest.raises(CertificationFailed, match="attention"):
        CPUCertifier(loaded[0], settings.verifier).run()


@pytest.mark.parametrize("positions", [16, 80])
def test_short_contexts_are_certified_and_verified(tmp_path: Path, positions: int) -> None:
    """Probes are longer than such a model's table of positions, unless they are cut to it."""
    model = {"path": str(write_model(tmp_path)), "max_model_len": positions}
    settings = Settings.load({"model": model, "verifier": {"certificate_dir": None, "kv_tokens": 512}})
    verifier = build_verifier(settings)
    call = verifier.submit(Window("w", (1, 2), 2, tuple(range(3, positions + 1)), SamplingParams()))
    while not call.done():
        verifier.step()
    assert isinstance(call.result(), Commit)
    beyond = verifier.submit(Window("w", (1, 2), 2, tuple(range(3, positions + 2)), SamplingParams()))
    assert isinstance(beyond.result(timeout=0), Failure)


def test_a_certificate_beside_the_model_is_no_part_of_it(tmp_path: Path) -> None:
    """Actors are named by the model's files: one that is written when they are up must not rename them."""
    path = write_model(tmp_path)
    before = sampled_identity(path)
    save_certificate(str(path), Certificate({}, (8,), [], 0, 0.0, False, key="key"))
    assert load_certificate(str(path), "key") is not None
    assert sampled_identity(path) == before
    (path / "added.json").write_text("{}")
    assert sampled_identity(path) != before, "the control"
