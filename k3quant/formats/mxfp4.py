"""MXFP4: blocks of 32 E2M1 codes along the columns under one E8M0 scale byte.

Example: codes 0..15 twice over scale byte 127 lie as `10 32 54 76 98 ba dc fe` twice, and 7f.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from k3quant.formats.blocks import (
    amax_of_runs,
    check_overflow,
    check_packed,
    join_runs,
    split_runs,
)
from k3quant.formats.e2m1 import (
    E2M1_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)
from k3quant.formats.e8m0 import (
    E2M1_ELEMENT,
    ScaleRounding,
    check_scales,
    decode_e8m0,
    scale_from_amax,
)
from k3quant.formats.mx import MX_BLOCK_SIZE

__all__ = [
    "MX_BLOCK_SIZE",
    "Fp16Losses",
    "count_fp16_losses",
    "dequantize_mxfp4",
    "limit_of_mxfp4",
    "quantize_mxfp4",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Losses:
    """Elements that float16 cannot hold.

    Attributes:
        flushed: Not zero in MXFP4, zero in float16.
        rounded: Not zero in float16, but another value.
        overflowed: Infinite in float16.
    """

    flushed: int
    rounded: int
    overflowed: int


def quantize_mxfp4(weight: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Round values to MXFP4.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 32.
        rounding: Rule for the scale byte.

    Returns:
        `[..., cols / 2]` uint8, the even column in the low nibble, and `[..., cols / 32]` uint8
        scale bytes. An all-zero block gets scale byte 0; zeros keep their sign.

    Raises:
        SchemaError: The columns are no multiple of 32.
        ValuesError: A value is NaN or infinite.
    """
    blocks = split_runs(weight, MX_BLOCK_SIZE)
    scale_e8m0 = scale_from_amax(amax_of_runs(blocks), rounding, element=E2M1_ELEMENT)
    # Division by a power of two is exact where it matters: a quotient small enough to lose bits
    # is far below 0.25 and becomes zero either way.
    codes = encode_e2m1(blocks.float() / decode_e8m0(scale_e8m0)[..., None])
    return pack_nibbles(join_runs(codes)), scale_e8m0


def dequantize_mxfp4(
    packed: Tensor, scale_e8m0: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute code * 2^(scale - 127).

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.
        dtype: float32 and bfloat16 hold every finite result exactly; float16 rounds to nearest
            even, see `count_fp16_losses`.

    Returns:
        `[..., cols]` in `dtype`. Code 8 gives -0.0.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255, or a value overflows `dtype`.
    """
    blocks = _decode(packed, scale_e8m0).to(dtype)
    check_overflow(blocks, scale_e8m0)
    return join_runs(blocks)


def count_fp16_losses(packed: Tensor, scale_e8m0: Tensor) -> Fp16Losses:
    """Count what a float16 copy would lose.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8, none 255.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    exact = _decode(packed, scale_e8m0)
    half = exact.half().float()
    flushed = (exact != 0) & (half == 0)
    overflowed = torch.isinf(half)
    rounded = (half != exact) & ~flushed & ~overflowed
    return Fp16Losses(
        flushed=int(flushed.sum()), rounded=int(rounded.sum()), overflowed=int(overflowed.sum())
    )


def limit_of_mxfp4(scale_e8m0: Tensor) -> Tensor:
    """Return the largest magnitude each block can hold, 6 * 2^(scale - 127), per element.

    Args:
        scale_e8m0: `[..., cols / 32]` uint8.

    Returns:
        `[..., cols]` float32.
    """
    return (decode_e8m0(scale_e8m0) * E2M1_MAX).repeat_interleave(MX_BLOCK_SIZE, dim=-1)


def _decode(packed: Tensor, scale_e8m0: Tensor) -> Tensor:
    """Return exact float32 blocks, `[..., blocks, 32]`; infinity above the float32 range."""
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    check_scales(scale_e8m0)
    codes = split_runs(unpack_nibbles(packed), MX_BLOCK_SIZE)
    return decode_e2m1(codes) * decode_e8m0(scale_e8m0)[..., None]
