"""What a file is made from, as bytes that can be had from any offset."""

from collections.abc import Generator
from typing import Protocol

from k3quant.hub.listing import HubFile
from k3quant.hub.ranges import RangeReader


class Content(Protocol):
    """The bytes of one file that is to be written."""

    @property
    def name(self) -> str:
        """Path of the file below the output folder."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def etag(self) -> str | None:
        """What tells these bytes from others, None where nothing does."""

    @property
    def may_be_shared(self) -> bool:
        """Whether several connections may fetch parts of it at once."""

    def stream(self, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a range; raises as `RangeReader.stream`."""


class WholeFile:
    """A file as the repository has it."""

    def __init__(self, reader: RangeReader, file: HubFile) -> None:
        self._reader = reader
        self._file = file
        self.name = file.name
        self.size = file.size
        self.etag = file.etag

    @property
    def may_be_shared(self) -> bool:
        """Whether the server was seen to give ranges; else each connection would get it all."""
        return self._reader.gives_ranges(self._file)

    def stream(self, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a range, also from a server that sends only whole files."""
        return self._reader.stream(self._file, begin, end, whole_allowed=True)
