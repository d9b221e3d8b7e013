"""MXFP8: blocks of 32 E4M3 bytes along the columns under one E8M0 scale byte.

Example: byte 0x38 (1.0) under scale byte 117 is 2^-10; read as a number, 117 would be no scale.
"""

import torch
from torch import Tensor

from k3quant.formats.blocks import (
    amax_of_runs,
    check_overflow,
    check_shape,
    join_runs,
    split_runs,
)
from k3quant.formats.e4m3 import check_numbers, decode_e4m3, encode_e4m3
from k3quant.formats.e8m0 import (
    E4M3_ELEMENT,
    ScaleRounding,
    check_scales,
    decode_e8m0,
    scale_from_amax,
)
from k3quant.formats.mx import MX_BLOCK_SIZE


def quantize_mxfp8(weight: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Round values to MXFP8.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 32.
        rounding: Rule for the scale byte.

    Returns:
        `[..., cols]` uint8 E4M3 bytes and `[..., cols / 32]` uint8 scale bytes. An all-zero block
        gets scale byte 0; zeros keep their sign.

    Raises:
        SchemaError: The columns are no multiple of 32.
        ValuesError: A value is NaN or infinite.
    """
    blocks = split_runs(weight, MX_BLOCK_SIZE)
    scale_e8m0 = scale_from_amax(amax_of_runs(blocks), rounding, element=E4M3_ELEMENT)
    codes = encode_e4m3(blocks.float() / decode_e8m0(scale_e8m0)[..., None])
    return join_runs(codes), scale_e8m0


def dequantize_mxfp8(
    codes: Tensor, scale_e8m0: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute value * 2^(scale - 127).

    Args:
        codes: `[..., cols]` uint8 E4M3 bytes.
        scale_e8m0: `[..., cols / 32]` uint8.
        dtype: float32 holds every finite result exactly, bfloat16 does from scale byte 3 on.

    Returns:
        `[..., cols]` in `dtype`.

    Raises:
        SchemaError: The scale grid does not fit.
        ValuesError: A byte of codes or scales is NaN, or a value overflows `dtype`.
    """
    check_shape("scale grid", scale_e8m0, (*codes.shape[:-1], codes.shape[-1] // MX_BLOCK_SIZE))
    check_scales(scale_e8m0)
    check_numbers(codes)
    values = split_runs(decode_e4m3(codes), MX_BLOCK_SIZE) * decode_e8m0(scale_e8m0)[..., None]
    blocks = values.to(dtype)
    check_overflow(blocks, scale_e8m0)
    return join_runs(blocks)
