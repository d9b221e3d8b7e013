"""Which source shards an export needs when, and how many of them must lie on the disk at once.

Shards arrive in the order in which output files need them, and leave with the last file that does.
A pure plan: nothing is fetched or written here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3quant.checkpoint.output_file import preflight_space
from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.export_plan import FilePlan
from k3quant.sizes import format_size

_AHEAD = 2  # shards that arrive while others are converted, where there is room


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPlan:
    """The order of shards and the room for them.

    Attributes:
        order: Shards in the order to fetch them.
        needs: Shards that each output file is made of, by its name.
        sizes: Bytes of each shard.
        least_bytes: What must lie on the disk at once for the hungriest output file.
        room_bytes: What may lie there at once: more, so that shards arrive ahead of their use.
        output_bytes: Bytes of the output files that are still to be written.
    """

    order: tuple[str, ...]
    needs: Mapping[str, frozenset[str]]
    sizes: Mapping[str, int]
    least_bytes: int
    room_bytes: int
    output_bytes: int

    @property
    def first_shards(self) -> tuple[str, ...]:
        """The shards that fit into the room before any was converted."""
        fitting: list[str] = []
        left = self.room_bytes
        for file in self.order:
            left -= self.sizes[file]
            if left < 0:
                break
            fitting.append(file)
        return tuple(fitting)

    def summary(self) -> dict[str, Any]:
        """Return the plan's numbers, ready for JSON."""
        return {
            "source_shards": len(self.order),
            "source_bytes": sum(self.sizes[file] for file in self.order),
            "source_bytes_at_once": self.room_bytes,
            "source_bytes_at_least": self.least_bytes,
            "output_bytes": self.output_bytes,
        }


def plan_arrival(
    checkpoint: Checkpoint,
    todo: Sequence[FilePlan],
    out: Path,
    *,
    here: int,
    beside: int,
    free: Callable[[Path], int],
) -> ArrivalPlan:
    """Plan the arrival of the shards that output files need, within what the disk has free.

    Args:
        checkpoint: The source, of which headers are enough.
        todo: Output files that are still to be written, in order.
        out: The output folder, where shards lie too until they are converted.
        here: Bytes of shards that lie there already.
        beside: Bytes of all other files that are still to be written.
        free: Tells the free bytes of a folder.

    Raises:
        ResourceError: The disk cannot hold the output and the shards of the hungriest file.
    """
    needs = {plan.name: _shards_of(checkpoint, plan) for plan in todo}
    sizes = {file: checkpoint.headers[file].file_bytes for need in needs.values() for file in need}
    order = tuple(dict.fromkeys(file for plan in todo for file in sorted(needs[plan.name])))
    least = _most_at_once(todo, needs, sizes)
    output = sum(plan.file_bytes for plan in todo)
    largest = max(sizes.values(), default=0)
    spare = free(out) + here - output - beside
    room = max(
        (
            least + ahead * largest
            for ahead in range(_AHEAD + 1)
            if least + ahead * largest <= spare
        ),
        default=least,
    )
    preflight_space(
        out,
        output + beside + max(least - here, 0),
        free=free,
        hint=f"{format_size(output)} are the output and {format_size(least)} the source shards "
        "that its hungriest file needs at once; smaller output files (`--max-shard-size`) may "
        "need fewer",
    )
    return ArrivalPlan(
        order=order,
        needs=needs,
        sizes=sizes,
        least_bytes=least,
        room_bytes=min(room, sum(sizes.values())),
        output_bytes=output,
    )


def _shards_of(checkpoint: Checkpoint, plan: FilePlan) -> frozenset[str]:
    return frozenset(checkpoint.entry(n).file for unit in plan.units for n in unit.sources)


def _most_at_once(
    todo: Sequence[FilePlan], needs: Mapping[str, frozenset[str]], sizes: Mapping[str, int]
) -> int:
    last = {file: place for place, plan in enumerate(todo) for file in needs[plan.name]}
    most, held = 0, set[str]()
    for place, plan in enumerate(todo):
        held |= needs[plan.name]
        most = max(most, _total(held, sizes))
        held = {file for file in held if last[file] > place}
    return most


def _total(files: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[file] for file in files)
