"""serve_config.yaml: documents every setting, holds the defaults, and is what both ways of starting read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from llm42.config import BY_OTHERS, GPU_DEFAULTS, ModelSettings, SessionSettings, Settings
from llm42.config.serve_file import absolute, read_serve_config
from llm42.errors import LaunchFailed
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT
from llm42_serve.app import build
from llm42_serve.preflight import require_free_port
from tests.chart.generate import load

CONFIG = Path(__file__).parents[2] / "serve_config.yaml"
VARIANTS = {
    "": CONFIG,
    "canonical": CONFIG.with_suffix(".canonical.yaml"),
    "gpu": CONFIG.with_suffix(".gpu.yaml"),
}
OWN: dict[str, dict[str, Any]] = {
    "": {},
    "canonical": {"engine": {"kind": "canonical"}},
    "gpu": {
        "model": {"path": "/models/model", "device": "cuda", "max_model_len": 8192},
        "engine": {"kind": "vllm"},
    },
}
"""Where a variant is not at the defaults."""
all_files = pytest.mark.parametrize("variant", VARIANTS)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names of all settings."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@all_files
@pytest.mark.usefixtures("shipped_defaults")
def test_the_file_is_a_ray_serve_config_with_every_setting_at_its_default(variant: str) -> None:
    """But for what is a variant's own."""
    data = yaml.safe_load(VARIANTS[variant].read_text())
    (app,) = ServeDeploySchema.model_validate(data).applications
    assert app.import_path == "llm42_serve.app:build"
    written = leaves(app.args)
    defaults = leaves(Settings().model_dump(mode="json"))
    elsewhere = {"server.host", "server.port"}  # in http_options
    assert set(defaults) - set(written) == elsewhere | {"engine.corrupt_share"}, (
        "the test plant is not for it"
    )
    own = leaves(OWN[variant])
    assert {name for name, value in written.items() if value != defaults[name]} == set(own) | set(BY_OTHERS)
    assert {name: written[name] for name in own} == own
    assert all(written[name] is None for name in BY_OTHERS)
    shipped = Settings.load(OWN[variant])
    assert read_serve_config(VARIANTS[variant]) == absolute(shipped)


@all_files
@pytest.mark.usefixtures("shipped_defaults")
def test_it_is_what_the_generator_writes(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_config, text = load("serve_config").serve_config, VARIANTS[variant].read_text()
    assert text == serve_config(variant), f"python helm/serve_config.py {variant} > {VARIANTS[variant].name}"
    monkeypatch.setattr(SessionSettings.model_fields["lookahead"], "description", "Another one.")
    assert text != serve_config(variant), "the control"


def test_on_a_gpu_only_the_models_path_is_to_be_set(tmp_path: Path) -> None:
    """What follows from the device does so; the same file for a CPU, the control, has other values."""
    text = VARIANTS["gpu"].read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace("path: /models/model\n", "path: /data/mine\n"))
    settings = read_serve_config(file)
    assert settings.model.path == "/data/mine"
    sizes = {name: getattr(settings.verifier, name) for name in GPU_DEFAULTS}
    assert sizes == GPU_DEFAULTS
    assert settings.engine.vllm.dtype is None, "the model's"
    file.write_text(text.replace("device: cuda\n", "device: cpu\n"))
    other = read_serve_config(file).verifier
    assert {name for name in GPU_DEFAULTS if getattr(other, name) != sizes[name]} == set(GPU_DEFAULTS)
    head = " ".join(line.strip("# ") for line in text.partition("proxy_location")[0].splitlines())
    assert all(name in head for name in leaves(OWN["gpu"])), "the file names what is not a default"


@all_files
def test_every_setting_has_a_comment_near_it(variant: str) -> None:
    lines = VARIANTS[variant].read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip() == "model:")
    for i, line in enumerate(lines[start:], start):
        if line.startswith(" " * 8) and not line.strip().startswith("#"):
            above = lines[max(0, i - 3) : i]
            assert any(x.strip().startswith("#") for x in above), f"no comment above: {line}"


def test_a_gpu_has_step_sizes_of_its_own_unless_told_otherwise() -> None:
    verifier = Settings.load({"model": {"device": "cuda"}}).verifier
    assert (verifier.block_size, verifier.buckets[-1]) == (64, 1024)
    told = Settings.load({"model": {"device": "cuda"}, "verifier": {"buckets": [8], "block_size": 128}})
    assert (told.verifier.block_size, told.verifier.buckets) == (128, (8,))
    assert Settings().verifier.block_size == 16
    unsaid = {"kv_tokens": None, "block_size": None, "buckets": None, "gpus": None}
    for model in ({"device": "cpu"}, {"device": "cuda"}, {}):
        assert Settings.load({"model": model, "verifier": unsaid}) == Settings.load({"model": model})
    again = Settings.load(told.model_dump(mode="json"))
    assert again == told, "what is sent to a replica is what was configured"


def test_on_a_gpu_ray_reserves_shares_of_it() -> None:
    app = build({"model": {"device": "cuda"}, "engine": {"gpus": 0.75}})
    (fastpath,) = [d for d in _deployments(app) if d.name == "FastPath"]
    assert fastpath.ray_actor_options["num_gpus"] == 0.75
    (plain,) = [d for d in _deployments(build({})) if d.name == "FastPath"]
    assert "num_gpus" not in plain.ray_actor_options


def test_without_an_engine_a_replica_takes_no_gpu_and_needs_no_products() -> None:
    """But it keeps what says on which nodes it may be."""
    tree = {"model": {"device": "cuda"}, "verifier": {"affinity": "vllm"}}
    engine = {"gpus": 0.75, "resources": {"here": 1}}
    for kind, gpus in (("canonical", None), ("torch", 0.75)):
        app = build(tree | {"engine": engine | {"kind": kind}})
        (fastpath,) = [d for d in _deployments(app) if d.name == "FastPath"]
        options = fastpath.ray_actor_options
        assert (options.get("num_gpus"), options["resources"]) == (gpus, {"here": 1})
        assert ("runtime_env" in options) == (gpus is not None)


def test_affinity_gives_both_sides_the_same_products_and_rounding() -> None:
    near = {"model": {"device": "cuda"}, "verifier": {"affinity": "vllm"}}
    (fastpath,) = [d for d in _deployments(build(near)) if d.name == "FastPath"]
    assert fastpath.ray_actor_options["runtime_env"]["env_vars"] == CUBLAS_ENVIRONMENT
    (plain,) = [d for d in _deployments(build({"model": {"device": "cuda"}})) if d.name == "FastPath"]
    assert "runtime_env" not in plain.ray_actor_options, "best-effort alone runs as it comes"
    assert Settings.load(near).verifier.rounds_logits
    assert not Settings().verifier.rounds_logits
    near["verifier"]["logits_dtype"] = "float32"
    assert not Settings.load(near).verifier.rounds_logits


def _deployments(app: Any) -> list[Any]:
    """All deployments of an application, from the ingress down."""
    bound = app._bound_deployment
    return [bound, *(d for a in bound.init_args if hasattr(a, "_bound_deployment") for d in _deployments(a))]


def test_how_many_there_are_reaches_the_ingress_and_not_the_replicas() -> None:
    """A key's share and an audit's calls are parts of the whole; scaling must not restart a replica."""
    counts = {"ingress_replicas": 2, "fastpath_replicas": 4, "max_fastpath_replicas": 6}
    pace = {"target_ongoing_requests": 3.0, "upscale_delay_s": 1.0, "downscale_delay_s": 2.0}
    tree = {"server": counts | pace | {"ingress_resources": {"front": 1}}}
    ingress, fastpath = _deployments(build(tree))
    assert {name: ingress.init_args[0]["server"][name] for name in counts} == counts
    assert fastpath.init_args == _deployments(build({}))[1].init_args
    other = _deployments(build({"server": {"max_queued": 3}}))[1]
    assert fastpath.init_args != other.init_args, "the control: what is a replica's business"


def test_what_scales_is_what_is_configured() -> None:
    """Serve's own defaults where nothing is said: what takes minutes to load is not thrown away after one."""
    for server, delays in (({}, (30.0, 600.0)), ({"upscale_delay_s": 1, "downscale_delay_s": 0}, (1.0, 0.0))):
        tree = {"server": {"fastpath_replicas": 2, "max_fastpath_replicas": 5, **server}}
        scaling = _deployments(build(tree))[1]._deployment_config.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
        assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == delays
    assert _deployments(build({}))[1]._deployment_config.autoscaling_config is None


def test_an_ingress_is_where_its_resources_are() -> None:
    ingress, fastpath = _deployments(build({"server": {"ingress_resources": {"front": 1}}}))
    assert ingress.ray_actor_options["resources"] == {"front": 1}
    assert "resources" not in fastpath.ray_actor_options
    assert "resources" not in _deployments(build({}))[0].ray_actor_options
    with pytest.raises(pydantic.ValidationError):
        build({"server": {"ingress_resources": {"front": 0}}})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"server": {"prot": 1}}, "server.prot"),
        ({"engine": {"max_batch": 0}}, "engine.max_batch"),
        ({"verifier": {"buckets": [8, 8]}}, "verifier"),
        ({"engine": {"max_batch": True}}, "engine.max_batch"),
        ({"server": {"heartbeat_s": False}}, "server.heartbeat_s"),
        ({"modell": {}}, "modell"),
    ],
)
def test_a_wrong_setting_stops_the_build_with_its_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        build(change)
    assert ".".join(map(str, caught.value.errors()[0]["loc"])) == name


def test_what_llm42_serve_cannot_honour_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(CONFIG.read_text())
    data["applications"][0]["deployments"] = [{"name": "FastPath", "num_replicas": 2}]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(LaunchFailed, match="serve deploy"):
        read_serve_config(file)


def test_http_options_decide_where_it_listens(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("http_options: {port: 8123}\napplications: [{args: {engine: {max_batch: 3}}}]")
    settings = read_serve_config(file)
    assert (settings.server.port, settings.engine.max_batch) == (8123, 3)


def test_a_port_in_use_is_said_before_anything_is_started() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchFailed, match="--port"):
            require_free_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("models/llama-3-8b-Q4_K_M.gguf", "llama-3-8b"),
        ("models/tiny.F16.GGUF", "tiny"),
        ("models/tiny-iq4_xs.gguf", "tiny"),
        ("models/plain.gguf", "plain"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", "Qwen3-8B"),
        ("/", "model"),
        (ModelSettings().path, ModelSettings().name),
    ],
)
def test_a_model_that_nobody_has_named_has_its_name_from_its_path(path: str, name: str) -> None:
    for model in ({"path": path}, {"path": path, "name": None}):
        assert Settings.load({"model": model}).model.name == name
    assert Settings.load({"model": {"path": path, "name": "mine"}}).model.name == "mine"
    assert Settings.load({"model": {"name": None}}).model.name == "SmolLM2-135M-Instruct"
