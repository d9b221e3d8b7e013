"""MXFP4 and floats to INT8 rows on the processor, bit for bit as `int8_channel`, without torch."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3quant.formats.error_sums import ErrorSums
from k3quant.formats.fast_int_cast import CastRuns, cast_runs
from k3quant.formats.fast_int_round import round_runs
from k3quant.formats.fast_mxfp4 import check_pair
from k3quant.formats.int_grid import INT8_GRID

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]


class Int8Arrays(NamedTuple):
    """A quantized weight.

    Attributes:
        codes: `[..., rows, cols]` int8.
        scale: `[..., rows, 1]` float32.
        sums: How far values moved.
    """

    codes: Codes
    scale: npt.NDArray[np.float32]
    sums: ErrorSums


def cast_to_int8(
    packed: Bytes, scale_e8m0: Bytes, *, out: Codes | None = None, threads: int = 1
) -> Int8Arrays:
    """Round an MXFP4 weight to INT8, from its codes.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous, not empty.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        out: `[..., cols]` int8 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        What `int8_channel.quantize_int8_channel` gives for the float32 values, and how far they
        moved.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255, or a value overflows float32.
    """
    shape = check_pair(packed, scale_e8m0)
    out = _output(shape, out)
    found = cast_runs(
        packed, scale_e8m0, out.view(np.uint8), run=shape[-1], grid=INT8_GRID, dtype="F32",
        threads=threads,
    )  # fmt: skip
    return _arrays(out, found)


def quantize_to_int8(
    weight: npt.NDArray[Any], *, out: Codes | None = None, threads: int = 1
) -> Int8Arrays:
    """Round floats to INT8.

    Args:
        weight: `[..., cols]` float32, or the bits of bfloat16 in uint16, contiguous, not empty.
        out: `[..., cols]` int8 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        What `int8_channel.quantize_int8_channel` gives, and how far values moved.

    Raises:
        ValuesError: A value is NaN or infinite, or what is decoded is beyond float32.
    """
    out = _output(weight.shape, out)
    found = round_runs(
        weight, out.view(np.uint8), run=weight.shape[-1], grid=INT8_GRID, dtype="F32",
        threads=threads,
    )  # fmt: skip
    return _arrays(out, found)


def _output(shape: tuple[int, ...], out: Codes | None) -> Codes:
    out = np.empty(shape, np.int8) if out is None else out
    if out.shape != shape or out.dtype != np.int8 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous int8 {list(shape)}, got {list(out.shape)}")
    return out


def _arrays(codes: Codes, found: CastRuns) -> Int8Arrays:
    return Int8Arrays(codes, found.scale.reshape(*codes.shape[:-1], 1), found.sums)
