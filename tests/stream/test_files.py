import os
from pathlib import Path

import pytest

from k3quant.errors import IncompleteError
from k3quant.stream import files
from k3quant.stream.files import OpenFiles, outgrows_memory
from k3quant.stream.trial import Way


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shard").write_bytes(bytes(100_000))
    return tmp_path


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_is_opened_once_and_closed_with_the_rest(folder: Path) -> None:
    before = open_descriptors()
    opened = OpenFiles(folder, keep=True, whole_pages=True, at_once=1)
    first = opened.begin("shard", 0, 10)
    assert opened.begin("shard", 50_000, 10).fd == first.fd
    assert os.pread(first.fd, 10, 0) == bytes(10)
    opened.end(first)
    opened.close()
    assert open_descriptors() == before


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(IncompleteError, match="nothing-here: expected a file, got none"):
        OpenFiles(folder, keep=True, whole_pages=True, at_once=1).begin("nothing-here", 0, 1)


def test_only_what_is_not_cached_is_tried_past_the_cache(folder: Path, monkeypatch) -> None:
    cached_up_to = 1000
    monkeypatch.setattr(
        files, "_in_cache", lambda fd, offset, length: offset + length <= cached_up_to
    )
    before = open_descriptors()
    opened = OpenFiles(folder, keep=False, whole_pages=True, at_once=1)
    cached = opened.begin("shard", 0, 1000)
    direct = opened.begin("shard", 0, 1001)
    assert cached.way is None
    if direct.fd == cached.fd:
        pytest.skip("this file system has nothing past the cache")
    assert direct.way is Way.PAST_CACHE
    opened.close()
    assert open_descriptors() == before


def test_what_was_read_through_the_cache_to_try_it_does_not_stay(folder: Path, monkeypatch) -> None:
    told: list[tuple[str, int, int]] = []
    for advice in ("read_ahead", "forget"):
        monkeypatch.setattr(
            files, advice, lambda fd, offset, length, a=advice: told.append((a, offset, length))
        )
    monkeypatch.setattr(files, "_in_cache", lambda fd, offset, length: False)
    opened = OpenFiles(folder, keep=False, whole_pages=True, at_once=1)
    tried = [opened.begin("shard", i, 7) for i in range(6)]
    for read in tried:
        opened.end(read)
    opened.close()
    through = [read.offset for read in tried if read.way is Way.THROUGH_CACHE]
    assert set(through) >= {3, 4, 5}
    assert [offset for advice, offset, _ in told if advice == "read_ahead"] == through
    assert [offset for advice, offset, _ in told if advice == "forget"] == through


def test_a_checkpoint_that_fits_memory_stays_there(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_in_cache", lambda fd, offset, length: False)
    monkeypatch.setattr(files, "forget", lambda *range_: pytest.fail("pages were given back"))
    opened = OpenFiles(folder, keep=True, whole_pages=True, at_once=1)
    for _ in range(9):
        read = opened.begin("shard", 0, 10)
        assert read.way is None
        opened.end(read)
    opened.close()


def test_a_file_system_without_a_way_past_the_cache_is_read_through_it(
    folder: Path, monkeypatch
) -> None:
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(files.os, "open", refuse)
    monkeypatch.setattr(files, "_in_cache", lambda fd, offset, length: False)
    opened = OpenFiles(folder, keep=False, whole_pages=True, at_once=1)
    for _ in range(9):
        read = opened.begin("shard", 0, 10)
        assert os.pread(read.fd, 10, 0) == bytes(10)
        assert read.way is Way.THROUGH_CACHE
        opened.end(read)
    opened.close()


def test_pages_just_written_are_in_the_cache(folder: Path) -> None:
    with (folder / "shard").open("rb") as file:
        assert files._in_cache(file.fileno(), 0, 100_000)


def test_a_checkpoint_outgrows_memory_by_its_bytes() -> None:
    assert not outgrows_memory(1 << 20)
    assert outgrows_memory(1 << 60)
