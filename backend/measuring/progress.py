"""Shows a progress bar for measurements that take seconds. Without a terminal it shows nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import rich.progress as rich
from rich.console import Console


class Progress:
    """A bar with a known number of steps."""

    def __init__(self, bar: rich.Progress, title: str, steps: int) -> None:
        self._bar = bar
        self._title = title
        self._task = bar.add_task(title, total=steps)
        self._done = -1

    def advance(self, what: str) -> None:
        """Begins the next step."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=f"{self._title}: {what}")


@contextmanager
def progress(title: str, steps: int) -> Iterator[Progress]:
    """Shows a bar until the block ends."""
    console = Console(stderr=True)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Progress(bar, title, steps)
