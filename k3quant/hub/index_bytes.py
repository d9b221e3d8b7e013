"""A repository's index: from the folder where it lies there already, else fetched once."""

from contextlib import suppress
from pathlib import Path

from k3quant.checkpoint.index import INDEX_FILE, Index, parse_index
from k3quant.hub.digest import Mismatch, judge_bytes
from k3quant.hub.file_bytes import expected_of_listing, read_proved
from k3quant.hub.listing import Listing
from k3quant.hub.ranges import RangeReader


class IndexBytes:
    """Has the index when it is first asked for.

    Attributes:
        name: Name of the index.
        fetched: Its bytes where they came from the server.
    """

    def __init__(self, reader: RangeReader, listing: Listing, out: Path) -> None:
        self.name = INDEX_FILE
        self.fetched: bytes | None = None
        self._reader = reader
        self._file = listing.files.get(INDEX_FILE)
        self._path = out / INDEX_FILE

    def parsed(self) -> Index | None:
        """Return the index, None where the repository has none.

        Raises:
            StructureError: It is malformed.
            HashError: Its bytes are not those that the listing names.
            ResourceError: The server failed for as long as the policy allows.
        """
        file = self._file
        if file is None:
            return None
        with suppress(OSError):
            there = self._path.read_bytes() if self._path.stat().st_size == file.size else None
            expected = expected_of_listing(file)
            if there is not None and not isinstance(judge_bytes(there, expected), Mismatch):
                return parse_index(there)
        self.fetched = read_proved(self._reader, file)
        return parse_index(self.fetched)
