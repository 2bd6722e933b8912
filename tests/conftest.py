"""For all tests: Ray's switches are set before anything imports ray, which reads some of them only once."""

from __future__ import annotations

from deployments.launch import prepare_environment

prepare_environment()
