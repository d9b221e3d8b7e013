"""Progress of long work, told through a protocol so that the library prints nothing."""

from typing import Protocol


class Progress(Protocol):
    """Receives progress; the command line draws it."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a stage of `total` units (`B` for bytes, else a plural noun)."""

    def advance(self, amount: int) -> None:
        """Report `amount` more units done; may come from any thread."""

    def note(self, text: str) -> None:
        """Say what is being worked on."""


class Silent:
    """The default: nothing is drawn."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Ignore the stage."""

    def advance(self, amount: int) -> None:
        """Ignore the amount."""

    def note(self, text: str) -> None:
        """Ignore the text."""


SILENT = Silent()
