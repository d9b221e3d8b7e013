"""Plans of shard files: which tensors lie together, under which file names. Pure, no I/O.

A plan takes tensors in an order and never changes it; an expert's tensors stay in one file where
the size limit allows, so that one expert remains one range.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from k3quant.errors import UsageError

RANK_FILE_BYTES = 20_000_000_000
"""Limit of a rank's files where no other is asked for: a little more than a released shard."""


class Item(NamedTuple):
    """One tensor to place.

    Attributes:
        name: Its name.
        dtype: Safetensors dtype.
        shape: Stored shape.
        size: Bytes.
        home: Its file in the released layout, and in a layout that is kept.
        layer: Decoder layer, None for tensors of no layer.
        expert: Routed expert, None elsewhere.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    home: str
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One planned file and its tensors."""

    file: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A planned layout.

    Attributes:
        files: Every file once.
        indexes: Files of each further index by its name; the overall index names all files.
        oversized: Tensors that are larger than the limit and have a file of their own.
    """

    files: tuple[ShardFile, ...]
    indexes: dict[str, tuple[str, ...]]
    oversized: tuple[Item, ...]


def plan_by_size(
    items: Sequence[Item], *, limit: int | None, overhead: int = 16, stem: str = "model"
) -> ShardPlan:
    """Fill files in order, each up to a size.

    Args:
        items: The tensors, in the order to fill.
        limit: Bytes a file may have with its header; None puts all in one file.
        overhead: Bytes of a header besides its tensors: length, braces, padding, metadata.
        stem: What the file names begin with.
    """
    if limit is None:
        parts = [list(items)] if items else []
        return _plan(stem, parts, [])
    parts, oversized = [], []
    capacity = limit - overhead
    room = 0
    for unit, cost in _units(items, capacity):
        if not parts or cost > room:
            parts.append([])
            room = capacity
        if cost > capacity:
            oversized += unit
        parts[-1] += unit
        room -= cost
    return _plan(stem, parts, oversized)


def plan_by_home(items: Iterable[Item]) -> ShardPlan:
    """Put every tensor into the file that it names as its home."""
    files: dict[str, list[Item]] = {}
    for item in items:
        files.setdefault(item.home, []).append(item)
    ordered = (ShardFile(file, tuple(part)) for file, part in sorted(files.items()))
    return ShardPlan(files=tuple(ordered), indexes={}, oversized=())


def plan_by_layer(
    items: Sequence[Item], *, limit: int | None = None, overhead: int = 16
) -> ShardPlan:
    """Give every decoder layer files of its own, and the rest theirs.

    Args:
        items: The tensors.
        limit: Bytes a file may have; a larger layer is split.
        overhead: As in `plan_by_size`.
    """
    layers = sorted({item.layer for item in items if item.layer is not None})
    by_layer: dict[int | None, list[Item]] = {layer: [] for layer in [*layers, None]}
    for item in items:
        by_layer[item.layer].append(item)
    return _join(
        plan_by_size(
            part,
            limit=limit,
            overhead=overhead,
            stem="model-globals" if layer is None else f"model-layer-{layer:05d}",
        )
        for layer, part in by_layer.items()
        if part
    )


def plan_by_rank(
    items: Sequence[Item],
    *,
    num_experts: int,
    ranks: int,
    limit: int = RANK_FILE_BYTES,
    overhead: int = 16,
) -> ShardPlan:
    """Give every expert-parallel rank files with its experts, beside one set that all share.

    Ranks take contiguous experts, the first ones one more where they do not divide evenly. Each
    rank has an index of its own files and the shared ones.

    Args:
        items: The tensors.
        num_experts: Routed experts of a layer.
        ranks: Number of ranks.
        limit: Bytes a file may have.
        overhead: As in `plan_by_size`.

    Raises:
        UsageError: There are more ranks than experts.
    """
    if not 0 < ranks <= num_experts:
        raise UsageError(f"expert ranks: expected 1 to {num_experts}, got {ranks}")
    rank_of = [expert_rank(expert, num_experts, ranks) for expert in range(num_experts)]
    own: list[list[Item]] = [[] for _ in range(ranks)]
    shared: list[Item] = []
    for item in items:
        (shared if item.expert is None else own[rank_of[item.expert]]).append(item)
    stems = [f"rank-{rank:05d}-of-{ranks:06d}" for rank in range(ranks)]
    common = plan_by_size(shared, limit=limit, overhead=overhead, stem="model-shared")
    plans = [
        plan_by_size(part, limit=limit, overhead=overhead, stem=f"model-{stem}")
        for stem, part in zip(stems, own, strict=True)
    ]
    files = tuple(shard.file for shard in common.files)
    indexes = {
        f"model.safetensors.index.{stem}.json": files + tuple(shard.file for shard in plan.files)
        for stem, plan in zip(stems, plans, strict=True)
    }
    joined = _join([common, *plans])
    return ShardPlan(files=joined.files, indexes=indexes, oversized=joined.oversized)


def expert_rank(expert: int, num_experts: int, ranks: int) -> int:
    """Return the rank that holds an expert when ranks take contiguous experts."""
    size, rest = divmod(num_experts, ranks)
    larger = rest * (size + 1)  # experts of the first ranks, which hold one more
    if expert < larger:
        return expert // (size + 1)
    return rest + (expert - larger) // size


def _units(items: Sequence[Item], capacity: int) -> Iterator[tuple[list[Item], int]]:
    """Yield what must stay together, with its cost: an expert that fits a file, else a tensor."""
    for (_, expert), group in groupby(items, key=lambda item: (item.layer, item.expert)):
        unit = list(group)
        costs = [_cost(item) for item in unit]
        if expert is not None and sum(costs) <= capacity:
            yield unit, sum(costs)
        else:
            yield from (([item], cost) for item, cost in zip(unit, costs, strict=True))


def _cost(item: Item) -> int:
    """Return the most bytes a tensor takes in a file: its own, and its entry in the header."""
    entry = (
        f'{json.dumps(item.name, ensure_ascii=False)}:{{"dtype":"{item.dtype}",'
        f'"shape":{list(item.shape)},"data_offsets":[,]}},'
    )
    return item.size + len(entry.encode()) + 2 * 14  # offsets of at most 14 digits


def _plan(stem: str, parts: list[list[Item]], oversized: list[Item]) -> ShardPlan:
    count = len(parts)
    numbers = [f"-{part:05d}-of-{count:06d}" for part in range(1, count + 1)]
    names = [f"{stem}{number if count > 1 else ''}.safetensors" for number in numbers]
    files = (ShardFile(name, tuple(part)) for name, part in zip(names, parts, strict=True))
    return ShardPlan(files=tuple(files), indexes={}, oversized=tuple(oversized))


def _join(plans: Iterable[ShardPlan]) -> ShardPlan:
    files: list[ShardFile] = []
    oversized: list[Item] = []
    for plan in plans:
        files += plan.files
        oversized += plan.oversized
    return ShardPlan(files=tuple(files), indexes={}, oversized=tuple(oversized))
