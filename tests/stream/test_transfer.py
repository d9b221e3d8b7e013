import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from k3quant.stream.steps import COPY, PAGE, READ, RECORD, WAIT, Addresses, transfer
from k3quant.stream.transfer import Lane

STEP = 2 * PAGE
STREAM = 77
WORD = ctypes.c_int64


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[tuple[int, torch.Tensor]]:
    """An open file of 50,000 bytes, and what it holds."""
    values = torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    path = tmp_path / "numbers"
    path.write_bytes(values.numpy().tobytes())
    with path.open("rb") as file:
        yield file.fileno(), values


def parts_of(length: int, sizes: list[int]) -> list[tuple[int, int, int]]:
    """Cut a run into parts that lie in the arena the other way round, a byte apart."""
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    assert sum(sizes) == length
    ends = np.cumsum([size + 1 for size in sizes[::-1]])[::-1].tolist()
    places = zip(starts, sizes, ends, strict=True)
    return [(start, size, end - size - 1) for start, size, end in places]


class Device:
    """A device whose copies happen when an event is waited for, as late as they may."""

    def __init__(self, *, refuse: int | None = None) -> None:
        self.refuse = refuse
        self.log: list[str] = []
        self.late: list[tuple[int, int, int]] = []
        function = ctypes.CFUNCTYPE(WORD, WORD, WORD, WORD, WORD)
        self.callbacks = {
            COPY: function(self.copy), RECORD: function(self.record), WAIT: function(self.wait)
        }  # fmt: skip

    @property
    def calls(self) -> Addresses:
        found = np.zeros(4, dtype=np.int64)
        found[READ] = ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value
        for place, callback in self.callbacks.items():
            found[place] = ctypes.cast(callback, ctypes.c_void_p).value
        return found

    def copy(self, to: int, source: int, length: int, stream: int) -> int:
        assert stream == STREAM
        if self.refuse is not None and len(self.log) >= self.refuse:
            return 700
        self.log.append("copy")
        self.late.append((to, source, length))
        return 0

    def record(self, event: int, stream: int, *_: int) -> int:
        self.log.append(f"record {event}")
        return 0

    def wait(self, event: int, *_: int) -> int:
        if f"record {event}" in self.log:
            self.finish()
        return 0

    def finish(self) -> None:
        for to, source, length in self.late:
            ctypes.memmove(to, source, length)
        self.late.clear()


def staged(fd: int, offset: int, length: int, parts: list[tuple[int, int, int]],
           device: Device, to: torch.Tensor) -> tuple[int, int]:  # fmt: skip
    buffers = torch.empty(3 * STEP + 3 * PAGE, dtype=torch.uint8)
    begin = -(-buffers.data_ptr() // PAGE) * PAGE
    staging = np.array([begin, begin + STEP + PAGE], dtype=np.int64)
    done, turn = transfer(
        fd, offset, length, np.array(parts, dtype=np.int64), to.data_ptr(), staging,
        np.array([11, 12], dtype=np.int64), STREAM, device.calls, STEP, 0,
    )  # fmt: skip
    device.finish()
    return done, turn


RUNS = [
    pytest.param(0, [STEP], id="one step"),
    pytest.param(0, [STEP + 1], id="a byte more than a step"),
    pytest.param(4095, [1, 1, 1], id="over the edge of a page"),
    pytest.param(1000, [20_000, 3, 9_000, 1], id="large and small parts"),
    pytest.param(49_990, [10], id="the end of the file"),
    pytest.param(123, [7_000] * 7, id="parts across steps"),
]


@pytest.mark.parametrize(("offset", "sizes"), RUNS)
def test_every_part_arrives_through_buffers_used_in_turn(numbers, offset, sizes) -> None:
    fd, values = numbers
    length = sum(sizes)
    parts, to = parts_of(length, sizes), torch.zeros(60_000, dtype=torch.uint8)
    device = Device()
    done, turn = staged(fd, offset, length, parts, device, to)
    assert done == length
    expected = torch.zeros_like(to)
    for start, size, place in parts:
        expected[place : place + size] = values[offset + start : offset + start + size]
    assert torch.equal(to, expected)
    records = [entry for entry in device.log if entry != "copy"]
    assert records == [f"record {11 + i % 2}" for i in range(turn)]


@pytest.mark.parametrize(("offset", "sizes"), RUNS)
def test_a_lane_to_the_processor_reads_parts_to_their_places(numbers, offset, sizes) -> None:
    fd, values = numbers
    length = sum(sizes)
    parts, to = parts_of(length, sizes), torch.zeros(60_000, dtype=torch.uint8)
    assert Lane(torch.device("cpu"), None).transfer(fd, offset, length, parts, to) == length
    for start, size, place in parts:
        assert torch.equal(to[place : place + size], values[offset + start :][:size])


def test_a_file_that_ends_too_early_stops_before_the_step_that_needs_more(numbers) -> None:
    fd, _ = numbers
    to = torch.zeros(60_000, dtype=torch.uint8)
    parts = [(0, 20_000, 0)]
    done, _ = staged(fd, 50_000 - 17_000, 20_000, parts, Device(), to)
    assert done < 17_000
    assert (50_000 - 17_000 + done) % STEP % PAGE == 0
    assert Lane(torch.device("cpu"), None).transfer(fd, 49_000, 2_000, [(0, 2_000, 0)], to) == 0


def test_a_copy_that_the_device_refuses_stops_the_run(numbers) -> None:
    fd, _ = numbers
    to = torch.zeros(60_000, dtype=torch.uint8)
    done, turn = staged(fd, 0, 3 * STEP, [(0, 3 * STEP, 0)], Device(refuse=2), to)
    assert (done, turn) == (STEP, 1)


def test_a_bad_descriptor_stops_the_run_at_once() -> None:
    to = torch.zeros(64, dtype=torch.uint8)
    assert Lane(torch.device("cpu"), None).transfer(-1, 0, 64, [(0, 64, 0)], to) == 0
