"""A checkpoint on the Hub of which some files lie here: the source while a download goes on.

Headers and small files can be read before they have arrived; weights only once they were proven.
"""

import hashlib
from collections.abc import Iterable, Mapping

from k3quant.checkpoint.folder import FileInfo, LocalFolder
from k3quant.errors import HashError
from k3quant.hub.plan import DownloadPlan
from k3quant.hub.source import HubSource


class ArrivingSource:
    """The files of a download: from its folder once they are there, from the Hub before.

    Attributes:
        folder: Where files lie once they have arrived.
        here: Those that have.

    Args:
        plan: The download.
        hub: The same repository, read by ranges.
    """

    def __init__(self, plan: DownloadPlan, hub: HubSource) -> None:
        self.folder = plan.out
        self.here: set[str] = set()
        self._hub = hub
        self._local: LocalFolder | None = None
        self._documents = plan.documents
        self._headers: dict[str, tuple[int, bytes]] = {}
        self._files = {
            name: FileInfo(size=file.bytes, sha256=file.sha256)
            for name, file in plan.wanted.items()
        }

    @property
    def label(self) -> str:
        """The repository at its commit."""
        return self._hub.label

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """What a download of the repository would fetch."""
        return self._files

    def open_folder(self) -> None:
        """Create the folder, so that files can be read from it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._local = LocalFolder(self.folder)

    def prefetch_headers(self, files: Iterable[str]) -> None:
        """Fetch headers side by side, and remember what they were; raises as `HubSource`."""
        names = tuple(files)
        self._hub.prefetch_headers(names)
        for name in names:
            header = self._hub.read_header(name)
            self._headers[name] = (len(header), hashlib.sha256(header).digest())

    def check_header(self, file: str) -> None:
        """Compare a shard that has arrived with the header that the work was planned by.

        That header came by itself, where nothing proves a few bytes of a file.

        Raises:
            HashError: They differ.
        """
        assert self._local is not None
        length, expected = self._headers[file]
        if hashlib.sha256(self._local.read(file, 0, length)).digest() != expected:
            raise HashError(
                f"{file}: expected the header that was read before, got another in the file",
                hint="the server, or something on the way, changes bytes; try another endpoint",
            )

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Read a range, fewer bytes only where the file ends; raises as `HubSource.read`."""
        if file in self.here and self._local is not None:
            return self._local.read(file, offset, length)
        if file in self._documents:
            return self._documents[file][offset : offset + length]
        return self._hub.read(file, offset, length)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file that has arrived.

        Raises:
            ValueError: It has not.
            IncompleteError: It ends inside the range.
            ResourceError: The system refused the read.
        """
        if file not in self.here or self._local is None:
            raise ValueError(f"{file}: expected a file that has arrived, got one on its way")
        self._local.read_into(file, offset, buffer)
