"""INT8 channel: integers -128..127 under one float32 scale a row, symmetric, no zero point.

Example: a row whose largest magnitude is 127.5 has scale 1.0. The scale multiplies.
"""

import torch
from torch import Tensor

from k3quant.formats.blocks import (
    amax_of_runs,
    check_overflow,
    check_positive,
    check_shape,
    scale_of_amax,
)
from k3quant.formats.int_grid import INT8_DIVISOR

__all__ = ["INT8_DIVISOR", "dequantize_int8_channel", "quantize_int8_channel"]


def quantize_int8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round values to integers under amax / 127.5 of their row, ties to even.

    Args:
        weight: `[..., rows, cols]` float32, bfloat16 or float16.

    Returns:
        `[..., rows, cols]` int8 and `[..., rows, 1]` float32 scales. The largest positive value
        of a row becomes 127, not 127.5. An all-zero row gets scale 1.0.

    Raises:
        ValuesError: A value is NaN or infinite.

    Source: vllm-project/compressed-tensors, `quantization/utils/helpers.py`, `calculate_qparams`.
    """
    amax = amax_of_runs(weight[..., None, :]).float()
    scale = scale_of_amax(amax, INT8_DIVISOR)
    return (weight.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def dequantize_int8_channel(
    codes: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute integer * scale in float32.

    Args:
        codes: `[..., rows, cols]` int8.
        scale: `[..., rows, 1]` float32 or bfloat16.
        dtype: Floating dtype of the result.

    Returns:
        `[..., rows, cols]` in `dtype`.

    Raises:
        SchemaError: The scales are not one a row.
        ValuesError: A scale is not finite and positive, or a value overflows `dtype`.
    """
    check_shape("scales", scale, (*codes.shape[:-1], 1))
    check_positive(scale)
    values = (codes.float() * scale.float()).to(dtype)
    check_overflow(values[..., None, :], scale)
    return values
