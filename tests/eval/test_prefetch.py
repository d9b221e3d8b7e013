import threading
from typing import NamedTuple

import pytest

from k3quant.errors import IncompleteError
from k3quant.eval.prefetch import Prefetch


class Unit(NamedTuple):
    name: int
    num_bytes: int


def _units(count, size=10):
    return [Unit(i, size) for i in range(count)]


def test_units_come_in_order_whatever_the_threads_do():
    barrier = threading.Event()

    def read(unit):
        if unit.name == 0:
            barrier.wait(5)
        elif unit.name == 3:
            barrier.set()
        return unit.name * 2

    with Prefetch(_units(20), read, budget_bytes=50, threads=4) as queue:
        assert [queue.take() for _ in range(20)] == [(u, u.name * 2) for u in _units(20)]
        with pytest.raises(LookupError):
            queue.take()


def test_no_more_than_the_budget_is_read_ahead():
    started = []
    done = threading.Semaphore(0)

    def read(unit):
        started.append(unit.name)
        done.release()
        return unit.name

    with Prefetch(_units(20), read, budget_bytes=35, threads=1) as queue:
        queue.take()
        # One taken and three of ten bytes ahead of it.
        assert all(done.acquire(timeout=5) for _ in range(4))
        assert not done.acquire(timeout=0.05)
    assert started == [0, 1, 2, 3]


def test_a_unit_beyond_the_budget_is_read_alone():
    with Prefetch(_units(3, size=100), lambda u: u.name, budget_bytes=1, threads=2) as queue:
        assert [queue.take()[1] for _ in range(3)] == [0, 1, 2]


def test_what_is_no_longer_wanted_is_neither_read_nor_handed_out():
    read, wanted = [], set(range(10))

    def note(unit):
        read.append(unit.name)
        return unit.name

    queue = Prefetch(
        _units(10), note, budget_bytes=30, threads=1, wanted=lambda u: u.name in wanted
    )
    with queue:
        assert queue.take()[1] == 0
        wanted -= {1, 6, 7}  # 1 may be read already, 6 and 7 are beyond the budget
        assert [queue.take()[1] for _ in range(6)] == [2, 3, 4, 5, 8, 9]
    assert not {6, 7} & set(read)


def test_a_failed_read_is_raised_where_its_unit_is_taken():
    def read(unit):
        if unit.name == 2:
            raise IncompleteError("short")
        return unit.name

    with Prefetch(_units(4), read, budget_bytes=100, threads=2) as queue:
        assert [queue.take()[1] for _ in range(2)] == [0, 1]
        with pytest.raises(IncompleteError, match="short"):
            queue.take()


def test_leaving_ends_the_threads():
    before = threading.active_count()
    with Prefetch(_units(50), lambda u: u.name, budget_bytes=30, threads=3) as queue:
        queue.take()
    assert threading.active_count() == before
