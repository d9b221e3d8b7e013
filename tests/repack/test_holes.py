import os

import pytest

from k3quant.repack.holes import DoneRanges, can_punch, free_blocks, punch_hole


def test_ranges_merge_where_they_touch():
    done = DoneRanges()
    assert done.add(10, 20) == (10, 20)
    assert done.add(30, 40) == (30, 40)
    assert done.add(20, 30) == (10, 40)
    assert done.add(15, 35) == (10, 40)
    assert done.add(0, 5) == (0, 5)
    assert done.add(5, 50) == (0, 50)


@pytest.mark.parametrize(
    ("ranges", "blocks"),
    [
        pytest.param([(0, 250)], [(0, 200)], id="whole blocks only"),
        pytest.param([(10, 90)], [(100, 100)], id="no whole block"),
        pytest.param([(10, 150), (150, 310)], [(100, 100), (100, 300)], id="a shared block"),
        pytest.param([(150, 310), (10, 150)], [(200, 300), (100, 200)], id="the later one first"),
        pytest.param([(0, 50), (150, 200), (50, 150)], [(0, 0), (200, 200), (0, 200)], id="a gap"),
    ],
)
def test_a_block_is_free_when_all_in_it_are_done(ranges, blocks):
    done = DoneRanges()
    assert [free_blocks(done, *span, block=100) for span in ranges] == blocks


def test_a_hole_reads_as_zeros_and_gives_room_back(tmp_path):
    if not can_punch(tmp_path):
        pytest.skip("the file system of the temporary folder cannot free parts of a file")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 65536)
    os.sync()
    before = path.stat().st_blocks
    fd = os.open(path, os.O_RDWR)
    punch_hole(fd, 8192, 32768)
    os.close(fd)
    assert path.read_bytes() == b"x" * 8192 + bytes(32768 - 8192) + b"x" * 32768
    assert path.stat().st_size == 65536
    assert path.stat().st_blocks < before


def test_a_refusal_has_its_reason(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        punch_hole(fd, 0, 4096)
    os.close(fd)
