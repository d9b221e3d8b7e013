"""Change an MXFP4 weight's format from its codes and scale bytes themselves, not from floats.

The casts here always keep every value; `cast_nvfp4` and `cast_fp8` keep those in their reach.
"""

import torch
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.e2m1 import E2M1_VALUES, unpack_nibbles
from k3quant.formats.e4m3 import encode_e4m3
from k3quant.formats.e8m0 import check_scales
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.formats.mxfp4 import dequantize_mxfp4


def cast_mxfp4_to_bf16(packed: Tensor, scale_e8m0: Tensor) -> tuple[Tensor, CastCounts]:
    """Write every value as bfloat16, which holds all of them below infinity.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.

    Returns:
        `[..., cols]` bfloat16 and the counts, always lossless.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255, or a value overflows; names row, block and byte.
    """
    weight = dequantize_mxfp4(packed, scale_e8m0, dtype=torch.bfloat16)
    return weight, CastCounts(blocks=scale_e8m0.numel(), exact=scale_e8m0.numel())


def cast_mxfp4_to_mxfp8(packed: Tensor, scale_e8m0: Tensor) -> tuple[Tensor, Tensor, CastCounts]:
    """Write every code as the E4M3 byte of the same value, under the same scale byte.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.

    Returns:
        `[..., cols]` uint8 E4M3 bytes, the scale bytes as they came, and the counts, always
        lossless: all 16 values are E4M3 values, -0.0 included.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    check_scales(scale_e8m0)
    table = encode_e4m3(torch.tensor(E2M1_VALUES, device=packed.device))
    codes = table[unpack_nibbles(packed).int()]
    return codes, scale_e8m0, CastCounts(blocks=scale_e8m0.numel(), exact=scale_e8m0.numel())
