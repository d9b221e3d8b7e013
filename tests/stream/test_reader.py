import sys
import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from k3quant.errors import ResourceError
from k3quant.stream.chunks import Chunk, Piece
from k3quant.stream.reader import ChunkReader

SIZE = 64


def chunk(layer: int, experts: tuple[int, ...] = (), pieces: int = 2) -> Chunk:
    """Return a chunk whose pieces lie in the arena in reverse order."""
    each = SIZE // pieces
    return Chunk(
        layer=layer,
        experts=experts,
        places={},
        stacks={},
        pieces=tuple(
            Piece("f", i * each, each, ((0, each, SIZE - (i + 1) * each),), f"t{layer}.{i}")
            for i in range(pieces)
        ),
        num_bytes=SIZE,
    )


def fill(piece: Piece, buffer: np.ndarray) -> None:
    buffer[:] = piece.offset


def reader(
    chunks: Iterable[Chunk], read: Callable[[Piece, np.ndarray], None] = fill, arenas: int = 2
) -> ChunkReader:
    return ChunkReader(
        chunks, read, device=torch.device("cpu"), own_arenas=arenas, own_bytes=SIZE,
        expert_arenas=arenas, expert_bytes=SIZE, piece_bytes=SIZE, threads=3,
    )  # fmt: skip


def test_chunks_come_in_order_with_every_part_in_its_place() -> None:
    chunks = [chunk(0), chunk(0, (1, 2)), chunk(0, (3,)), chunk(1, pieces=4)]
    opened = reader(chunks)
    for expected in chunks:
        loaded = opened.take()
        assert loaded.chunk is expected
        each = SIZE // len(expected.pieces)
        starts = torch.arange(SIZE - each, -1, -each).repeat_interleave(each)
        assert torch.equal(loaded.data, starts.to(torch.uint8))
        opened.release(loaded)
    with pytest.raises(ValueError, match="got the end"):
        opened.take()
    opened.close()


def test_no_more_is_read_than_there_are_arenas() -> None:
    begun: list[str] = []
    opened = reader(
        [chunk(layer, pieces=1) for layer in range(5)],
        lambda piece, buffer: begun.append(piece.name),
    )
    first, second = opened.take(), opened.take()
    assert sorted(begun) == ["t0.0", "t1.0"]
    opened.release(first)
    third = opened.take()
    assert sorted(begun) == ["t0.0", "t1.0", "t2.0"]
    assert third.arena is first.arena
    assert third.arena is not second.arena
    opened.close()


def test_failed_read_is_raised_where_the_chunk_is_taken() -> None:
    def fail(piece: Piece, buffer: np.ndarray) -> None:
        if piece.name == "t1.1":
            raise ResourceError("f: expected to read it, got input/output error")

    opened = reader([chunk(1)], fail)
    with pytest.raises(ResourceError, match="input/output"):
        opened.take()
    opened.close()


def test_closing_ends_the_threads_whatever_they_wait_for() -> None:
    before = threading.active_count()
    opened = reader(chunk(layer) for layer in range(100))
    opened.take()
    opened.close()
    assert threading.active_count() == before


def test_switch_interval_comes_back_with_the_last_reader_in_any_order() -> None:
    before = sys.getswitchinterval()
    first, second = reader([]), reader([])
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before
