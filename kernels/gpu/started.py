"""How a kernel begins under programmatic dependent launch."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def started(PDL: tl.constexpr):
    """Lets the next kernel be set up, then waits until the kernel before has finished and its writes are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
