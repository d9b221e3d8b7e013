"""Copies what a plan says, one output at a time, in memory bounded by one buffer."""

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from k3quant.checkpoint.copy import CopyWay, RangeCopier
from k3quant.checkpoint.folder import read_error
from k3quant.checkpoint.output_file import OutputFile, WrittenFile, write_error
from k3quant.repack.ranges import PlannedHeader

_OPEN_FILES = 32

Advance = Callable[[int], None]


class ShardCopier:
    """Writes outputs from ranges of source files, for use in a `with`.

    Args:
        locate: Path of a source file by its name.
        advance: Told the bytes that were written.
    """

    def __init__(self, locate: Callable[[str], Path], advance: Advance) -> None:
        self._locate = locate
        self._advance = advance
        self._copier = RangeCopier()
        self._open: OrderedDict[str, int] = OrderedDict()

    @property
    def copied(self) -> dict[CopyWay, int]:
        """Bytes copied so far by each way."""
        return self._copier.copied

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def write_shard(self, path: Path, planned: PlannedHeader) -> WrittenFile:
        """Write one output: its header, then its ranges.

        Raises:
            IncompleteError: A source file is gone or ends too early.
            ResourceError: The system refused a read or a write.
        """
        payload = max((place.end for place in planned.places.values()), default=0)
        size = len(planned.header) + payload
        with OutputFile(path, size=size) as output:
            output.write_at(0, planned.header)
            self._advance(len(planned.header))
            for span in planned.ranges:
                self._copy(output, span.file, span.offset, span.target, span.length)
        return output.written

    def copy_file(self, file: str, path: Path) -> WrittenFile:
        """Copy a whole source file.

        Raises:
            IncompleteError: The source is gone or shrank.
            ResourceError: The system refused a read or a write.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size = self._locate(file).stat().st_size
        except OSError as error:
            raise read_error(file, error) from error
        with OutputFile(path, size=size) as output:
            self._copy(output, file, 0, 0, size)
        self.close(file)
        return output.written

    def open(self, file: str) -> int:
        """Return a descriptor to read a source file; it stays open while it is in use.

        Raises:
            IncompleteError: The file is gone.
            ResourceError: The system refused to open it.
        """
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        try:
            self._open[file] = os.open(self._locate(file), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise read_error(file, error) from error
        return self._open[file]

    def close(self, file: str) -> None:
        """Close a source file that is not needed again."""
        if file in self._open:
            os.close(self._open.pop(file))

    def _copy(self, output: OutputFile, file: str, offset: int, target: int, length: int) -> None:
        def done(begin: int, end: int) -> None:
            output.mark(begin, end)
            self._advance(end - begin)

        source = self.open(file)
        try:
            self._copier.copy(source, offset, output.fd, target, length, file=file, done=done)
        except OSError as error:
            raise write_error(output.path, error, need=output.size) from error
