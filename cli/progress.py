"""A progress bar on stderr: bytes or steps, rate, time left."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress


class Bar:
    """Draws one stage after the other; safe to advance from any thread."""

    def __init__(self) -> None:
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a stage; the one before is closed."""
        self.close()
        counted: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()]
            if unit == "B"
            else [MofNCompleteColumn(), TextColumn(unit)]
        )
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            *counted,
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._rich.add_task(label, total=total, note="")
        self._rich.start()

    def advance(self, amount: int) -> None:
        """Move the bar on."""
        if self._rich is not None and self._task is not None:
            self._rich.advance(self._task, amount)
            if self._rich.finished:
                self.close()

    def note(self, text: str) -> None:
        """Show what is being worked on."""
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, note=text)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None
