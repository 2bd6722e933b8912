"""The application builder that serve_config.yaml names: `import_path: llm42_serve.app:build`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from llm42.config import Settings
from llm42.config.server import ServerSettings
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT
from llm42_serve.ingress.ingress import Ingress
from llm42_serve.replica.fastpath import FastPath

FAST_PATH_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 1024,  # the replica itself refuses beyond server.max_queued, with a 429
    "health_check_period_s": 5,
    "health_check_timeout_s": 30,
    "graceful_shutdown_wait_loop_s": 0.5,
    "request_router_config": RequestRouterConfig(
        request_router_class="llm42_serve.ingress.router:PrefixRouter"
    ),
}
INGRESS_OPTIONS: dict[str, Any] = {"max_ongoing_requests": 4096, "graceful_shutdown_wait_loop_s": 0.5}
OF_SCALING = (
    "ingress_replicas",
    "ingress_resources",
    "fastpath_replicas",
    "max_fastpath_replicas",
    "target_ongoing_requests",
    "upscale_delay_s",
    "downscale_delay_s",
)
"""How many processes there are, and where, is not the replicas' business: it must not restart them."""


def build(args: dict[str, Any]) -> Application:
    """Ingress over FastPath; `args` is the settings tree (llm42.config.Settings), validated here.

    Verifiers are not Serve deployments: fast-path replicas create them as named actors (verifier_pool.py).
    """
    settings = Settings.load(args)
    defaults = ServerSettings()
    server = settings.server.model_copy(update={name: getattr(defaults, name) for name in OF_SCALING})
    tree = settings.model_copy(update={"server": server}).model_dump(mode="json")
    drain = {"graceful_shutdown_timeout_s": settings.server.drain_s}
    options = FAST_PATH_OPTIONS | drain | _replicas(settings) | _placement(settings)
    fastpath = serve.deployment(FastPath, name="FastPath", **options)
    entry = serve.ingress()(Ingress)
    everything = settings.model_dump(mode="json")  # a key's share is one of all places
    of_ingress = INGRESS_OPTIONS | drain | _ingresses(settings)
    ingress = serve.deployment(entry, name="Ingress", **of_ingress)
    app: Application = ingress.bind(everything, fastpath.bind(tree))
    return app


def _replicas(settings: Settings) -> dict[str, Any]:
    """A fixed number of replicas, or Serve's autoscaling between two."""
    server = settings.server
    if server.max_fastpath_replicas <= server.fastpath_replicas:
        return {"num_replicas": server.fastpath_replicas}
    scaling = AutoscalingConfig(
        min_replicas=server.fastpath_replicas,
        max_replicas=server.max_fastpath_replicas,
        target_ongoing_requests=server.target_ongoing_requests,
        upscale_delay_s=server.upscale_delay_s,
        downscale_delay_s=server.downscale_delay_s,
    )
    return {"autoscaling_config": scaling}


def _ingresses(settings: Settings) -> dict[str, Any]:
    actor: dict[str, Any] = {"num_cpus": 0.1}
    if settings.server.ingress_resources:
        actor["resources"] = settings.server.ingress_resources
    return {"num_replicas": settings.server.ingress_replicas, "ray_actor_options": actor}


def _placement(settings: Settings) -> dict[str, Any]:
    """GPUs and other resources of a replica. vLLM with tensor parallelism takes whole GPUs of one node, in a
    placement group that its own workers are put into."""
    engine = settings.engine
    actor: dict[str, Any] = {"num_cpus": 0.2}
    if engine.resources:
        actor["resources"] = engine.resources
    if settings.model.device != "cuda" or not engine.gpus_per_replica:
        return {"ray_actor_options": actor}
    if settings.verifier.affinity == "vllm":  # the same products on both sides
        actor["runtime_env"] = {"env_vars": dict(CUBLAS_ENVIRONMENT)}
    parallel = engine.gpus_per_replica
    if parallel == 1:
        return {"ray_actor_options": actor | {"num_gpus": engine.gpus}}
    bundles = [{"CPU": 0.2, **engine.resources}, *({"CPU": 0.1, "GPU": engine.gpus} for _ in range(parallel))]
    group = {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}
    return {"ray_actor_options": actor, **group}
