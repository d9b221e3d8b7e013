"""Hints that keep a stream of terabytes from filling the page cache; a system may ignore each."""

import ctypes
import os

_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_WRITE_AND_WAIT = 7  # with WAIT_BEFORE and WAIT_AFTER


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk begin with a range now, so that a later sync has little left to wait for."""
    _sync_range(fd, offset, length, _WRITE)


def drop_behind(fd: int, offset: int, length: int) -> None:
    """Write a range out and give its pages back, which the next range can then use.

    New pages cost more than the copy into them, above all in a virtual machine.
    """
    _sync_range(fd, offset, length, _WRITE_AND_WAIT)
    forget(fd, offset, length)


def forget(fd: int, offset: int, length: int) -> None:
    """Give a range's pages back, but those that were not written out yet."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def read_ahead(fd: int, offset: int, length: int) -> None:
    """Let the disk begin to read a range now."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def _sync_range(fd: int, offset: int, length: int, flags: int) -> None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(flags))
