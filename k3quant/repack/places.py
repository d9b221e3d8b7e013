"""Where a checkpoint's tensors belong: their file in the released layout, layer and expert.

Converted checkpoints store other tensors under the modules of the table, so what is no tensor of
the table takes the place of its module. What belongs to no module goes with the globals.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from k3quant.checkpoint.reader import TensorEntry
from k3quant.checkpoint.shards import Item
from k3quant.formats.dtypes import DTYPES
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import TensorSpec, num_shards, shard_name, shard_tensors


class Place(NamedTuple):
    """File of the released layout, and decoder layer and expert where there is one."""

    shard: int
    layer: int | None
    expert: int | None


def place_tensors(
    entries: Mapping[str, TensorEntry], config: K3Config
) -> tuple[list[Item], list[str]]:
    """Return every tensor with its place, in the order of the released layout.

    Args:
        entries: Range of each tensor.
        config: The checkpoint's config.

    Returns:
        The tensors file by file, in a file the experts last and each expert's tensors together;
        and the names that belong to no module of the table.
    """
    exact: dict[str, Place] = {}
    modules: dict[str, Place] = {}
    for shard in range(1, num_shards(config) + 1):
        for spec in shard_tensors(config, shard):
            place = _place(config, spec)
            exact[spec.name] = place
            modules[spec.module] = place
    globals_place = Place(config.num_hidden_layers + 1, None, None)
    files = [shard_name(config, shard) for shard in range(1, num_shards(config) + 1)]
    keyed: list[tuple[tuple[int, bool, str, int, str], Item]] = []
    unknown: list[str] = []
    for name, entry in entries.items():
        known = exact.get(name) or modules.get(name.rpartition(".")[0])
        if known is None:
            unknown.append(name)
        shard, layer, expert = known or globals_place
        # Experts follow each other as their names do, so that a released file is read in order.
        key = (shard, expert is not None, f"{expert}.", -DTYPES[entry.dtype].rank, name)
        item = Item(name, entry.dtype, entry.shape, entry.length, files[shard - 1], layer, expert)
        keyed.append((key, item))
    keyed.sort()
    return [item for _, item in keyed], unknown


def items_by_file(entries: Iterable[tuple[str, TensorEntry]]) -> list[Item]:
    """Return tensors in the order in which the source stores them, at home where they are."""
    ordered = sorted(entries, key=lambda pair: (pair[1].file, pair[1].offset, pair[0]))
    return [
        Item(name, entry.dtype, entry.shape, entry.length, entry.file) for name, entry in ordered
    ]


def _place(config: K3Config, spec: TensorSpec) -> Place:
    in_layers = spec.shard <= config.num_hidden_layers  # elsewhere `layer` counts vision blocks
    return Place(spec.shard, spec.layer if in_layers else None, spec.expert)
