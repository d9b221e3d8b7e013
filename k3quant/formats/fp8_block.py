"""FP8 block: E4M3 bytes under one float32 scale a tile, 128 x 128; edge tiles may be short.

Example: a 200 x 96 weight has 2 x 1 scales. The scale multiplies: value = E4M3 * scale.
"""

import torch
from torch import Tensor

from k3quant.formats import faults
from k3quant.formats.blocks import check_positive, check_shape, scale_of_amax
from k3quant.formats.e4m3 import E4M3_MAX, check_numbers, decode_e4m3, encode_e4m3
from k3quant.formats.tiles import BlockShape, amax_of_tiles, grid_shape, spread_tiles

FP8_BLOCK_SHAPE: BlockShape = (128, 128)


def quantize_fp8_block(
    weight: Tensor, *, block_shape: BlockShape = FP8_BLOCK_SHAPE
) -> tuple[Tensor, Tensor]:
    """Round values to E4M3 under amax / 448 of their tile.

    Args:
        weight: `[..., rows, cols]` float32, bfloat16 or float16, any size.
        block_shape: Rows and columns of a full tile.

    Returns:
        `[..., rows, cols]` uint8 E4M3 bytes and `[..., ceil(rows / R), ceil(cols / C)]` float32
        scales. An all-zero tile gets scale 1.0; zeros keep their sign.

    Raises:
        ValuesError: A value is NaN or infinite.
    """
    scale = scale_of_amax(amax_of_tiles(weight, block_shape), E4M3_MAX)
    spread = spread_tiles(scale, tuple(weight.shape), block_shape)
    return encode_e4m3(weight.float() / spread), scale


def dequantize_fp8_block(
    codes: Tensor,
    scale: Tensor,
    *,
    block_shape: BlockShape = FP8_BLOCK_SHAPE,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute E4M3 * scale in float32.

    Args:
        codes: `[..., rows, cols]` uint8 E4M3 bytes.
        scale: `[..., ceil(rows / R), ceil(cols / C)]` float32 or bfloat16.
        block_shape: Rows and columns of a full tile.
        dtype: Floating dtype of the result.

    Returns:
        `[..., rows, cols]` in `dtype`.

    Raises:
        SchemaError: The scale grid does not fit.
        ValuesError: A byte is NaN, a scale is not finite and positive, or a value overflows.
    """
    check_shape("scale grid", scale, grid_shape(tuple(codes.shape), block_shape))
    check_numbers(codes)
    check_positive(scale)
    spread = spread_tiles(scale.float(), tuple(codes.shape), block_shape)
    values = (decode_e4m3(codes) * spread).to(dtype)
    overflow = torch.isinf(values)
    if bool(overflow.any()):
        where = f"element {overflow.nonzero()[0].tolist()}"
        name = str(dtype).removeprefix("torch.")
        raise faults.overflow(where, name, f"infinity under scale {float(spread[overflow][0])}")
    return values
