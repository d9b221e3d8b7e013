"""Float tensors on their way into a target: copied, widened, narrowed, or split by heads."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.buffers import copy_bytes, scratch
from k3quant.convert.export_plan import Write
from k3quant.convert.proof import WeightProof
from k3quant.errors import K3QuantError, ValuesError
from k3quant.formats.dtypes import torch_dtype
from k3quant.formats.error import ErrorSum
from k3quant.formats.faults import overflow
from k3quant.formats.gguf_q8_0 import dequantize_q8_0, quantize_q8_0

_ROW_ELEMENTS = 4 << 20
_LOCAL = threading.local()

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatUnit:
    """One float tensor, kept or rounded to another type, a run of rows at a time.

    Attributes:
        source: Its name.
        module: What the proof calls it.
        family: Family of the table.
        source_dtype: Its type.
        target: Output tensor that it fills, or fills a part of.
        target_dtype: Type of the output tensor: a float type, or `Q8_0`.
        offset: First byte in the output tensor.
    """

    source: str
    module: str
    family: str
    source_dtype: str
    target: str
    target_dtype: str
    offset: int = 0

    @property
    def sources(self) -> Sequence[str]:
        """The tensor."""
        return (self.source,)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Copy or convert it.

        Raises:
            ValuesError: A value is beyond the target type.
        """
        sums = ErrorSum()
        if self.source_dtype == self.target_dtype:
            copy_bytes(checkpoint, self.source, write, target=self.target, offset=self.offset)
        else:
            self._convert(checkpoint, write, sums)
        return (float_proof(self, sums),)

    def _convert(self, checkpoint: Checkpoint, write: Write, sums: ErrorSum) -> None:
        entry = checkpoint.entry(self.source)
        cols = entry.shape[-1]
        elements = torch_dtype(entry.dtype).itemsize
        step = max(_ROW_ELEMENTS // cols, 1) * cols * elements
        offset = self.offset
        for begin in range(0, entry.length, step):
            raw = scratch().array("rows", (min(step, entry.length - begin),), np.uint8)
            checkpoint.read_into(self.source, raw, offset=begin)  # type: ignore[arg-type]
            values = torch.from_numpy(raw).view(torch_dtype(entry.dtype)).reshape(-1, cols)
            encoded = _encode_named(self.source, values, self.target_dtype, sums)
            write(self.target, offset, encoded)
            offset += encoded.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHeadsUnit:
    """The up-projection of k and v, apart: k's rows of each head transposed, v's as they are.

    So a reader multiplies the query by k's part and stays in the latent space.

    Attributes:
        source: Its name, `[heads x (nope + v), rank]`.
        module: What the proof calls it.
        family: Family of the table.
        source_dtype: Its type.
        target_dtype: Type of both output tensors.
        k_target: Output tensor `[heads, rank, nope]`.
        v_target: Output tensor `[heads, v, rank]`.
        heads: Heads.
        nope: Rows of k a head.
    """

    source: str
    module: str
    family: str
    source_dtype: str
    target_dtype: str
    k_target: str
    v_target: str
    heads: int
    nope: int

    @property
    def sources(self) -> Sequence[str]:
        """The tensor."""
        return (self.source,)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Split it.

        Raises:
            ValuesError: A value is beyond the target type.
        """
        values = read_floats(checkpoint, self.source)
        by_head = values.view(self.heads, -1, values.shape[-1])
        parts = {
            self.k_target: by_head[:, : self.nope].transpose(1, 2).contiguous(),
            self.v_target: by_head[:, self.nope :].contiguous(),
        }
        sums = ErrorSum()
        for target, part in parts.items():
            write(target, 0, _encode_named(self.source, part, self.target_dtype, sums))
        return (float_proof(self, sums),)


def float_proof(unit: FloatUnit | SplitHeadsUnit, sums: ErrorSum) -> WeightProof:
    """Return the record of a tensor; the sums are empty where no value can have moved."""
    error = sums.result()
    return WeightProof(
        module=unit.module,
        family=unit.family,
        source=unit.source_dtype,
        target=unit.target_dtype,
        exact=error.exact,
        error=error if error.count else None,
    )


def encode_values(values: Tensor, dtype: str, sums: ErrorSum) -> Bytes:
    """Encode floats and measure what that changed.

    Args:
        values: `[..., cols]` floating.
        dtype: The target: `F32`, `BF16`, `F16` or `Q8_0`.
        sums: Receives the error, unless the type only widens.

    Returns:
        The bytes, flat.

    Raises:
        SchemaError: Columns are no whole blocks of Q8_0.
        ValuesError: A value is beyond the target type.
    """
    if dtype == "Q8_0":
        blocks = quantize_q8_0(values)
        sums.add(values.float(), dequantize_q8_0(blocks))
        return _bytes_of(blocks)
    target = torch_dtype(dtype)
    result = values.to(target)
    if target not in (values.dtype, torch.float32):
        beyond = torch.isinf(result) & torch.isfinite(values)
        if bool(beyond.any()):
            raise overflow(
                dtype.lower(), dtype, f"a magnitude of {float(values[beyond].abs().max())}"
            )
        sums.add(values.float(), result.float())
    return _bytes_of(result)


def read_floats(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a whole float tensor, in its stored shape."""
    entry = checkpoint.entry(name)
    raw = torch.from_numpy(checkpoint.read(name))
    return raw.view(torch_dtype(entry.dtype)).reshape(entry.shape)


def check_padding(name: str, padding: Tensor) -> None:
    """Refuse to cut off anything but zeros.

    Raises:
        ValuesError: A value is not zero.
    """
    nonzero = int(torch.count_nonzero(padding))
    if nonzero:
        raise ValuesError(
            f"{name}: expected zeros beyond the heads, got {nonzero} other values",
            hint="the target keeps one value a head; these would be lost",
        )


def _encode_named(name: str, values: Tensor, dtype: str, sums: ErrorSum) -> Bytes:
    try:
        return encode_values(values, dtype, sums)
    except K3QuantError as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error


def _bytes_of(tensor: Tensor) -> Bytes:
    array: Bytes = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return array
