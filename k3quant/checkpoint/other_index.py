"""A checkpoint's files with another index than the one that lies beside them."""

from collections.abc import Mapping

from k3quant.checkpoint.folder import FileInfo, Source
from k3quant.checkpoint.index import INDEX_FILE


class OtherIndex:
    """Files of a source, and an index of one's own."""

    def __init__(self, source: Source, index: bytes, files: Mapping[str, FileInfo]) -> None:
        """Put both together.

        Args:
            source: Where the files are read.
            index: What the index says, as a file.
            files: Those that shall be seen, the index aside.
        """
        self._source = source
        self._index = index
        self._files = {**files, INDEX_FILE: FileInfo(size=len(index))}

    @property
    def label(self) -> str:
        """How people name the place."""
        return self._source.label

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """Every file by its path below the root."""
        return self._files

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Read a range, fewer bytes only where the file ends; raises as the source does."""
        if file == INDEX_FILE:
            return self._index[offset : offset + length]
        return self._source.read(file, offset, length)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a range of a shard; raises as the source does."""
        self._source.read_into(file, offset, buffer)
