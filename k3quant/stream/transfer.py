"""From a file to a device without the interpreter: read a step, start its copies, read the next.

A thread that asks for the interpreter's lock for every few megabytes waits for fifteen others each
time; a run of tens of megabytes is one call here. Steps are short, so that all threads' staging
buffers stay in the processor's last cache between the read and the copy.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from k3quant.stream.budget import BUFFERS, STEP_BYTES
from k3quant.stream.steps import COPY, PAGE, READ, RECORD, WAIT, Addresses, transfer


class Lane:
    """One thread's way to a device: pinned staging buffers that are used in turn.

    The processor needs none: bytes are read to where they belong.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        """Allocate the buffers.

        Args:
            device: Where to.
            stream: Stream of the copies; None on the processor.
        """
        self._buffers: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        if stream is not None:
            torch.cuda.set_device(stream.device)  # what this thread asks of the driver is about it
            for _ in range(BUFFERS):
                self._buffers.append(
                    torch.empty(STEP_BYTES + PAGE, dtype=torch.uint8, pin_memory=True)
                )
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)  # an event has a handle once it was recorded
                self._events.append(event)
        self._stream = 0 if stream is None else stream.cuda_stream
        self._calls = _host_calls() if stream is None else _cuda_calls()
        begins = [-(-buffer.data_ptr() // PAGE) * PAGE for buffer in self._buffers]
        self._staging = np.array(begins, dtype=np.int64)
        self._handles = np.array([event.cuda_event for event in self._events], dtype=np.int64)
        self._turn = 0

    def transfer(
        self, fd: int, offset: int, length: int, parts: Sequence[tuple[int, int, int]], to: Tensor
    ) -> int:
        """Read a run of a file and start the copies of its parts.

        Args:
            fd: The open file.
            offset: First byte in the file.
            length: Bytes.
            parts: Start in the run, bytes, and start in `to` of each part; they cover the run.
            to: `[bytes]` uint8 on the device.

        Returns:
            Bytes that were read and are on their way; fewer than `length` where a call failed.
        """
        done, self._turn = transfer(
            fd,
            offset,
            length,
            np.array(parts, dtype=np.int64),
            to.data_ptr(),
            self._staging,
            self._handles,
            self._stream,
            self._calls,
            STEP_BYTES,
            self._turn,
        )
        return int(done)


def _addresses(calls: dict[int, object]) -> Addresses:
    found = np.zeros(4, dtype=np.int64)
    for place, call in calls.items():
        found[place] = ctypes.cast(call, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    return found


@cache
def _host_calls() -> Addresses:
    return _addresses({READ: ctypes.CDLL(None).pread})


@cache
def _cuda_calls() -> Addresses:
    driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it
    return _addresses(
        {
            READ: ctypes.CDLL(None).pread,
            COPY: driver.cuMemcpyHtoDAsync_v2,
            RECORD: driver.cuEventRecord,
            WAIT: driver.cuEventSynchronize,
        }
    )
