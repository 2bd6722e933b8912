"""Names and handles of the actors that are not Serve deployments: verifiers and their supervisor."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors

from llm42.config import Settings
from llm42.fingerprint.request import process_facts
from llm42.fingerprint.source import PACKAGES, folder_of, source_hash
from llm42_kernels.cublas import CUBLAS_ENVIRONMENT
from llm42_serve.verifiers.actor import VerifierActor

log = logging.getLogger(__name__)
NAMESPACE = "llm42"
NO_THREAD_LIMIT = str(2**31 - 1)
"""A worker's environment can be overridden, but nothing in it can be unset."""
DETACHED: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 1000,
}
"""A named actor that outlives its creator and that Ray restarts; one that exists is adopted."""


def pool_digest(settings: Settings, model_identity: str) -> str:
    """Other settings of model, verifier or watch, other model files, other code or libraries give other
    names, hence new actors: a new release never meets the verifiers of an old one."""
    sections = (settings.model, settings.verifier, settings.watch)
    template = Path(settings.model.chat_template or "")  # beside the model, so no part of its identity
    own = hashlib.sha256(template.read_bytes()).hexdigest() if template.is_file() else None
    key = json.dumps(
        [_code(), process_facts(), own, model_identity, *(s.model_dump(mode="json") for s in sections)]
    )
    return hashlib.sha256(key.encode()).hexdigest()[:10]


@cache
def _code() -> str:
    """Of everything that an actor runs, also of what makes no output: what is said of one may change too."""
    return source_hash(map(folder_of, PACKAGES))


def verifier_names(settings: Settings, model_identity: str, count: int) -> list[str]:
    """Names of the pool's verifiers."""
    digest = pool_digest(settings, model_identity)
    return [f"verifier-{digest}-{i}" for i in range(count)]


def supervisor_name(settings: Settings, model_identity: str) -> str:
    """The supervisor's name; it also follows how many verifiers are wanted."""
    server = settings.server
    return f"supervisor-{pool_digest(settings, model_identity)}-{server.verifiers}-{server.max_verifiers}"


def get_or_create_verifier(name: str, settings: Settings, model_identity: str) -> Any:
    """The named actor's handle. Blocks for a call to the cluster's control store."""
    threads = str(settings.verifier.threads)
    env = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    env |= {"OMP_DYNAMIC": "false", "OMP_THREAD_LIMIT": NO_THREAD_LIMIT}  # so many, whatever the node says
    options: dict[str, Any] = {"num_cpus": 0.1, "runtime_env": {"env_vars": env}}
    if settings.verifier.resources:
        options["resources"] = settings.verifier.resources
    if settings.model.device == "cuda":
        env |= CUBLAS_ENVIRONMENT  # read when CUDA starts: it must be there before the actor is
        options["num_gpus"] = settings.verifier.gpus
    actor = ray.remote(VerifierActor).options(name=name, **DETACHED, **options)
    return actor.remote(settings.model_dump(mode="json"), model_identity=model_identity)


def get_actor(name: str) -> Any:
    """The handle of a named actor. Raises ValueError when there is none."""
    return ray.get_actor(name, namespace=NAMESPACE)


def existing_verifiers(settings: Settings, model_identity: str) -> set[int]:
    """Numbers of the pool's verifiers that there are, whoever has created them. Blocks like get_actor."""
    prefix = f"verifier-{pool_digest(settings, model_identity)}-"
    names = (a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE)
    numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return {int(number) for number in numbers if number.isdecimal()}


def is_pending(handle: Any) -> bool:
    """Whether Ray has found no place for the actor so far; False where it does not say. Blocks like
    get_actor."""
    try:
        from ray._private.state import state  # Ray 2.60 has no public way

        found = state.actor_table(handle._actor_id.hex())
    except Exception as error:  # it is only tidier to know
        log.debug("it is not known whether an actor is pending: %r", error)
        return False
    return found.get("State") in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


def draining_nodes() -> dict[str, float]:
    """Seconds left, by node, of those that Ray is draining; infinity where nobody has set an end. Blocks like
    get_actor. Raises AttributeError or ImportError with a Ray that does not say it."""
    from ray._private.state import state  # Ray 2.60 has no public way

    now = time.time()
    return {
        str(node): max(0.0, until_ms / 1000 - now) if until_ms else math.inf
        for node, until_ms in state.get_draining_nodes().items()
    }
