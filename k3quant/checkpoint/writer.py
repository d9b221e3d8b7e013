"""Writes shards as a stream: header first, then tensors in any order, whole or not at all."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from k3quant.checkpoint.header import HeaderEntry, encode_header
from k3quant.checkpoint.output_file import (
    PARTIAL_SUFFIX,
    Buffer,
    OutputFile,
    WrittenFile,
    atomic_write,
    byte_view,
    free_bytes,
    preflight_space,
)

__all__ = [
    "PARTIAL_SUFFIX",
    "Buffer",
    "ShardWriter",
    "WrittenFile",
    "atomic_write",
    "free_bytes",
    "preflight_space",
]


class ShardWriter:
    """Writes one shard whose tensors are known beforehand, for use in a `with`.

    Tensors lie in the format's own order (wide dtypes first, then names), whatever the order in
    which they are written. `write` and `write_at` may be called from any thread.

    Args:
        path: Final path of the shard.
        entries: Name, dtype and shape of each tensor.
        metadata: `__metadata__`; None writes no such key.
        align: The data section starts at a multiple of this many bytes.
        digest: Whether to compute the file's sha256.
    """

    def __init__(
        self,
        path: Path,
        entries: Iterable[tuple[str, str, tuple[int, ...]]],
        *,
        metadata: dict[str, str] | None = None,
        align: int = 8,
        digest: bool = True,
    ) -> None:
        self._header, self._placed = encode_header(entries, metadata=metadata, align=align)
        payload = max((entry.end for entry in self._placed.values()), default=0)
        self._output = OutputFile(path, size=len(self._header) + payload, digest=digest)

    @property
    def places(self) -> Mapping[str, HeaderEntry]:
        """Place of each tensor in the data section, in the order of the file."""
        return self._placed

    @property
    def data_start(self) -> int:
        """Offset of the data section in the file."""
        return len(self._header)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self._output.size

    @property
    def written(self) -> WrittenFile:
        """Size and digest, once the `with` was left.

        Raises:
            ValueError: The shard is not finished.
        """
        return self._output.written

    def __enter__(self) -> Self:
        self._output.__enter__()
        self._output.write_at(0, self._header)
        return self

    def write(self, name: str, buffer: Buffer) -> None:
        """Write a whole tensor.

        Raises:
            ValueError: There is no such tensor, its length differs, or it was written before.
            ResourceError: The system refused the write.
        """
        place = self._place(name)
        length = place.end - place.begin
        view = byte_view(buffer)
        if len(view) != length:
            raise ValueError(f"tensor {name}: expected {length} bytes, got {len(view)}")
        self._write(name, place.begin, view)

    def write_at(self, name: str, offset: int, buffer: Buffer) -> None:
        """Write a piece of a tensor, `offset` bytes from its beginning.

        Raises:
            ValueError: There is no such tensor, the piece reaches beyond it, or a part of it was
                written before.
            ResourceError: The system refused the write.
        """
        place = self._place(name)
        length = place.end - place.begin
        view = byte_view(buffer)
        if offset < 0 or offset + len(view) > length:
            raise ValueError(
                f"tensor {name}: expected a piece within {length} bytes, got "
                f"[{offset}, {offset + len(view)}]"
            )
        self._write(name, place.begin + offset, view)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and (gap := self._output.first_gap()) < self._output.size:
            missing = self._tensor_at(gap - self.data_start)
            error = ValueError(f"tensor {missing}: expected all its bytes, got a gap at {gap}")
            self._output.__exit__(ValueError, error, None)
            raise error
        self._output.__exit__(kind, error, trace)

    def _place(self, name: str) -> HeaderEntry:
        place = self._placed.get(name)
        if place is None:
            raise ValueError(f"{self._output.path.name}: expected one of its tensors, got {name}")
        return place

    def _write(self, name: str, begin: int, view: memoryview) -> None:
        try:
            self._output.write_at(self.data_start + begin, view)
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error

    def _tensor_at(self, offset: int) -> str:
        return next(name for name, entry in self._placed.items() if entry.end > offset)
