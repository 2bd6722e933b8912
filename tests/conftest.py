"""For all tests: Ray's switches are set before anything imports ray, which reads some of them only once."""

from __future__ import annotations

import os

from hypothesis import settings

from deployments.launch import prepare_environment

prepare_environment()

# The same examples each time, so that a change is judged by what it changed.
# HYPOTHESIS_PROFILE=default explores.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
