"""The application builder that serve_config.yaml names: `import_path: deployments.app:build`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.fastpath import FastPath
from deployments.ingress import Ingress
from llm42.config import Settings

FAST_PATH_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 1024,  # the replica itself refuses beyond server.max_queued, with a 429
    "health_check_period_s": 5,
    "health_check_timeout_s": 30,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 20,
    "ray_actor_options": {"num_cpus": 0.2},
}
INGRESS_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 4096,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 20,
    "ray_actor_options": {"num_cpus": 0.1},
}


def build(args: dict[str, Any]) -> Application:
    """Ingress over FastPath; `args` is the settings tree (llm42.config.Settings), validated here.

    Verifiers are not Serve deployments: fast-path replicas create them as named actors (verifier_pool.py).
    """
    settings = Settings.load(args)
    tree = settings.model_dump(mode="json")
    replicas = settings.server.fastpath_replicas
    options = FAST_PATH_OPTIONS
    if settings.model.device == "cuda":
        actor = options["ray_actor_options"] | {"num_gpus": settings.engine.gpus}
        options = options | {"ray_actor_options": actor}
    fastpath = serve.deployment(FastPath, name="FastPath", num_replicas=replicas, **options)
    entry = serve.ingress()(Ingress)
    replicas = settings.server.ingress_replicas
    ingress = serve.deployment(entry, name="Ingress", num_replicas=replicas, **INGRESS_OPTIONS)
    app: Application = ingress.bind(tree, fastpath.bind(tree))
    return app
