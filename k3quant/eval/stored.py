"""The language model's tensors in a checkpoint, proved against the table."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint
from k3quant.errors import SchemaError
from k3quant.eval.weights import StoredPart
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import (
    TensorSpec,
    accepted_dtypes,
    accepted_shapes,
    layer_tensors,
    shard_tensors,
)
from k3quant.schemes.storage import SUFFIXES, mismatches, nearest_storage, storage_of


def place_name(layer: int, expert: int | None) -> str:
    """Return how messages name a layer, or one of its experts."""
    return f"layer {layer}" if expert is None else f"layer {layer}, expert {expert}"


def exact_roles(specs: Sequence[TensorSpec]) -> frozenset[str]:
    """Return the roles that the release stores in float32 and the model computes with in float32.

    A float32 scale beside smaller codes does not make a weight one of them.
    """
    smaller = {spec.role for spec in specs if spec.dtype != "F32"}
    return frozenset(spec.role for spec in specs) - smaller


class StoredTensors:
    """Reads tensors of the language model and counts the bytes; safe to use from any thread.

    Attributes:
        config: The checkpoint's config.
        bytes_read: Bytes read so far.
    """

    def __init__(self, checkpoint: Checkpoint, config: K3Config) -> None:
        """Check the names, shapes and dtypes of the language model.

        Raises:
            SchemaError: A tensor is missing, or stored in another shape or dtype.
        """
        self.config = config
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._globals: dict[str, TensorSpec] = {}
        for spec in shard_tensors(config, config.num_hidden_layers + 1):
            (self._globals[spec.role],) = self._plain(spec)
        self._layers = [self._specs_of(layer) for layer in range(config.num_hidden_layers)]

    @property
    def global_roles(self) -> tuple[str, ...]:
        """Roles of the tensors outside the layers."""
        return tuple(self._globals)

    def global_name(self, role: str) -> str:
        """Return the name of a tensor outside the layers."""
        return self._globals[role].name

    def layer_specs(self, layer: int) -> list[TensorSpec]:
        """Return the tensors of a layer as they are stored; `part` is then the stored suffix."""
        return self._layers[layer]

    def _specs_of(self, layer: int) -> list[TensorSpec]:
        table = layer_tensors(self.config, layer, packed=False)
        return [stored for spec in table for stored in self._stored(spec)]

    def read_layer(self, layer: int) -> Iterator[Mapping[str, StoredPart]]:
        """Read the parts of a layer's weights, one weight at a time, its own before its experts'.

        Raises:
            K3QuantError: A read failed.
        """
        specs = sorted(self.layer_specs(layer), key=lambda s: -1 if s.expert is None else s.expert)
        for _, weight in groupby(specs, key=lambda spec: (spec.expert, spec.role)):
            yield self._read(tuple(weight))

    def read_global(self, role: str) -> Mapping[str, StoredPart]:
        """Read a tensor outside the layers."""
        return self._read((self._globals[role],))

    def read_rows(self, role: str, first: int, last: int) -> Mapping[str, StoredPart]:
        """Read the rows `first` to `last - 1` of a table outside the layers."""
        spec = self._globals[role]
        entry = self._checkpoint.entry(spec.name)
        row_bytes = self.row_bytes(role)
        data = self._read_bytes(spec.name, first * row_bytes, (last - first) * row_bytes)
        return {
            spec.part: StoredPart(spec.name, entry.dtype, (last - first, *entry.shape[1:]), data)
        }

    def row_bytes(self, role: str) -> int:
        """Return the stored bytes of a row of a table outside the layers."""
        entry = self._checkpoint.entry(self._globals[role].name)
        return entry.length // entry.shape[0]

    def _read(self, specs: Sequence[TensorSpec]) -> dict[str, StoredPart]:
        parts: dict[str, StoredPart] = {}
        for spec in specs:
            entry = self._checkpoint.entry(spec.name)
            data = self._read_bytes(spec.name, 0, entry.length)
            parts[spec.part] = StoredPart(spec.name, entry.dtype, entry.shape, data)
        return parts

    def _read_bytes(self, name: str, offset: int, length: int) -> Tensor:
        data = torch.empty(length, dtype=torch.uint8)
        self._checkpoint.read_into(name, data.numpy(), offset=offset)
        self.count(length)
        return data

    def count(self, length: int) -> None:
        """Count bytes that were read past this object."""
        with self._lock:
            self.bytes_read += length

    def _stored(self, spec: TensorSpec) -> list[TensorSpec]:
        """Return the stored tensors of a weight of the table, whole or in the parts of a format."""
        entries = self._checkpoint.entries
        entry = entries.get(spec.name)
        if entry is not None and entry.dtype in accepted_dtypes(self.config, spec):
            return self._plain(spec)
        parts = {s: entries[n] for s in SUFFIXES if (n := f"{spec.module}.{s}") in entries}
        if len(spec.shape) != 2 or not parts:
            return self._plain(spec)
        kinds = {suffix: (part.dtype, part.shape) for suffix, part in parts.items()}
        storage = storage_of(kinds, *spec.shape)
        if storage is None:
            nearest = nearest_storage(kinds, *spec.shape)
            suffix, expected, got = next(mismatches(nearest, kinds, *spec.shape))
            message = f"{spec.module}.{suffix}: expected {expected} ({nearest.name}), got {got}"
            raise SchemaError(message, hint=_HINT)
        return [
            spec._replace(name=f"{spec.module}.{s}", dtype=d, shape=shape, part=s)
            for s, (d, shape) in kinds.items()
            if not s.startswith("input_")
        ]

    def _plain(self, spec: TensorSpec) -> list[TensorSpec]:
        entry = self._checkpoint.entry(spec.name)
        shapes, dtypes = accepted_shapes(self.config, spec), accepted_dtypes(self.config, spec)
        if entry.shape not in shapes:
            message = f"{spec.name}: expected shape {list(shapes[0])}, got {list(entry.shape)}"
            raise SchemaError(message, hint=_HINT)
        if entry.dtype not in dtypes:
            message = f"{spec.name}: expected dtype {dtypes[0]}, got {entry.dtype}"
            raise SchemaError(message, hint=_HINT)
        return [spec]


_HINT = "`k3quant verify --level schema` lists every disagreement"
