"""INT4 in groups: integers under one scale a group, symmetric, eight to an int32 word.

Element i of a row lies at bits 4 * (i mod 8) of word i // 8, stored with 8 added.
Example: -8 -7 -1 0 1 2 6 7 is the word 0xFEA98710.
"""

import torch
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.blocks import (
    amax_of_runs,
    check_overflow,
    check_positive,
    check_shape,
    join_runs,
    scale_of_amax,
    split_runs,
)
from k3quant.formats.e2m1 import pack_nibbles, unpack_nibbles
from k3quant.formats.int_grid import Int4Range

__all__ = ["Int4Range", "dequantize_int4", "pack_int4", "quantize_int4", "unpack_int4"]

_OFFSET = 8
_PER_WORD = 8


def quantize_int4(
    weight: Tensor,
    *,
    group_size: int,
    grid: Int4Range = Int4Range.FULL,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Round values to INT4, ties to even.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of `group_size`.
        group_size: Elements under one scale.
        grid: Which integers to use.
        scale_dtype: Dtype of the stored scale; the scale is rounded to it before elements are
            divided by it, so that what is stored is what was used. Under BALANCED a 16-bit scale
            is the best of the three nearest: integers times a scale, written as bfloat16, come
            back as they were.

    Returns:
        `[..., ceil(cols / 8)]` int32 words and `[..., cols / group_size]` scales. An all-zero
        group gets scale 1.0.

    Raises:
        SchemaError: The columns are no multiple of `group_size`.
        ValuesError: A value is NaN or infinite.
    """
    groups = split_runs(weight, group_size)
    amax = amax_of_runs(groups).float()
    scale = scale_of_amax(amax, grid.divisor).clamp(min=torch.finfo(scale_dtype).tiny)
    scale = scale.to(scale_dtype)
    if grid is Int4Range.BALANCED and scale_dtype.itemsize == 2:
        scale = _best_neighbour(groups, scale)
    return pack_int4(join_runs(_steps(groups, scale, grid))), scale


def dequantize_int4(
    packed: Tensor,
    scale: Tensor,
    *,
    cols: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute integer * scale in float32.

    Args:
        packed: `[..., ceil(cols / 8)]` int32 words.
        scale: `[..., cols / group_size]` floating.
        cols: Columns of the weight; the words may hold up to seven more.
        group_size: Elements under one scale.
        dtype: Floating dtype of the result.

    Returns:
        `[..., cols]` in `dtype`.

    Raises:
        SchemaError: Words or scales do not fit `cols`.
        ValuesError: A scale is not finite and positive, or a value overflows `dtype`.
    """
    groups = split_runs(unpack_int4(packed, cols), group_size)
    check_shape("scale grid", scale, tuple(groups.shape[:-1]))
    check_positive(scale)
    values = (groups.float() * scale.float()[..., None]).to(dtype)
    check_overflow(values, scale)
    return join_runs(values)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack integers -8..7 into int32 words; a short last word is filled with zero bits.

    Args:
        codes: `[..., cols]` int8.

    Returns:
        `[..., ceil(cols / 8)]` int32.
    """
    nibbles = (codes + _OFFSET).to(torch.uint8)
    short = -codes.shape[-1] % _PER_WORD
    nibbles = torch.nn.functional.pad(nibbles, (0, short))
    # Eight nibbles, low first, are the four little-endian bytes of a word.
    return pack_nibbles(nibbles).contiguous().view(torch.int32)


def unpack_int4(packed: Tensor, cols: int) -> Tensor:
    """Take integers -8..7 out of int32 words.

    Args:
        packed: `[..., ceil(cols / 8)]` int32.
        cols: Columns of the weight.

    Returns:
        `[..., cols]` int8.

    Raises:
        SchemaError: The number of words does not fit `cols`.
    """
    words = -(-cols // _PER_WORD)
    if packed.shape[-1] != words:
        raise SchemaError(f"packed words: expected {words} a row, got {packed.shape[-1]}")
    nibbles = unpack_nibbles(packed.contiguous().view(torch.uint8))[..., :cols]
    return nibbles.to(torch.int8) - _OFFSET


def _steps(groups: Tensor, scale: Tensor, grid: Int4Range) -> Tensor:
    quotient = groups.float() / scale.float()[..., None]
    return quotient.round().clamp(grid.smallest, 7).to(torch.int8)


def _best_neighbour(groups: Tensor, scale: Tensor) -> Tensor:
    """Return the scale, or one of its neighbours of 16 bits where that is nearer to the values.

    The quotient of a rounded product need not be the factor: 7 * s in bfloat16, divided by 7, can
    be one bit off s.
    """
    bits = scale.view(torch.int16)
    candidates = [scale, *((bits + step).view(scale.dtype) for step in (1, -1))]
    errors = []
    for candidate in candidates:
        steps = _steps(groups, candidate, Int4Range.BALANCED)
        back = (steps.float() * candidate.float()[..., None]).to(groups.dtype)
        errors.append((back.double() - groups.double()).square().sum(dim=-1))
    best = torch.stack(errors).argmin(dim=0)  # the first of equals is the scale itself
    return torch.stack(candidates).gather(0, best[None])[0]
