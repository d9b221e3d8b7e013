from concurrent.futures import CancelledError
from threading import Event, get_ident

import pytest

from k3quant.checkpoint.shard_pool import write_shards


@pytest.mark.parametrize("jobs", [0, 1, 3, 20])
def test_every_shard_is_written_and_told(jobs):
    written, told = [], []

    def write(shard, advance):
        written.append(shard)
        advance(shard * 10)

    write_shards(write, range(9), jobs=jobs, advance=told.append)
    assert sorted(written) == list(range(9))
    assert sorted(told) == [shard * 10 for shard in range(9)]


def test_jobs_run_side_by_side():
    meeting = [Event(), Event()]
    threads = set()

    def write(shard, advance):
        threads.add(get_ident())
        meeting[shard].set()
        assert meeting[1 - shard].wait(10)

    write_shards(write, range(2), jobs=2, advance=lambda _: None)
    assert len(threads) == 2


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
def test_the_first_fault_ends_the_work(fault):
    begun = []

    def write(shard, advance):
        begun.append(shard)
        if shard == 2:
            raise fault

    with pytest.raises(fault):
        write_shards(write, range(9), jobs=1, advance=lambda _: None)
    assert begun == [0, 1, 2]


def test_a_shard_under_way_stops_at_its_next_report():
    failed, stopped = Event(), []

    def write(shard, advance):
        if shard == 1:
            failed.set()
            raise ValueError
        assert failed.wait(10)
        try:
            for _ in range(1_000_000):
                advance(1)
        except CancelledError:
            stopped.append(shard)
            raise

    with pytest.raises(ValueError):
        write_shards(write, [0, 1], jobs=2, advance=lambda _: None)
    assert stopped == [0]
