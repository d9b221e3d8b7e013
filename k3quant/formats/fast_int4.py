"""MXFP4 and floats to INT4 groups on the processor, bit for bit as `int4`, without torch.

Scales and integers are the reference's; the error is that of what is stored, decoded to float32.
Where two scales of 16 bits are equally good up to rounding, the reference decides, and only then
does this import torch.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3quant.errors import SchemaError
from k3quant.formats.error_sums import ErrorSums
from k3quant.formats.fast_int_cast import CastRuns, cast_runs, refuse_unfit
from k3quant.formats.fast_int_round import Compare, round_runs
from k3quant.formats.fast_mxfp4 import check_pair, dequantize_to_bf16
from k3quant.formats.int_grid import Int4Range, ScaleDtype, store_scales

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]

GROUP_SIZES = (32, 128)
_PER_WORD = 8


class Int4Arrays(NamedTuple):
    """A quantized weight.

    Attributes:
        words: `[..., cols / 8]` int32.
        scale: `[..., cols / group_size]` float32, float16, or the bits of bfloat16 in uint16.
        sums: How far values moved.
    """

    words: Words
    scale: npt.NDArray[Any]
    sums: ErrorSums


def cast_to_int4(
    packed: Bytes,
    scale_e8m0: Bytes,
    *,
    group_size: int,
    grid: Int4Range = Int4Range.FULL,
    scale_dtype: ScaleDtype = "F32",
    out: Words | None = None,
    threads: int = 1,
) -> Int4Arrays:
    """Round an MXFP4 weight to INT4, from its codes.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        group_size: Elements under one scale, 32 or 128.
        grid: Which integers to use.
        scale_dtype: How the scale is stored.
        out: `[..., cols / 8]` int32 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        What `int4.quantize_int4` gives for the float32 values, and how far they moved.

    Raises:
        SchemaError: The scale grid does not fit, or the columns are no multiple of `group_size`.
        ValuesError: A scale byte is 255, a value overflows float32, or a scale its type.
    """
    shape = check_pair(packed, scale_e8m0)
    out = _output(shape, group_size, out)
    if _is_compared(grid, scale_dtype):
        # The best scale depends on all values of a group, which bfloat16 holds exactly.
        refuse_unfit(packed, scale_e8m0)
        values = dequantize_to_bf16(packed, scale_e8m0, threads=threads)
        found = round_runs(
            values, out.view(np.uint8), run=group_size, grid=grid.grid, dtype=scale_dtype,
            compare="F32", threads=threads,
        )  # fmt: skip
        return _arrays(out, found, group_size, scale_dtype)
    found = cast_runs(
        packed, scale_e8m0, out.view(np.uint8), run=group_size, grid=grid.grid, dtype=scale_dtype,
        threads=threads,
    )  # fmt: skip
    return _arrays(out, found, group_size, scale_dtype)


def quantize_to_int4(
    weight: npt.NDArray[Any],
    *,
    group_size: int,
    grid: Int4Range = Int4Range.FULL,
    scale_dtype: ScaleDtype = "F32",
    out: Words | None = None,
    threads: int = 1,
) -> Int4Arrays:
    """Round floats to INT4.

    Args:
        weight: `[..., cols]` float32, or the bits of bfloat16 in uint16, contiguous.
        group_size: Elements under one scale, 32 or 128.
        grid: Which integers to use.
        scale_dtype: How the scale is stored.
        out: `[..., cols / 8]` int32 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        What `int4.quantize_int4` gives, and how far values moved.

    Raises:
        SchemaError: The columns are no multiple of `group_size`.
        ValuesError: A value is NaN or infinite, a scale is beyond its type, or what is decoded
            beyond float32.
    """
    out = _output(weight.shape, group_size, out)
    own: Compare = "BF16" if weight.dtype == np.uint16 else "F32"
    found = round_runs(
        weight, out.view(np.uint8), run=group_size, grid=grid.grid, dtype=scale_dtype,
        compare=own if _is_compared(grid, scale_dtype) else None, threads=threads,
    )  # fmt: skip
    return _arrays(out, found, group_size, scale_dtype)


def _is_compared(grid: Int4Range, scale_dtype: ScaleDtype) -> bool:
    """Return whether the reference compares a scale with its neighbours."""
    return grid is Int4Range.BALANCED and scale_dtype != "F32"


def _output(shape: tuple[int, ...], group_size: int, out: Words | None) -> Words:
    *lead, cols = shape
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: expected 32 or 128, got {group_size}")
    if cols % group_size:
        raise SchemaError(
            f"columns: expected a multiple of {group_size}, got {cols}",
            hint=f"keep this tensor in a format without runs of {group_size}",
        )
    words = (*lead, cols // _PER_WORD)
    out = np.empty(words, np.int32) if out is None else out
    if out.shape != words or out.dtype != np.int32 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous int32 {list(words)}, got {list(out.shape)}")
    return out


def _arrays(words: Words, found: CastRuns, group_size: int, dtype: ScaleDtype) -> Int4Arrays:
    *lead, count = words.shape
    scale = store_scales(found.scale, dtype).reshape(*lead, count * _PER_WORD // group_size)
    return Int4Arrays(words, scale, found.sums)
