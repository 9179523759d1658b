"""Shows the progress of the experiment: a live bar on a terminal, one line per step into a pipe or a file."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

PIPED_LINES_PER_RUN = 3
PIPED_WAIT_S = 15.0


class Reporter:
    """Progress of one experiment. Use it in a `with` statement; one step runs at a time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._started = time.monotonic()
        self._waited_s = 0.0
        self._task = self._bar.add_task("", visible=False, note="")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays, with the time since the start."""
        self.console.print(f"[dim]{time.monotonic() - self._started:5.0f} s[/dim]  {text}", highlight=False)

    def step(self, text: str, total: int | None = None) -> None:
        """A new step begins. With `total`, `advance` counts it up."""
        self._waited_s = 0.0
        self._bar.reset(self._task, description=text, total=total, visible=True, note="")
        if not self.console.is_terminal:
            self.say(text)

    def waiting(self, seconds: float) -> None:
        """The step, which has nothing to count, has waited for so many seconds."""
        if self.console.is_terminal:
            return
        if seconds - self._waited_s >= PIPED_WAIT_S:
            self._waited_s = seconds
            self.say(f"  … {seconds:.0f} s")

    def advance(self, done: int, total: int, note: str) -> None:
        """`done` of the step's `total` are done; `note` says something about the last one."""
        self._bar.update(self._task, completed=done, note=note)
        every = max(1, -(-total // PIPED_LINES_PER_RUN))
        if not self.console.is_terminal and (done % every == 0 or done == total):
            self.say(f"  {done}/{total}  {note}")
