"""One matrix into one format: arrays in, arrays out, and what was kept and lost.

From MXFP4 the casts keep every value they can and count the rest; from floats the matrix is
quantized, and the error is measured on what was encoded, decoded again. Casts to integers say what
that error is.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.convert.buffers import Scratch
from k3quant.convert.choice import GLOBAL, PACKED, SCALE, SHAPE, WEIGHT, Choice, Format
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.error import ErrorSum, WeightError
from k3quant.formats.fast_bf16_fp8 import quantize_bf16_to_fp8
from k3quant.formats.fast_fp8 import cast_to_fp8, cast_to_mxfp8
from k3quant.formats.fast_int4 import Int4Arrays, cast_to_int4, quantize_to_int4
from k3quant.formats.fast_int8 import Int8Arrays, cast_to_int8, quantize_to_int8
from k3quant.formats.fast_mxfp4 import dequantize_to_bf16
from k3quant.formats.fast_nvfp4 import cast_to_nvfp4
from k3quant.formats.fp8_block import quantize_fp8_block
from k3quant.formats.fp8_channel import quantize_fp8_channel
from k3quant.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from k3quant.formats.mxfp8 import quantize_mxfp8
from k3quant.formats.nvfp4 import (
    GlobalConvention,
    GlobalScale,
    global_scale_of_exponent,
    quantize_nvfp4,
)
from k3quant.schemes.decode import decode_matrix

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A matrix, or some of its rows, in a format.

    Attributes:
        parts: Stored arrays by part; E4M3 as bytes, BF16 as its 16-bit patterns.
        counts: Blocks kept and lost, for a cast from MXFP4.
        error: How far values moved, where they may have.
    """

    parts: dict[str, Array]
    counts: CastCounts | None = None
    error: WeightError | None = None

    @property
    def exact(self) -> bool:
        """Whether every value is unchanged."""
        if self.counts is not None and self.counts.lossless:
            return True
        return self.error is not None and self.error.exact


def encode_from_mxfp4(
    packed: Bytes, scale_e8m0: Bytes, choice: Choice, scratch: Scratch, *, exponent: int = 0
) -> Encoded:
    """Cast an MXFP4 matrix.

    Args:
        packed: `[rows, cols / 2]` uint8, low nibble first.
        scale_e8m0: `[rows, cols / 32]` uint8.
        choice: The format.
        scratch: The worker's buffers; the result may live in them.
        exponent: For NVFP4, the power of two of the tensor's scale.

    Raises:
        ValuesError: A scale is NaN, or a value overflows the format.
    """
    rows, cols = packed.shape[0], packed.shape[1] * 2
    blocks = CastCounts(blocks=scale_e8m0.size, exact=scale_e8m0.size)
    match choice.format:
        case Format.KEEP | Format.MXFP4:
            return Encoded(parts={PACKED: packed, SCALE: scale_e8m0}, counts=blocks)
        case Format.BF16:
            out = scratch.array("bf16", (rows, cols), np.uint16)
            return Encoded(parts={WEIGHT: dequantize_to_bf16(packed, scale_e8m0, out=out)},  # type: ignore[arg-type]
                           counts=blocks)  # fmt: skip
        case Format.MXFP8:
            out = scratch.array("fp8", (rows, cols), np.uint8)
            codes = cast_to_mxfp8(packed, scale_e8m0, out=out)  # type: ignore[arg-type]
            return Encoded(parts={WEIGHT: codes, SCALE: scale_e8m0}, counts=blocks)
        case Format.NVFP4:
            cast = cast_to_nvfp4(packed, scale_e8m0, exponent=exponent)
            scale = global_scale_of_exponent(exponent, GlobalConvention.DIVISOR)
            parts: dict[str, Array] = {
                PACKED: cast.packed,
                SCALE: cast.scale_e4m3,
                GLOBAL: np.array([scale.value], np.float32),
            }
            return _measured(packed, scale_e8m0, choice, parts, cast.counts)
        case Format.FP8_BLOCK | Format.FP8_CHANNEL:
            shape = (128, 128) if choice.format is Format.FP8_BLOCK else (1, cols)
            tiles = cast_to_fp8(packed, scale_e8m0, block_shape=shape)
            parts = {WEIGHT: tiles.codes, SCALE: tiles.scale}
            return _measured(packed, scale_e8m0, choice, parts, tiles.counts)
        case Format.INT8:
            out = scratch.array("int8", (rows, cols), np.int8)
            return _integers(cast_to_int8(packed, scale_e8m0, out=out), ErrorSum())  # type: ignore[arg-type]
        case Format.INT4:
            out = scratch.array("int4", (rows, cols // 8), np.int32)
            groups = cast_to_int4(
                packed,
                scale_e8m0,
                group_size=choice.group_size,
                scale_dtype="BF16",
                out=out,  # type: ignore[arg-type]
            )
            return _integers(groups, ErrorSum())


def encode_floats(
    values: Tensor, choice: Choice, sums: ErrorSum, *, global_scale: GlobalScale | None = None
) -> dict[str, Array]:
    """Quantize a float matrix, or some of its rows in whole tiles.

    Args:
        values: `[rows, cols]` floating.
        choice: The format; not `KEEP`.
        sums: Receives the error of what was encoded, as a reader decodes it.
        global_scale: The tensor's scale, for NVFP4.

    Returns:
        Stored arrays by part.

    Raises:
        ValuesError: A value is NaN or infinite, or overflows the format.
    """
    match choice.format:
        case Format.INT8:
            return _integers(quantize_to_int8(_floats(values)), sums).parts
        case Format.INT4:
            groups = quantize_to_int4(
                _floats(values), group_size=choice.group_size, scale_dtype="BF16"
            )
            return _integers(groups, sums).parts
    parts = {p: _array(t) for p, t in _quantize(values, choice, global_scale).items()}
    sums.add(values.float(), decode_parts(choice, parts, (values.shape[0], values.shape[1])))
    return parts


def storage_name(choice: Choice) -> str:
    """Return the storage form of a format's parts."""
    if choice.format is Format.INT4:
        return f"int4-g{choice.group_size}"
    return choice.format.value


def _quantize(
    values: Tensor, choice: Choice, global_scale: GlobalScale | None
) -> dict[str, Tensor]:
    match choice.format:
        case Format.BF16:
            return {WEIGHT: values.to(torch.bfloat16).view(torch.uint16)}
        case Format.MXFP4:
            return dict(zip((PACKED, SCALE), quantize_mxfp4(values, choice.rounding), strict=True))
        case Format.MXFP8:
            return dict(zip((WEIGHT, SCALE), quantize_mxfp8(values, choice.rounding), strict=True))
        case Format.NVFP4:
            assert global_scale is not None
            packed, scale = quantize_nvfp4(values, global_scale)
            return {PACKED: packed, SCALE: scale, GLOBAL: torch.tensor([global_scale.value])}
        case Format.FP8_BLOCK | Format.FP8_CHANNEL:
            return _quantize_fp8(values, choice)
        case Format.KEEP | Format.INT8 | Format.INT4:
            raise ValueError(f"{choice.format}: expected a format that is quantized here")


def _quantize_fp8(values: Tensor, choice: Choice) -> dict[str, Tensor]:
    tiles = choice.format is Format.FP8_BLOCK
    if values.dtype is torch.bfloat16 and values.numel():
        bits: npt.NDArray[np.uint16] = values.contiguous().view(torch.uint16).numpy()
        shape = (128, 128) if tiles else (1, values.shape[1])
        codes, scale = quantize_bf16_to_fp8(bits, block_shape=shape)
        return {WEIGHT: torch.from_numpy(codes), SCALE: torch.from_numpy(scale)}
    quantize = quantize_fp8_block if tiles else quantize_fp8_channel
    return dict(zip((WEIGHT, SCALE), quantize(values), strict=True))


def _integers(found: Int8Arrays | Int4Arrays, sums: ErrorSum) -> Encoded:
    """Return the parts of integers under scales, and add their error to the sums."""
    sums.add_sums(found.sums)
    if isinstance(found, Int8Arrays):
        return Encoded(parts={WEIGHT: found.codes, SCALE: found.scale}, error=sums.result())
    rows, words = found.words.shape
    shape = np.array([rows, words * 8])
    parts: dict[str, Array] = {PACKED: found.words, SCALE: found.scale, SHAPE: shape}
    return Encoded(parts=parts, error=sums.result())


def _floats(values: Tensor) -> npt.NDArray[np.uint16] | npt.NDArray[np.float32]:
    """Return the bits of bfloat16, anything else as float32."""
    if values.dtype is torch.bfloat16:
        bits: npt.NDArray[np.uint16] = values.contiguous().view(torch.uint16).numpy()
        return bits
    wide: npt.NDArray[np.float32] = values.float().contiguous().numpy()
    return wide


def _measured(
    packed: Bytes,
    scale_e8m0: Bytes,
    choice: Choice,
    parts: dict[str, Array],
    counts: CastCounts,
) -> Encoded:
    """Measure the error of a cast whose counts say that something was lost."""
    if counts.lossless:
        return Encoded(parts=parts, counts=counts)
    values = dequantize_mxfp4(_tensor(packed), _tensor(scale_e8m0), dtype=torch.float32)
    sums = ErrorSum()
    sums.add(values, decode_parts(choice, parts, (values.shape[0], values.shape[1])))
    return Encoded(parts=parts, counts=counts, error=sums.result())


def decode_parts(choice: Choice, parts: dict[str, Array], shape: tuple[int, int]) -> Tensor:
    """Decode encoded arrays to float32, as a reader of the file would.

    Args:
        choice: The format they are in.
        parts: The arrays.
        shape: Rows and columns.
    """
    if choice.format is Format.BF16:
        return _tensor(parts[WEIGHT]).view(torch.bfloat16).float()
    tensors = {part: _tensor(array) for part, array in parts.items()}
    if choice.format is Format.INT4:
        tensors[SCALE] = tensors[SCALE].view(torch.bfloat16)
    return decode_matrix(storage_name(choice), tensors, shape)


def _tensor(array: Array) -> Tensor:
    # torch has no read-only tensors and warns of read-only arrays; nothing here writes to them.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.contiguous().numpy()
    return array
