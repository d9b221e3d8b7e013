"""When an output file may begin: at once, or as soon as the shards it is made of have arrived."""

from collections.abc import Iterable, Iterator
from threading import Event
from typing import Protocol

from k3quant.convert.export_plan import FilePlan


class Supply(Protocol):
    """Where the engine asks for work."""

    def in_turn(self, todo: Iterable[FilePlan], failed: Event) -> Iterator[FilePlan]:
        """Yield the files in an order in which they can be made, each once it can begin.

        Ends early where `failed` is set. Everything beside the weights can be read at its end.

        Raises:
            K3QuantError: What a file is made of cannot be had.
        """

    def finished(self, plan: FilePlan) -> None:
        """Take note of an output file that is on the disk and in the journal; from any thread."""

    def digest_of(self, file: str) -> str | None:
        """Return a source shard's sha256 where it was proven already, None where it was not."""


class AllThere:
    """A source that lies on this machine as a whole."""

    def in_turn(self, todo: Iterable[FilePlan], failed: Event) -> Iterator[FilePlan]:
        """Yield every file at once."""
        yield from todo

    def finished(self, plan: FilePlan) -> None:
        """Keep everything."""

    def digest_of(self, file: str) -> str | None:
        """Know nothing."""
        return None
