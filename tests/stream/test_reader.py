import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from k3quant.errors import ResourceError
from k3quant.stream.chunks import Chunk, Piece
from k3quant.stream.files import OpenFiles
from k3quant.stream.reader import ChunkReader

SIZE = 64


def chunk(layer: int, experts: tuple[int, ...] = (), pieces: int = 2, file: str = "f") -> Chunk:
    """Return a chunk whose pieces lie in the arena in reverse order."""
    each = SIZE // pieces
    return Chunk(
        layer=layer,
        experts=experts,
        places={},
        stacks={},
        pieces=tuple(
            Piece(file, i * each, each, ((0, each, SIZE - (i + 1) * each),)) for i in range(pieces)
        ),
        num_bytes=SIZE,
    )


class Folder:
    """Files that are read; what is asked for slowly is told to `slowly`."""

    def __init__(
        self, root: Path, slowly: Callable[[str, int, memoryview], None] | None = None
    ) -> None:
        (root / "f").write_bytes(bytes(range(SIZE)))
        (root / "short").write_bytes(bytes(range(SIZE - 5)))
        self.files = OpenFiles(root, keep=True, whole_pages=True, at_once=1)
        self.counted: list[int] = []
        self.slowly = slowly

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        assert self.slowly is not None
        self.slowly(file, offset, buffer)

    def count(self, length: int) -> None:
        self.counted.append(length)


def reader(chunks: Iterable[Chunk], folder: Folder, arenas: int = 2) -> ChunkReader:
    return ChunkReader(
        chunks, folder, device=torch.device("cpu"), own_arenas=arenas, own_bytes=SIZE,
        expert_arenas=arenas, expert_bytes=SIZE, threads=3,
    )  # fmt: skip


def test_chunks_come_in_order_with_every_part_in_its_place(tmp_path: Path) -> None:
    chunks = [chunk(0), chunk(0, (1, 2)), chunk(0, (3,)), chunk(1, pieces=4)]
    opened = reader(chunks, Folder(tmp_path))
    for expected in chunks:
        loaded = opened.take()
        assert loaded.chunk is expected
        each = SIZE // len(expected.pieces)
        runs = torch.arange(SIZE, dtype=torch.uint8).split(each)
        assert torch.equal(loaded.data, torch.cat(runs[::-1]))
        opened.release(loaded)
    with pytest.raises(ValueError, match="got the end"):
        opened.take()
    opened.close()


def test_no_more_is_read_than_there_are_arenas(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    opened = reader([chunk(layer, pieces=1) for layer in range(5)], folder)
    first, second = opened.take(), opened.take()
    assert folder.counted == [SIZE, SIZE]
    opened.release(first)
    third = opened.take()
    assert folder.counted == [SIZE, SIZE, SIZE]
    assert third.arena is first.arena
    assert third.arena is not second.arena
    opened.close()


def test_a_failed_read_is_raised_where_the_chunk_is_taken(tmp_path: Path) -> None:
    def fail(file: str, offset: int, buffer: memoryview) -> None:
        raise ResourceError(f"{file}: expected to read byte {offset}, got input/output error")

    opened = reader([chunk(1, file="short")], Folder(tmp_path, fail))
    with pytest.raises(ResourceError, match=r"short: .* byte 32, got input/output"):
        opened.take()
    opened.close()


def test_what_failed_once_and_can_be_read_again_is_put_in_its_place(tmp_path: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def mend(file: str, offset: int, buffer: memoryview) -> None:
        asked.append((file, offset, len(buffer)))
        buffer[:] = bytes(range(offset, offset + len(buffer)))

    opened = reader([chunk(1, file="short")], Folder(tmp_path, mend))
    runs = torch.arange(SIZE, dtype=torch.uint8).split(SIZE // 2)
    assert torch.equal(opened.take().data, torch.cat(runs[::-1]))
    assert asked == [("short", SIZE // 2, SIZE // 2)]
    opened.close()


def test_closing_ends_the_threads_whatever_they_wait_for(tmp_path: Path) -> None:
    before = threading.active_count()
    opened = reader((chunk(layer) for layer in range(100)), Folder(tmp_path))
    opened.take()
    opened.close()
    assert threading.active_count() == before
