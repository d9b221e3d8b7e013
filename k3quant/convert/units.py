"""Units of work: read source tensors, encode them, write what a scheme calls the result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.buffers import Scratch, copy_bytes, scratch
from k3quant.convert.choice import FP8_TILE, GLOBAL, SHAPE, Choice, Format
from k3quant.convert.encode import Encoded, encode_floats, encode_from_mxfp4
from k3quant.convert.export_plan import Write
from k3quant.convert.proof import WeightProof
from k3quant.errors import K3QuantError, ValuesError
from k3quant.formats.dtypes import DTYPES, torch_dtype
from k3quant.formats.error import ErrorSum
from k3quant.formats.fast_nvfp4 import shared_exponent
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale, global_scale_of_amax
from k3quant.schemes.scheme import Scheme

_ROW_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyUnit:
    """A tensor whose bytes are kept."""

    name: str
    family: str
    dtype: str

    @property
    def sources(self) -> Sequence[str]:
        """The tensor."""
        return (self.name,)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Copy the bytes in bounded pieces."""
        copy_bytes(checkpoint, self.name, write, target=self.name)
        return (
            WeightProof(
                module=self.name,
                family=self.family,
                source=self.dtype,
                target=self.dtype,
                exact=True,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """One MXFP4 matrix: module, its two tensors, and what it becomes."""

    module: str
    packed: str
    scale: str
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUnit:
    """The matrices of one routed expert; w1 and w3 share an NVFP4 tensor scale.

    Attributes:
        family: Family of the table.
        matrices: w1, w2 and w3.
        written: Places in `matrices` whose result lies in this unit's file.
        shared: Places in `matrices` that share a tensor scale.
        scheme: How the result is spelled.
    """

    family: str
    matrices: tuple[PackedMatrix, ...]
    written: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    scheme: Scheme

    @property
    def sources(self) -> Sequence[str]:
        """Packed codes and scales of all matrices."""
        return [name for m in self.matrices for name in (m.packed, m.scale)]

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Cast every matrix."""
        buffers = scratch()
        pairs = [
            (_read(checkpoint, m.packed, buffers, f"packed{i}"),
             _read(checkpoint, m.scale, buffers, f"scale{i}"))
            for i, m in enumerate(self.matrices)
        ]  # fmt: skip
        exponents = self._exponents(pairs)
        proofs = []
        for i in self.written:
            matrix, (packed, scale) = self.matrices[i], pairs[i]
            try:
                encoded = encode_from_mxfp4(
                    packed, scale, matrix.choice, buffers, exponent=exponents[i]
                )
            except ValuesError as error:
                raise ValuesError(f"{matrix.module}: {error.message}", hint=error.hint) from error
            _write_whole(self.scheme, matrix.choice, matrix.module, encoded, write)
            proofs.append(_proof(matrix.module, self.family, "mxfp4", matrix.choice, encoded))
        return proofs

    def _exponents(
        self, pairs: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]
    ) -> list[int]:
        exponents = [0] * len(pairs)
        for group in self.shared:
            members = [i for i in group if self.matrices[i].choice.format is Format.NVFP4]
            if members:
                exponent = shared_exponent([pairs[i] for i in members])
                for i in members:
                    exponents[i] = exponent
        return exponents


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseUnit:
    """Float matrices that are quantized; several that a loader fuses share an NVFP4 scale.

    Attributes:
        label: What people call it.
        names: Tensors by name.
        modules: Modules, in the same order.
        written: Places in both lists whose result lies in this unit's file.
        family: Family of the table.
        choice: What they become.
        scheme: How the result is spelled.
    """

    label: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    written: tuple[int, ...]
    family: str
    choice: Choice
    scheme: Scheme

    @property
    def sources(self) -> Sequence[str]:
        """The tensors."""
        return self.names

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Quantize every matrix, some rows at a time."""
        scale = self._global_scale(checkpoint)
        return [
            self._convert(checkpoint, self.names[i], self.modules[i], scale, write)
            for i in self.written
        ]

    def _global_scale(self, checkpoint: Checkpoint) -> GlobalScale | None:
        if self.choice.format is not Format.NVFP4:
            return None
        amax = 0.0
        for name in self.names:
            for _, rows in _row_blocks(checkpoint, name, 1):
                amax = max(amax, float(rows.abs().max()))
        try:
            return global_scale_of_amax(amax, GlobalConvention.DIVISOR)
        except ValuesError as error:
            raise ValuesError(f"{self.label}: {error.message}", hint=error.hint) from error

    def _convert(
        self,
        checkpoint: Checkpoint,
        name: str,
        module: str,
        scale: GlobalScale | None,
        write: Write,
    ) -> WeightProof:
        rows, cols = checkpoint.entry(name).shape
        sizes = {
            entry: (shape[0], prod(shape[1:]) * DTYPES[dtype].bits // 8)
            for entry, dtype, shape in self.scheme.entries(self.choice, module, rows, cols)
            if shape
        }
        tile = FP8_TILE if self.choice.format is Format.FP8_BLOCK else 1
        sums = ErrorSum()
        for first, values in _row_blocks(checkpoint, name, tile):
            try:
                parts = encode_floats(values, self.choice, sums, global_scale=scale)
            except K3QuantError as error:
                message = f"{name}, rows from {first}: {error.message}"
                raise type(error)(message, hint=error.hint) from error
            for part, array in parts.items():
                target = f"{module}.{self.scheme.suffixes(self.choice, part)}"
                if part == SHAPE:
                    array = np.array([rows, cols])
                if part not in (GLOBAL, SHAPE):
                    lines, row_bytes = sizes[target]
                    place = first if lines == rows else first // tile
                    write(target, place * row_bytes, array.reshape(-1).view(np.uint8))
                elif first == 0:
                    write(target, 0, self.scheme.value(part, array).reshape(-1).view(np.uint8))
        _write_constants(self.scheme, self.choice, module, write)
        found = sums.result()
        return WeightProof(
            module=module,
            family=self.family,
            source=checkpoint.entry(name).dtype,
            target=self.choice.format.value,
            exact=found.exact,
            error=found,
        )


def _read(checkpoint: Checkpoint, name: str, scratch: Scratch, key: str) -> npt.NDArray[np.uint8]:
    entry = checkpoint.entry(name)
    array: npt.NDArray[np.uint8] = scratch.array(key, entry.shape, np.uint8)  # type: ignore[assignment]
    checkpoint.read_into(name, array)
    return array


def _row_blocks(checkpoint: Checkpoint, name: str, tile: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row and `[rows, cols]` of a float matrix, in whole tiles of rows."""
    entry = checkpoint.entry(name)
    rows, cols = entry.shape
    step = max(_ROW_ELEMENTS // cols // tile, 1) * tile
    dtype = torch_dtype(entry.dtype)
    row_bytes = entry.length // rows
    for first in range(0, rows, step):
        values = torch.empty((min(step, rows - first), cols), dtype=dtype)
        raw = values.view(torch.uint8).numpy()
        checkpoint.read_into(name, raw, offset=first * row_bytes)
        yield first, values


def _write_whole(
    scheme: Scheme, choice: Choice, module: str, encoded: Encoded, write: Write
) -> None:
    for part, array in encoded.parts.items():
        target = f"{module}.{scheme.suffixes(choice, part)}"
        write(target, 0, scheme.value(part, array).reshape(-1).view(np.uint8))
    _write_constants(scheme, choice, module, write)


def _write_constants(scheme: Scheme, choice: Choice, module: str, write: Write) -> None:
    for suffix, array in scheme.constants(choice).items():
        write(f"{module}.{suffix}", 0, array.reshape(-1).view(np.uint8))


def _proof(module: str, family: str, source: str, choice: Choice, encoded: Encoded) -> WeightProof:
    return WeightProof(
        module=module,
        family=family,
        source=source,
        target=source if choice.format is Format.KEEP else choice.format.value,
        exact=encoded.exact,
        counts=encoded.counts,
        error=encoded.error,
    )
