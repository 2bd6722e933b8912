"""Python's garbage collector in processes that serve."""

import gc


def keep_what_is_there() -> None:
    """To be called once a process is ready. What it has built stays until its end: collections that many new
    objects set off look at the new ones alone. To look through all that a model's libraries have made takes a
    process with vLLM or torch half a second and more, in which it serves nobody."""
    gc.collect()
    gc.freeze()
