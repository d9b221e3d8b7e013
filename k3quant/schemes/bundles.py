"""What exporters share: tensors that must share a file, files of a bounded size, no tensor lost."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from k3quant.checkpoint.reader import Checkpoint, TensorEntry
from k3quant.convert.export_plan import Forecast, Unit
from k3quant.errors import RefusedError, SchemaError
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import (
    Family,
    TensorSpec,
    accepted_shapes,
    num_shards,
    shard_tensors,
)

FLOATS = ("F32", "BF16", "F16")
_SHOWN = 5


class OutputTensor(NamedTuple):
    """One tensor of an export.

    Attributes:
        name: Its name in the target.
        dtype: The target's word for its element type.
        shape: Its shape, the last dimension contiguous.
        num_bytes: Bytes of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Tensors that are filled together, so that they lie in one file.

    Attributes:
        tensors: The tensors.
        units: What fills them.
        family: Family of the table.
        weights: Source matrices; a second half of a packed one counts nothing.
        source_bytes: Bytes of the source tensors.
        target: What a dry run calls the result's format.
    """

    tensors: tuple[OutputTensor, ...]
    units: tuple[Unit, ...]
    family: Family
    weights: int
    source_bytes: int
    target: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without padding."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def experts_are_packed(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint's tensors, not its config, say that experts are packed."""
    return any(name.endswith(".weight_packed") for name in checkpoint.entries)


def text_layers(
    config: K3Config, checkpoint: Checkpoint, *, packed: bool
) -> Iterator[dict[str, list[TensorSpec]]]:
    """Yield the language model's tensors by role: globals first, then layer by layer.

    The halves of a pair stand under `<role>.packed` and `<role>.scale`, experts in their order.

    Args:
        config: The model.
        checkpoint: Every tensor is looked up in it.
        packed: Whether routed experts are MXFP4 pairs.

    Raises:
        SchemaError: A tensor is missing, or its dtype or shape is not the table's.
    """
    for shard in (_globals_shard(config), *range(1, config.num_hidden_layers + 1)):
        by_role: dict[str, list[TensorSpec]] = {}
        for spec in shard_tensors(config, shard, packed=packed):
            _check_stored(config, spec, checkpoint.entry(spec.name))
            key = spec.role if spec.part == "weight" else f"{spec.role}.{spec.part}"
            by_role.setdefault(key, []).append(spec)
        yield by_role


def weight_name(spec: TensorSpec) -> str:
    """Return what a proof calls a weight: its module, or its full name where it has none."""
    return spec.module if spec.name.endswith((".weight", ".weight_packed")) else spec.name


def account_for_all(
    checkpoint: Checkpoint,
    bundles: Iterable[Bundle],
    config: K3Config,
    *,
    allow_skip: Collection[str],
) -> dict[str, str]:
    """Return the source tensors that get no place, with the reason.

    Args:
        checkpoint: The source.
        bundles: What is written.
        config: The model.
        allow_skip: Regular expressions; an unknown tensor that one matches whole may stay behind.

    Raises:
        RefusedError: A tensor is neither mapped, nor known to have no place, nor allowed to.
    """
    used = {name for bundle in bundles for unit in bundle.units for name in unit.sources}
    left = [name for name in checkpoint.entries if name not in used]
    vision = {
        spec.name
        for shard in range(_globals_shard(config) + 1, num_shards(config) + 1)
        for spec in shard_tensors(config, shard)
    }
    skipped = {}
    unknown = []
    for name in left:
        if name in vision:
            skipped[name] = "vision: the target holds the language model only"
        elif any(re.fullmatch(pattern, name) for pattern in allow_skip):
            skipped[name] = "unknown to Kimi-K3's table, skipped by --allow-skip"
        else:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise RefusedError(
            f"{checkpoint.source.label}: expected only tensors of Kimi-K3, "
            f"got {', '.join(unknown[:_SHOWN])}{more}",
            hint="`--allow-skip PATTERN` leaves them out and records that",
        )
    return skipped


def fill_files(
    bundles: Sequence[Bundle],
    *,
    max_bytes: int | None,
    cost: Callable[[Bundle], int],
    first_cost: int = 0,
    other_cost: int = 0,
) -> list[list[Bundle]]:
    """Distribute bundles over files, in order.

    Args:
        bundles: What is written.
        max_bytes: Bytes of a file; a bundle that is larger gets a file of its own. None means
            one file.
        cost: Bytes of a bundle with its part of the header.
        first_cost: Other bytes of the first file.
        other_cost: Other bytes of each further file.
    """
    files: list[list[Bundle]] = [[]]
    size = first_cost
    for bundle in bundles:
        need = cost(bundle)
        if files[-1] and max_bytes is not None and size + need > max_bytes:
            files.append([])
            size = other_cost
        files[-1].append(bundle)
        size += need
    return files


def forecast(bundles: Iterable[Bundle]) -> tuple[Forecast, ...]:
    """Sum bundles by family and target, in the table's order of families."""
    sums: dict[tuple[Family, str], list[int]] = {}
    for bundle in bundles:
        total = sums.setdefault((bundle.family, bundle.target), [0, 0, 0])
        for place, value in enumerate((bundle.weights, bundle.source_bytes, bundle.num_bytes)):
            total[place] += value
    order = list(Family)
    return tuple(
        Forecast(
            family=family,
            target=target,
            tensors=weights,
            source_bytes=source_bytes,
            target_bytes=target_bytes,
        )
        for (family, target), (weights, source_bytes, target_bytes) in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    )


def source_bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    """Return the bytes that source tensors take."""
    return sum(checkpoint.entry(name).length for name in names)


def _globals_shard(config: K3Config) -> int:
    return config.num_hidden_layers + 1


def _check_stored(config: K3Config, spec: TensorSpec, entry: TensorEntry) -> None:
    dtypes = {"packed": ("U8",), "scale": ("U8", "F8_E8M0")}.get(spec.part, FLOATS)
    shapes = accepted_shapes(config, spec)
    if entry.dtype not in dtypes or entry.shape not in shapes:
        raise SchemaError(
            f"tensor {spec.name}: expected {' or '.join(dtypes)} {list(shapes[0])}, "
            f"got {entry.dtype} {list(entry.shape)}",
            hint="export the released checkpoint, or convert this one to bf16 first",
        )
