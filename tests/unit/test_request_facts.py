"""What the request side contributes: each fact changes the fingerprint, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm42 import fingerprint as fp
from llm42.checkpoint.description import load_tokenizer
from llm42.checkpoint.load import sampled_identity
from llm42.config import Settings
from llm42.fingerprint import request
from llm42.text.tokenizer import Tokenizer
from llm42_serve.verifiers.names import verifier_names
from tests.support import Lab, write_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    found = write_model(tmp_path_factory.mktemp("facts") / "model")
    (found / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return found


def settings_of(place: Path, **model: Any) -> Settings:
    return Settings.load({"model": {"path": str(place), "max_model_len": 256, **model}})


def facts_of(place: Path, **model: Any) -> dict[str, Any]:
    return request.request_facts(settings_of(place, **model), Tokenizer.load(place))


def edited(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        file = place / name
        file.write_text(change(file.read_text() if file.exists() else ""))

    return edit


def without_a_merge(text: str) -> str:
    tree = json.loads(text)
    tree["model"]["merges"].pop()
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ("chat_template", edited("chat_template.jinja", lambda text: text + "!")),
        ("tokenizer", edited("tokenizer.json", without_a_merge)),
        ("end_of_text", edited("generation_config.json", lambda _: '{"eos_token_id": [5, 7]}')),
        ("tokenizer", edited("tokenizer_config.json", lambda text: text.replace("bos", "unk", 1))),
    ],
)
def test_the_files(place: Path, tmp_path: Path, field: str, edit: Callable[[Path], None]) -> None:
    other = Path(shutil.copytree(place, tmp_path / "other"))
    assert facts_of(other) == facts_of(place), "not the place"
    edit(other)
    assert list(fp.differing_fields(facts_of(place), facts_of(other))) == [field]


def test_a_template_of_the_operators_own(place: Path, tmp_path: Path) -> None:
    """It lies beside the model, where no other hash of files sees it."""
    own, seen, names = tmp_path / "own.jinja", list[dict[str, Any]](), set[str]()
    for text in ("{{ messages[0].content }}", "{{ messages[0].content }}!"):
        own.write_text(text)
        settings = settings_of(place, chat_template=str(own))
        seen.append(request.request_facts(settings, load_tokenizer(settings.model)))
        names.add(verifier_names(settings, "model", 1)[0])
    assert list(fp.differing_fields(*seen)) == ["chat_template"]
    assert len(names) == 2, "the new template has verifiers of its own"


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        *((f"libraries.{name}", "installed_version", name) for name in request.LIBRARIES),
        ("code", "code_hash", None),
        ("unicode", "unicodedata", None),
        ("python", "platform", None),
    ],
)
def test_the_process(
    place: Path, monkeypatch: pytest.MonkeyPatch, field: str, name: str, value: str | None
) -> None:
    before, real = facts_of(place), request.installed_version
    old_names = verifier_names(settings_of(place), "model", 1)

    class Other:
        """Stands for a module of Python's library."""

        unidata_version = "1.1"

        def __getattr__(self, name: str) -> Callable[[], Any]:
            return lambda: {"libc_ver": (before["libc"], "")}.get(name, "other")

    fakes: dict[str, Any] = {"installed_version": lambda n: "0.0.0" if n == value else real(n)}
    fakes |= {"code_hash": lambda: "other", "unicodedata": Other(), "platform": Other()}
    monkeypatch.setattr(request, name, fakes[name])
    assert list(fp.differing_fields(before, facts_of(place))) == [field]
    assert verifier_names(settings_of(place), "model", 1) != old_names, (
        "a new release has verifiers of its own"
    )


def test_the_settings(place: Path) -> None:
    settings, tokenizer = settings_of(place), Tokenizer.load(place)
    before = request.request_facts(settings, tokenizer)
    shorter = settings_of(place, max_model_len=128)
    assert list(fp.differing_fields(before, request.request_facts(shorter, tokenizer))) == ["max_model_len"]
    assert verifier_names(shorter, "model", 1) != verifier_names(settings, "model", 1)
    for section, update in (
        ("model", {"name": "alias"}),
        ("server", {"port": 9999, "max_queued": 7, "default_seed": 7}),
        ("telemetry", {"log_prompts": True}),
    ):
        other = settings.model_copy(update={section: getattr(settings, section).model_copy(update=update)})
        assert request.request_facts(other, tokenizer) == before, section


def test_the_manifest_has_them(tiny: Lab) -> None:
    """So the fingerprint names them."""
    from llm42.verifier.build import build_verifier

    verifier = build_verifier(tiny.settings, tiny.model, tiny.tokenizer, tiny.certificate)
    assert verifier.manifest["request"] == request.request_facts(tiny.settings, tiny.tokenizer)
    assert verifier.fingerprint == fp.fingerprint(verifier.manifest)
    other = {**verifier.manifest, "request": {**verifier.manifest["request"], "code": "another"}}
    assert fp.fingerprint(other) != verifier.fingerprint
    assert json.loads(json.dumps(other)) == other, "it is served as JSON"


def test_all_of_a_large_tokenizer_counts(place: Path, tmp_path: Path) -> None:
    """An edit of equal length in the middle of a tokenizer.json of four megabytes; weights are sampled."""
    other = Path(shutil.copytree(place, tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    seen = set()
    for letter in " \n":
        padded = text.rstrip()[:-1] + " " * (1 << 20) + letter + " " * (3 << 20) + "}"
        (other / "tokenizer.json").write_text(padded)
        seen.add(sampled_identity(other))
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_all_of_a_gguf_files_metadata_counts(tmp_path: Path, name: str) -> None:
    file, size, seen = tmp_path / name, 8 << 20, set()
    for letter in (b"a", b"b"):
        with file.open("wb") as stream:
            stream.truncate(size)
            stream.seek(size // 2 - (1 << 20))
            stream.write(letter)
        seen.add(sampled_identity(file))
    assert len(seen) == 2
