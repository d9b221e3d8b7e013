"""FP8 channel: E4M3 bytes under one float32 scale a row.

Example: a row whose largest magnitude is 448 has scale 1.0. The scale multiplies.
"""

import torch
from torch import Tensor

from k3quant.formats.fp8_block import dequantize_fp8_block, quantize_fp8_block


def quantize_fp8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round values to E4M3 under amax / 448 of their row.

    Args:
        weight: `[..., rows, cols]` float32, bfloat16 or float16.

    Returns:
        `[..., rows, cols]` uint8 E4M3 bytes and `[..., rows, 1]` float32 scales. An all-zero row
        gets scale 1.0; zeros keep their sign.

    Raises:
        ValuesError: A value is NaN or infinite.
    """
    return quantize_fp8_block(weight, block_shape=(1, weight.shape[-1]))


def dequantize_fp8_channel(
    codes: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute E4M3 * scale in float32.

    Args:
        codes: `[..., rows, cols]` uint8 E4M3 bytes.
        scale: `[..., rows, 1]` float32 or bfloat16.
        dtype: Floating dtype of the result.

    Returns:
        `[..., rows, cols]` in `dtype`.

    Raises:
        SchemaError: The scales are not one a row.
        ValuesError: A byte is NaN, a scale is not finite and positive, or a value overflows.
    """
    return dequantize_fp8_block(codes, scale, block_shape=(1, codes.shape[-1]), dtype=dtype)
