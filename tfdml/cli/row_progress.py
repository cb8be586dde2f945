"""Progress bar of commands that work on rows, with their number per second."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    """Progress column that shows rows per second."""

    def render(self, task: Task) -> Text:
        """Returns the rate, or empty text before it is known."""
        return Text(f"{task.speed:,.0f} rows/s" if task.speed else "")


def row_progress() -> Progress:
    """Returns a bar on standard error, which disappears at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
