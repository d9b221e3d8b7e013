"""Which shards an export needs when, and what the disk must hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k3quant.checkpoint.header import Header
from k3quant.checkpoint.reader import Checkpoint, TensorEntry
from k3quant.convert.arrival import ArrivalPlan, plan_arrival
from k3quant.convert.export_plan import FilePlan
from k3quant.errors import ResourceError

OUTPUT_BYTES = 1000


@dataclass(frozen=True)
class NoUnit:
    sources: tuple[str, ...]

    def run(self, checkpoint: Any, write: Any) -> Sequence[Any]:
        raise NotImplementedError


def plan(
    files: list[str], sizes: dict[str, int], *, free: int = 1 << 40, here: int = 0
) -> ArrivalPlan:
    """Plan output files, each spelled by the shards that it needs."""
    headers = {
        file: Header(file=file, file_bytes=size, json_bytes=0, metadata={}, tensors={})
        for file, size in sizes.items()
    }
    entries = {file: TensorEntry("U8", (), file, 0, 0) for file in sizes}
    source: Any = None
    checkpoint = Checkpoint(source=source, config={}, index=None, headers=headers, entries=entries)
    todo = [
        FilePlan(
            name=f"out{number}",
            header=b"",
            places={},
            file_bytes=OUTPUT_BYTES,
            units=(NoUnit(tuple(shards)),),
        )
        for number, shards in enumerate(files)
    ]
    return plan_arrival(checkpoint, todo, Path(), here=here, beside=10, free=lambda _: free)


@pytest.mark.parametrize(
    ("files", "order", "least"),
    [
        pytest.param(["a", "b", "c"], "abc", 30, id="one-by-one"),
        pytest.param(["ab", "bc"], "abc", 50, id="one-shared"),
        pytest.param(["ab", "c"], "abc", 30, id="two-then-one"),
        pytest.param(["a", "b", "ac"], "abc", 40, id="the-first-stays-to-the-end"),
        pytest.param(["c", "a", "b"], "cab", 30, id="in-the-order-of-use"),
        pytest.param(["a", "a", "a"], "a", 10, id="many-files-of-one"),
        pytest.param(["", "b"], "b", 20, id="file-without-sources"),
        pytest.param([], "", 0, id="nothing-to-do"),
    ],
)
def test_order_and_the_most_at_once(files: list[str], order: str, least: int) -> None:
    found = plan(files, {"a": 10, "b": 20, "c": 30})
    assert "".join(found.order) == order
    assert found.least_bytes == least
    assert found.room_bytes >= least


@pytest.mark.parametrize(
    ("spare", "room"),
    [(10, 10), (19, 10), (20, 20), (29, 20), (30, 30), (1000, 30)],
    ids=["least", "nearly-one-ahead", "one-ahead", "nearly-two", "two-ahead", "no-more-than-two"],
)
def test_room_is_what_the_disk_has_up_to_two_shards_ahead(spare: int, room: int) -> None:
    sizes = dict.fromkeys("abcdef", 10)
    found = plan(list(sizes), sizes, free=6 * OUTPUT_BYTES + 10 + spare)
    assert found.room_bytes == room
    assert len(found.first_shards) == room // 10


def test_what_is_there_already_counts_for_the_room() -> None:
    sizes = dict.fromkeys("abc", 10)
    assert plan(list(sizes), sizes, free=3 * OUTPUT_BYTES + 10, here=20).room_bytes == 20


def test_one_byte_short_is_refused() -> None:
    with pytest.raises(ResourceError, match="short 1 B") as caught:
        plan(["a"], {"a": 10}, free=OUTPUT_BYTES + 10 + 10 - 1)
    assert "its hungriest file needs at once" in caught.value.hint
