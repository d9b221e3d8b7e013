"""Several shards written at a time: one is hashed and synced while the next is copied."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

Shard = TypeVar("Shard")
Advance = Callable[[int], None]


def write_shards(
    write: Callable[[Shard, Advance], None],
    shards: Iterable[Shard],
    *,
    jobs: int,
    advance: Advance,
) -> None:
    """Write every shard, in threads; the first fault, or Control-C, stops them all.

    Args:
        write: Writes one shard and reports bytes through the function it is given, which raises
            once the work is to stop.
        shards: The shards, begun in this order.
        jobs: Shards at a time.
        advance: Told the bytes written, from any thread.

    Raises:
        BaseException: The first fault, as `write` raised it.
    """
    stop = Event()

    def advance_or_stop(amount: int) -> None:
        if stop.is_set():
            raise CancelledError
        advance(amount)

    def run(shard: Shard) -> None:
        if stop.is_set():
            raise CancelledError
        try:
            write(shard, advance_or_stop)
        except BaseException:
            stop.set()
            raise

    pool = ThreadPoolExecutor(max(jobs, 1))
    try:
        futures = [pool.submit(run, shard) for shard in shards]
        faults = [future.exception() for future in wait(futures, None, FIRST_EXCEPTION).done]
        for fault in faults:
            if fault is not None and not isinstance(fault, CancelledError):
                raise fault
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
