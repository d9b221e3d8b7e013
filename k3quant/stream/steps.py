"""Machine code that reads a run of a file in steps and starts each step's copies."""

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

from k3quant.formats.jit import compiled

PAGE = 4096
READ, COPY, RECORD, WAIT = range(4)
STATUS = 0xFFFFFFFF
"""The bits of a result that the driver sets; what is above is left over from elsewhere."""

Addresses = npt.NDArray[np.int64]


def _call_address(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call a C function of up to four integers or pointers by its address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(word, [word] * 4).as_pointer()
        return builder.call(builder.inttoptr(args[0], function), list(args[1:]))

    return numba.int64(*[numba.int64] * 5), generate


_call = cast("Callable[[int, int, int, int, int], int]", intrinsic(_call_address))


def _read_range(call: int, fd: int, to: int, least: int, most: int, offset: int) -> bool:
    """Read at least and at most so many bytes; whether they came."""
    got = 0
    while got < least:
        more = _call(call, fd, to + got, most - got, offset + got)
        if more <= 0:
            return False
        got += more
    return True


_read = compiled(_read_range)


def _transfer(
    fd: int,
    offset: int,
    length: int,
    parts: Addresses,
    to: int,
    staging: Addresses,
    events: Addresses,
    stream: int,
    calls: Addresses,
    step: int,
    turn: int,
) -> tuple[int, int]:
    """Do `transfer.Lane.transfer` with addresses.

    Args:
        fd: The open file.
        offset: First byte in the file.
        length: Bytes.
        parts: `[n, 3]`: start in the run, bytes, start in the arena.
        to: Address of the arena.
        staging: Buffers of `step` bytes that begin a page; without any, bytes are read straight to
            the arena.
        events: One for each buffer.
        stream: The copies' stream.
        calls: Addresses of `READ(fd, to, bytes, offset)`, which returns bytes, and of
            `COPY(to, from, bytes, stream)`, `RECORD(event, stream)` and `WAIT(event)`, which
            return 0.
        step: Bytes of a step, whole pages.
        turn: Buffers used so far.

    Returns:
        Bytes done, and buffers used.
    """
    done = part = 0
    slot = source = 0
    while done < length:
        # Whole pages of the file go to whole pages of a buffer: a file opened past the page cache
        # asks for that.
        before = (offset + done) % PAGE
        count = min(step - before, length - done)
        if len(staging):
            slot = turn % len(staging)
            begin, pages = offset + done - before, -(-(before + count) // PAGE) * PAGE
            if _call(calls[WAIT], events[slot], 0, 0, 0) & STATUS:
                return done, turn
            if not _read(calls[READ], fd, staging[slot], before + count, pages, begin):
                return done, turn
            source = staging[slot] + before - done
        while part < len(parts):
            low = max(parts[part, 0], done)
            high = min(parts[part, 0] + parts[part, 1], done + count)
            place = to + parts[part, 2] + low - parts[part, 0]
            if len(staging):
                if _call(calls[COPY], place, source + low, high - low, stream) & STATUS:
                    return done, turn
            elif not _read(calls[READ], fd, place, high - low, high - low, offset + low):
                return done, turn
            if parts[part, 0] + parts[part, 1] > done + count:
                break
            part += 1
        if len(staging) and _call(calls[RECORD], events[slot], stream, 0, 0) & STATUS:
            return done, turn
        turn += 1
        done += count
    return done, turn


transfer = compiled(_transfer)
