"""A further application of the session's cluster, in the form of a service."""

from __future__ import annotations

import pytest

from llm42.config import Settings
from llm42_serve.launch import Service

on_the_tiny_model_only = pytest.mark.parametrize("served_name", ["tiny"], indirect=True, scope="session")
"""For a test of what no model has a part in."""


def of_one_replica(settings: Settings) -> Settings:
    """For an application beside the first one: each process of it takes seconds to start."""
    return settings.model_copy(
        update={"server": settings.server.model_copy(update={"fastpath_replicas": 1, "ingress_replicas": 1})}
    )


class Application(Service):
    """A model under a route of its own, ready for deterministic requests; deleted at the end."""

    def __init__(self, cluster: Service, name: str, settings: Settings) -> None:
        super().__init__(settings)
        self.name, self.url = name, f"{cluster.url}/{name}"

    def start(self) -> None:
        """Deploys it and waits for its verifier."""
        from ray import serve

        from llm42_serve.app import build

        tree = self.settings.model_dump(mode="json")
        serve.run(build(tree), name=self.name, route_prefix=f"/{self.name}")
        self.wait_deterministic()

    def stop(self) -> None:
        """Its actors end by their leases."""
        from ray import serve

        serve.delete(self.name)
