"""For all tests: Ray's switches are set before anything imports ray, which reads some of them only once."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings as hypothesis_settings

from llm42.config import Settings, VerifierSettings
from llm42.config.serve_file import absolute
from llm42_serve.launch import Service, prepare_environment

prepare_environment()

from llm42.checkpoint.load import load_for  # noqa: E402
from llm42.models.weights import LoadedModel  # noqa: E402
from llm42.text.tokenizer import Tokenizer  # noqa: E402
from tests.support import Awake, Lab, certified_smollm2, smollm2_settings  # noqa: E402

# The same examples each time, so that a change is judged by what it changed.
# HYPOTHESIS_PROFILE=default explores.
hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def _verifier_threads(count: int) -> None:
    """Settings that say nothing of it get verifiers with so many threads (tests/isa.py)."""
    VerifierSettings.model_fields["threads"].default = count
    VerifierSettings.model_rebuild(force=True)
    Settings.model_fields["verifier"].default = VerifierSettings()
    Settings.model_rebuild(force=True)
    assert Settings().verifier.threads == Settings.load({"verifier": {}}).verifier.threads == count


if "LLM42_TEST_THREADS" in os.environ:
    _verifier_threads(int(os.environ["LLM42_TEST_THREADS"]))


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of limits in seconds: none is over because this process got no CPU for a while."""
    clock = Awake()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", clock.monotonic)
        yield
    clock.close()


@pytest.fixture
def shipped_defaults() -> Iterator[None]:
    """For tests of the defaults themselves: as they are without tests/isa.py."""
    count = VerifierSettings.model_fields["threads"].default
    _verifier_threads(1)
    yield
    _verifier_threads(count)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses the cluster is marked so: the marker decides in which process a test runs."""
    for item in items:
        if "cluster_settings" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.service)


class _RealModelLast:
    """The tests of the service on SmolLM2 come last, so that it is deployed once."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: _served(item) == "smollm2")


def _served(item: pytest.Item) -> object:
    call = getattr(item, "callspec", None)
    return call.params.get("served_name") if call is not None else None


def pytest_configure(config: pytest.Config) -> None:
    """A hook that comes after pytest's own order."""
    config.pluginmanager.register(_RealModelLast())


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on. Not one that the kernel gives to whoever asks for any:
    Ray's processes do, before the service listens on it."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among a hundred")


SERVED = {
    "engine": {"threads": 1, "corrupt_share": 0.05},
    "session": {"mode": "verify"},
    "server": {"fastpath_replicas": 2, "max_queued": 64},
}
"""How tests serve a model: replicas make 5 % of their candidates wrong, so that every run has rollbacks to
survive. session.mode auto would choose by times, which are a machine's own."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One tiny model, certified once: for whatever needs an engine and a verifier together."""
    return Lab.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lab(tiny: Lab) -> Iterator[Lab]:
    """The tiny model's lab; whatever a test starts is closed after it."""
    yield tiny
    tiny.close()


@pytest.fixture(scope="session")
def smollm2_parts() -> tuple[LoadedModel, Tokenizer]:
    """The real model and its tokenizer, loaded once."""
    return load_for(smollm2_settings())


@pytest.fixture(scope="session")
def smollm2(smollm2_parts: tuple[LoadedModel, Tokenizer]) -> Iterator[Lab]:
    """The same with its certificate."""
    lab = certified_smollm2(*smollm2_parts)
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def cluster_settings(tiny: Lab) -> Settings:
    """The tiny model, with longer contexts."""
    tree = {
        "model": {"path": tiny.settings.model.path, "name": "tiny", "max_model_len": 4096},
        "engine": SERVED["engine"],
        "verifier": {"certificate_dir": tiny.settings.verifier.certificate_dir},
        "session": SERVED["session"],
        "server": SERVED["server"] | {"port": free_port()},
    }
    return absolute(Settings.load(tree))


@pytest.fixture(scope="session")
def service(cluster_settings: Settings) -> Iterator[Service]:
    """The one Ray cluster of the session: the service as `llm42 serve` starts it, certified."""
    with Service(cluster_settings) as running:
        running.wait_deterministic()
        yield running
