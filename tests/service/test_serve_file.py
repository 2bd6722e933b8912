"""serve_config.yaml as `llm42 serve` reads it: nothing in it is dropped without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm42.config import Settings
from llm42.config.serve_file import read_serve_config
from llm42.config.yaml_file import YamlProblem
from llm42.errors import LaunchFailed

APPLICATION = {"name": "llm42", "route_prefix": "/", "import_path": "llm42_serve.app:build"}


def written(directory: Path, tree: Any) -> Path:
    file = directory / "config.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return file


def serve_tree(top: dict[str, Any] | None = None, **application: Any) -> dict[str, Any]:
    return {"applications": [APPLICATION | {"args": {}} | application], **(top or {})}


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (serve_tree(argz={"model": {"name": "x"}}), "applications[0].argz: unknown name"),
        (serve_tree({"http_options": {"prot": 8001}}), "http_options.prot: unknown name"),
        (serve_tree({"http_option": {"port": 8001}}), "http_option: unknown name"),
        (serve_tree({"http_options": ["x"]}), "http_options: a mapping is needed"),
        (serve_tree({"http_options": {"request_timeout_s": 1}}), "http_options.request_timeout_s"),
        (serve_tree({"http_options": {"keep_alive_timeout_s": 300}}), "http_options.keep_alive_timeout_s"),
        (serve_tree({"http_options": {"root_path": "/llm"}}), "http_options.root_path"),
        (serve_tree({"grpc_options": {"port": 9000}}), "grpc_options"),
        (serve_tree({"logging_config": {"encoding": "JSON"}}), "logging_config"),
        (serve_tree({"proxy_location": "Disabled"}), "proxy_location"),
        (serve_tree(import_path="other:app"), "applications[0].import_path"),
        (serve_tree(name="other"), "applications[0].name"),
        (serve_tree(route_prefix="/llm"), "applications[0].route_prefix"),
        (serve_tree(runtime_env={"pip": ["x"]}), "applications[0].runtime_env"),
        (serve_tree(deployments=[{"name": "FastPath"}]), "applications[0].deployments"),
        (serve_tree(args=["x"]), "applications[0].args: a mapping is needed"),
        (serve_tree(args={"server": 3}), "applications[0].args.server: a mapping is needed"),
        ({"applications": None}, "applications: a list of one application is needed"),
        ({"applications": []}, "applications: a list of one application is needed, and has 0"),
        ({"applications": [APPLICATION, APPLICATION]}, "needed, and has 2"),
        ({"applications": {"name": "llm42"}}, "applications: a list"),
        ({"applications": ["llm42"]}, "applications[0]: a mapping is needed"),
        ({"http_options": {"port": 1}}, "http_options: only a file with `applications`"),
        (["a", "list"], "must be a mapping of names to values, not list"),
        ("just text", "not str"),
        ("3: x", "a mapping of names"),
        ("model: {name: a}\nmodel: {name: b}", "'model' is there twice"),
        ("model: {name: a, name: b}", "'name' is there twice"),
        ("model: [", "config.yaml: "),
        ("\x00", "config.yaml: "),
    ],
)
def test_it_is_refused_by_name(tmp_path: Path, tree: Any, named: str) -> None:
    with pytest.raises(LaunchFailed) as caught:
        read_serve_config(written(tmp_path, tree))
    assert named in str(caught.value)
    assert str(tmp_path / "config.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_honoured(tmp_path: Path) -> None:
    top = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8123, "root_path": ""},
        "grpc_options": {},
        "logging_config": None,
    }
    more = {"deployments": [], "runtime_env": {}, "args": {"server": {"max_queued": 3}}}
    settings = read_serve_config(written(tmp_path, serve_tree(top, **more)))
    server = settings.server
    assert (server.host, server.port, server.max_queued) == ("0.0.0.0", 8123, 3)
    # a port among the settings is the nearer one
    tree = serve_tree(top, args={"server": {"port": 9}})
    assert read_serve_config(written(tmp_path, tree)).server.port == 9
    for neutral in ({"args": None}, {"args": {"server": None}}):
        tree = serve_tree({"http_options": None}, **neutral)
        assert read_serve_config(written(tmp_path, tree)).server.port == 8000
    assert read_serve_config(written(tmp_path, "")).server.port == 8000


def test_merge_keys_are_no_second_names(tmp_path: Path) -> None:
    text = "model: &a {name: x}\nengine:\n  kind: torch\nserver: {port: 3}\n"
    assert Settings.load(written(tmp_path, text)).model.name == "x"
    text = "verifier: {<<: {threads: 2}, threads: 3}\n"
    assert Settings.load(written(tmp_path, text)).verifier.threads == 3


def test_a_bare_file_of_settings_is_read_as_strictly(tmp_path: Path) -> None:
    for text in ("- a\n", "model: {name: a, name: b}", "text"):
        with pytest.raises(YamlProblem, match=r"config\.yaml"):
            Settings.load(written(tmp_path, text))
    with pytest.raises(YamlProblem, match="No such file"):
        Settings.load(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"applications": None}, "Error: {file}: applications: a list of one application is needed"),
        (["x"], "Error: {file}: the file must be a mapping of names to values, not list"),
        ({"server": None}, "Error: server: must be an object"),
        ({"model": {"path": "/none"}}, "Error: There is no model at /none (model.path)."),
    ],
)
def test_the_command_says_it_in_one_line(tmp_path: Path, tree: Any, said: str) -> None:
    """Unwrapped, however long: it can be pasted and searched."""
    place = tmp_path / ("long-" * 20)
    place.mkdir()
    file = written(place, tree)
    command = [sys.executable, "-m", "llm42", "serve", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(said.format(file=file))
