import os
from pathlib import Path

import pytest

from k3quant.errors import IncompleteError
from k3quant.stream import files
from k3quant.stream.files import OpenFiles, outgrows_memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shard").write_bytes(bytes(100_000))
    return tmp_path


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_is_opened_once_and_closed_with_the_rest(folder: Path) -> None:
    before = open_descriptors()
    opened = OpenFiles(folder, past_cache=False)
    first = opened.descriptor("shard", 0, 10)
    assert opened.descriptor("shard", 50_000, 10) == first
    assert os.pread(first, 10, 0) == bytes(10)
    opened.close()
    assert open_descriptors() == before


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(IncompleteError, match="nothing-here: expected a file, got none"):
        OpenFiles(folder, past_cache=False).descriptor("nothing-here", 0, 1)


def test_only_what_is_not_cached_is_read_past_the_cache(folder: Path, monkeypatch) -> None:
    cached_up_to = 1000
    monkeypatch.setattr(
        files, "_in_cache", lambda fd, offset, length: offset + length <= cached_up_to
    )
    before = open_descriptors()
    opened = OpenFiles(folder, past_cache=True)
    cached = opened.descriptor("shard", 0, 1000)
    direct = opened.descriptor("shard", 0, 1001)
    if direct == cached:
        pytest.skip("this file system has nothing past the cache")
    assert os.get_blocking(direct)
    opened.close()
    assert open_descriptors() == before


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
    opened = OpenFiles(folder, past_cache=True)
    assert os.pread(opened.descriptor("shard", 0, 10), 10, 0) == bytes(10)
    opened.close()


def test_pages_just_written_are_in_the_cache(folder: Path) -> None:
    with (folder / "shard").open("rb") as file:
        assert files._in_cache(file.fileno(), 0, 100_000)


def test_a_checkpoint_outgrows_memory_by_its_bytes() -> None:
    assert not outgrows_memory(1 << 20)
    assert outgrows_memory(1 << 60)
