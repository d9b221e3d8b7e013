import pytest

from k3quant.stream.trial import Trial, Way

WAYS = (Way.PAST_CACHE, Way.THROUGH_CACHE)
AT_ONCE = 4


class Disk:
    """Answers one range at a time, each way at its own speed."""

    def __init__(self, seconds: dict[Way, float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.trial = Trial(WAYS, at_once=AT_ONCE, clock=lambda: self.now)
        self.chosen: list[Way] = []

    def read(self, ranges: int) -> None:
        """Read ranges, `AT_ONCE` of them always on their way."""
        waiting: list[Way] = []
        for _ in range(ranges):
            waiting.append(self.trial.next())
            self.chosen.append(waiting[-1])
            if len(waiting) == AT_ONCE:
                self._answer(waiting.pop(0))
        while waiting:
            self._answer(waiting.pop(0))

    def _answer(self, way: Way) -> None:
        self.now += self.seconds[way]
        self.trial.finished(way, 100)


@pytest.mark.parametrize("faster", WAYS, ids=lambda way: way.name)
def test_each_way_has_its_turn_and_then_the_faster_one_reads(faster: Way) -> None:
    disk = Disk({way: 1.0 if way is faster else 1.5 for way in WAYS})
    disk.read(60)
    turn = 3 * AT_ONCE
    assert disk.chosen[:turn] == [WAYS[0]] * turn
    assert disk.chosen[turn : 2 * turn] == [WAYS[1]] * turn
    assert disk.chosen[2 * turn + AT_ONCE :] == [faster] * (60 - 2 * turn - AT_ONCE)


def test_ranges_at_the_edges_of_a_turn_are_not_timed() -> None:
    disk = Disk(dict.fromkeys(WAYS, 1.0))
    # The last ranges of each turn, read beside those of the next, are slow.
    slow = {*range(2 * AT_ONCE, 3 * AT_ONCE), *range(5 * AT_ONCE, 6 * AT_ONCE)}
    count = 0
    answer = disk._answer

    def answer_slowly(way: Way) -> None:
        nonlocal count
        disk.now += 50.0 if count in slow and way is WAYS[0] else 0.0
        count += 1
        answer(way)

    disk._answer = answer_slowly  # type: ignore[method-assign]
    disk.read(40)
    assert disk.chosen[-1] is WAYS[0]


def test_a_way_that_never_finishes_is_not_chosen() -> None:
    trial = Trial(WAYS, at_once=AT_ONCE)
    for _ in range(6 * AT_ONCE):
        if (way := trial.next()) is WAYS[1]:
            trial.finished(way, 1)
    assert trial.next() is WAYS[1]
