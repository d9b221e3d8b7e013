"""The vision tower and projector of a checkpoint: proved against the table, read block by block."""

from collections.abc import Generator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint
from k3quant.errors import RefusedError, SchemaError
from k3quant.eval.prefetch import Prefetch
from k3quant.eval.weights import StoredPart, decode_weight
from k3quant.models.k3_config import K3Config, VisionConfig
from k3quant.models.k3_tensors import TensorSpec, accepted_dtypes, shard_tensors
from k3quant.schemes.storage import SUFFIXES, storage_of

_FIRST_ROLES = frozenset({"vision.patch_embed", "vision.pos_emb"})
_HINT = "`k3quant verify --level schema` lists every disagreement"

Parts = dict[str, dict[str, StoredPart]]


class VisionUnit(NamedTuple):
    """What is read in one go: the patch embedding, a block, or what follows the blocks."""

    specs: tuple[TensorSpec, ...]
    num_bytes: int


class VisionWeights:
    """Reads the tower's weights in the order in which they are used.

    Attributes:
        vision: The tower's config.
        dtype: Dtype of weights and activations.
        device: Where they are put.
        bytes_read: Bytes read so far.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: K3Config, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Check names, shapes and dtypes.

        Raises:
            RefusedError: The config has no vision tower.
            SchemaError: A tensor is missing, or stored in no known way.
        """
        if config.vision is None:
            raise RefusedError(
                f"{checkpoint.source.label}: expected a vision tower for media, got a text model",
                hint="a cut may have left the tower out; evaluate text with --text",
            )
        self.vision: VisionConfig = config.vision
        self.dtype = dtype
        self.device = device
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._config = config
        tower = config.num_hidden_layers + 3
        table = shard_tensors(config, tower) + shard_tensors(config, tower - 1)
        groups: dict[int, list[TensorSpec]] = {}
        for spec in table:
            groups.setdefault(self._place(spec), []).extend(self._stored(spec))
        self._units = [self._unit(groups[place]) for place in sorted(groups)]

    def walk(self) -> Generator[Mapping[str, Tensor]]:
        """Yield the weights by role: of the patch embedding, of each block, of the end.

        The bytes of the next unit are read while the caller computes.

        Raises:
            K3QuantError: A read failed.
            ValuesError: A stored scale or value cannot be decoded.
        """
        largest = max(unit.num_bytes for unit in self._units)
        with Prefetch(self._units, self._read, budget_bytes=largest, threads=1) as queue:
            for _ in self._units:
                unit, parts = queue.take()
                self.bytes_read += unit.num_bytes
                yield {
                    role: decode_weight(part, dtype=self.dtype).to(self.device)
                    for role, part in parts.items()
                }

    def find_non_finite(self, place: int) -> tuple[str, int] | None:
        """Return the first tensor of the n-th unit of a walk that is not finite, and how much."""
        for parts in self._read(self._units[place]).values():
            weight = decode_weight(parts, dtype=torch.float32)
            found = int((~torch.isfinite(weight)).sum())
            if found:
                return next(iter(parts.values())).name, found
        return None

    def _place(self, spec: TensorSpec) -> int:
        if spec.layer is not None:
            return spec.layer
        return -1 if spec.role in _FIRST_ROLES else self.vision.num_hidden_layers

    def _unit(self, specs: list[TensorSpec]) -> VisionUnit:
        num_bytes = sum(self._checkpoint.entry(spec.name).length for spec in specs)
        return VisionUnit(tuple(specs), num_bytes)

    def _stored(self, spec: TensorSpec) -> list[TensorSpec]:
        """Return the stored tensors of a weight, whole or in the parts of a format."""
        entries = self._checkpoint.entries
        found = {s: entries[n] for s in SUFFIXES if (n := f"{spec.module}.{s}") in entries}
        kinds = {suffix: (entry.dtype, entry.shape) for suffix, entry in found.items()}
        if len(spec.shape) == 2 and len(kinds) > 1:
            if storage_of(kinds, *spec.shape) is None:
                raise SchemaError(
                    f"{spec.module}: expected a known storage form of {list(spec.shape)}, got "
                    f"{kinds}",
                    hint=_HINT,
                )
            return [
                spec._replace(name=f"{spec.module}.{suffix}", part=suffix)
                for suffix in kinds
                if not suffix.startswith("input_")
            ]
        entry = self._checkpoint.entry(spec.name)
        if entry.shape != spec.shape:
            message = f"{spec.name}: expected shape {list(spec.shape)}, got {list(entry.shape)}"
            raise SchemaError(message, hint=_HINT)
        dtypes = accepted_dtypes(self._config, spec)
        if entry.dtype not in dtypes:
            message = f"{spec.name}: expected dtype {dtypes[0]}, got {entry.dtype}"
            raise SchemaError(message, hint=_HINT)
        return [spec]

    def _read(self, unit: VisionUnit) -> Parts:
        parts: Parts = {}
        for spec in unit.specs:
            entry = self._checkpoint.entry(spec.name)
            data = torch.empty(entry.length, dtype=torch.uint8)
            self._checkpoint.read_into(spec.name, data.numpy())
            part = StoredPart(spec.name, entry.dtype, entry.shape, data)
            parts.setdefault(spec.role, {})[spec.part] = part
        return parts
