import errno
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3quant.checkpoint.copy import CopyWay, RangeCopier, link_file
from k3quant.errors import ExitCode, IncompleteError, RefusedError

DATA = random.Random(5).randbytes(100_000)
BLOCK = 4096


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    (tmp_path / "source").write_bytes(DATA)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


def _copy(
    copier: RangeCopier, files: tuple[int, int], offset: int, to: int, length: int
) -> list[tuple[int, int]]:
    marks: list[tuple[int, int]] = []
    copier.copy(
        files[0], offset, files[1], to, length,
        file="source", done=lambda begin, end: marks.append((begin, end)),
    )  # fmt: skip
    return marks


@pytest.mark.parametrize(
    ("offset", "to", "length"),
    [
        pytest.param(0, 0, 100_000, id="whole file"),
        pytest.param(1, 4090, 50_000, id="unaligned"),
        pytest.param(99_999, 0, 1, id="last byte"),
        pytest.param(5, 5, 0, id="nothing"),
        pytest.param(BLOCK + 10, 10, 3 * BLOCK, id="same place in the block"),
    ],
)
@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 20])
def test_a_range_arrives_and_is_told_piece_by_piece(
    files: tuple[int, int], offset: int, to: int, length: int, buffer_bytes: int
):
    marks = _copy(RangeCopier(buffer_bytes=buffer_bytes), files, offset, to, length)
    assert os.pread(files[1], length, to) == DATA[offset : offset + length]
    assert sum(end - begin for begin, end in marks) == length
    position = to
    for begin, end in marks:
        assert begin == position
        position = end


def test_a_source_that_ends_early_is_incomplete(files: tuple[int, int]):
    with pytest.raises(IncompleteError, match="source: expected 20 bytes at offset 99990, got 10"):
        _copy(RangeCopier(), files, 99_990, 0, 20)


def test_the_kernels_way_is_tried_and_its_refusal_remembered(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def refuse(*args: int) -> int:
        calls.append(args)
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr("k3quant.checkpoint.copy._TRIAL_BYTES", 2000)
    copier = RangeCopier(buffer_bytes=1000)
    _copy(copier, files, 0, 0, 100_000)
    assert len(calls) == 1
    assert copier.copied == {CopyWay.REFLINK: 0, CopyWay.KERNEL: 0, CopyWay.BUFFER: 100_000}
    assert os.pread(files[1], 100_000, 0) == DATA


@pytest.mark.parametrize(
    ("slow", "chosen"), [("buffer", CopyWay.KERNEL), ("kernel", CopyWay.BUFFER)]
)
def test_the_faster_way_is_kept(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch, slow: str, chosen: CopyWay
):
    clock = iter(range(10_000_000))
    cost = {"kernel": 1, "buffer": 1, slow: 100}
    now = 0.0
    real_kernel, real_buffer = os.copy_file_range, os.preadv

    def kernel(*args: int) -> int:
        nonlocal now
        now += cost["kernel"]
        return real_kernel(*args)

    def buffer(*args: object) -> int:
        nonlocal now
        now += cost["buffer"]
        return real_buffer(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "copy_file_range", kernel)
    monkeypatch.setattr(os, "preadv", buffer)
    monkeypatch.setattr("k3quant.checkpoint.copy.perf_counter", lambda: now + next(clock) * 1e-9)
    monkeypatch.setattr("k3quant.checkpoint.copy._TRIAL_BYTES", 2000)
    copier = RangeCopier(buffer_bytes=1000)
    _copy(copier, files, 0, 0, 100_000)
    assert copier.copied[chosen] == 96_000
    assert os.pread(files[1], 100_000, 0) == DATA


def test_only_whole_common_blocks_are_shared(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    import struct

    shared = []

    def clone(fd: int, request: int, argument: bytes) -> int:
        source, offset, length, to = struct.unpack("qQQQ", argument)
        shared.append((offset, length, to))
        os.pwrite(fd, os.pread(source, length, offset), to)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    copier = RangeCopier()
    marks = _copy(copier, files, 2 * BLOCK + 10, BLOCK + 10, 5 * BLOCK)
    assert shared == [(3 * BLOCK, 4 * BLOCK, 2 * BLOCK)]
    assert os.pread(files[1], 5 * BLOCK, BLOCK + 10) == DATA[2 * BLOCK + 10 :][: 5 * BLOCK]
    assert sum(end - begin for begin, end in marks) == 5 * BLOCK
    assert copier.copied[CopyWay.REFLINK] == 4 * BLOCK
    _copy(copier, files, 3, 1, 5 * BLOCK)
    assert len(shared) == 1


def test_a_link_is_the_same_file_and_replaces_an_older_one(tmp_path: Path):
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    link_file(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").samefile(tmp_path / "source")
    link_file(tmp_path / "source", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_link_leads_to_the_file_behind_a_symbolic_link(tmp_path: Path):
    (tmp_path / "blob").write_bytes(b"data")
    (tmp_path / "source").symlink_to("blob")
    link_file(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").is_symlink()
    assert (tmp_path / "target").samefile(tmp_path / "blob")


def test_a_link_over_file_systems_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    (tmp_path / "source").write_bytes(b"data")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RefusedError, match="cross-device link") as caught:
        link_file(tmp_path / "source", tmp_path / "target")
    assert caught.value.exit_code is ExitCode.REFUSED
    assert "--link" in caught.value.hint
