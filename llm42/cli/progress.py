"""What is going on, shown in the terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

err = Console(stderr=True)


def progress_bar() -> Progress:
    """For work of a known number of pieces: what it is at, a bar, how many are done, the time."""
    text = TextColumn("{task.description}")
    return Progress(
        SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err
    )


class Steps:
    """Shows the step that is going on with a spinner, and the steps that are done with their time."""

    def __init__(self) -> None:
        self._status = err.status("")
        self._current, self._began = "", 0.0

    def __call__(self, text: str) -> None:
        """Begins a step, or says more about the current one: what follows a colon is not a new step."""
        step = text.partition(":")[0]
        if step != self._current:
            self.done()
            self._current, self._began = step, time.monotonic()
            self._status.start()
        self._status.update(escape(text))

    def done(self) -> None:
        """The current step is over."""
        if self._current:
            self._status.stop()
            err.print(
                f"[green]✓[/] {escape(self._current)} [dim]{time.monotonic() - self._began:.1f} s[/]",
                soft_wrap=True,
            )
            self._current = ""

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
