"""Lets vLLM's worker on a CPU use AMX, where the CPU has it. Loaded by vLLM itself, in the worker's process.

Linux lets a process use AMX's tiles once it has asked. The attention of vLLM 0.32 uses them without asking.
Where nothing else of the process has asked before, it ends with an illegal instruction: seen under a random
load, and not once the worker asks by itself; not seen with 0.27."""

from __future__ import annotations

import torch

torch.cpu._init_amx()


class AllowsAMX:
    """What vLLM adds to its worker: nothing. It has to be a class."""
