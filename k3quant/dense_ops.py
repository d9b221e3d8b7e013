"""Conversions of dense weights, chosen as in `ops`: tensors on a GPU take the kernel.

Every function takes and returns what the reference of the same name does and raises the same
errors. Where a kernel marks that something may be wrong, the reference finds out what it is.
"""

import torch
from torch import Tensor

from k3quant.formats import fp8_block, int4, int8_channel, mxfp8, nvfp4
from k3quant.formats.fp8_block import FP8_BLOCK_SHAPE
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.tiles import BlockShape

BF16 = torch.bfloat16


def quantize_nvfp4(weight: Tensor, global_scale: nvfp4.GlobalScale) -> tuple[Tensor, Tensor]:
    """Round values to NVFP4, as `nvfp4.quantize_nvfp4`."""
    if weight.is_cuda:
        from k3quant.kernels.nvfp4_quantize import quantize_nvfp4 as kernel

        packed, scale_e4m3, fault = kernel(weight, global_scale)
        if not fault:
            return packed, scale_e4m3
    return nvfp4.quantize_nvfp4(weight, global_scale)


def dequantize_nvfp4(
    packed: Tensor,
    scale_e4m3: Tensor,
    global_scale: nvfp4.GlobalScale,
    *,
    dtype: torch.dtype = BF16,
) -> Tensor:
    """Compute code * group scale * tensor scale, as `nvfp4.dequantize_nvfp4`."""
    if packed.is_cuda:
        from k3quant.kernels.nvfp4_dequantize import dequantize_nvfp4 as kernel

        out, suspect = kernel(packed, scale_e4m3, global_scale, dtype=dtype)
        if not suspect:
            return out
    return nvfp4.dequantize_nvfp4(packed, scale_e4m3, global_scale, dtype=dtype)


def quantize_fp8_block(
    weight: Tensor, *, block_shape: BlockShape = FP8_BLOCK_SHAPE
) -> tuple[Tensor, Tensor]:
    """Round to E4M3 under a scale a tile, a row for tiles `(1, cols)`, as `fp8_block`."""
    if weight.is_cuda:
        from k3quant.kernels.fp8_quantize import quantize_fp8 as kernel

        codes, scale, fault = kernel(weight, block_shape=block_shape)
        if not fault:
            return codes, scale
    return fp8_block.quantize_fp8_block(weight, block_shape=block_shape)


def dequantize_fp8_block(
    codes: Tensor,
    scale: Tensor,
    *,
    block_shape: BlockShape = FP8_BLOCK_SHAPE,
    dtype: torch.dtype = BF16,
) -> Tensor:
    """Compute E4M3 * scale, as `fp8_block.dequantize_fp8_block`."""
    if codes.is_cuda:
        from k3quant.kernels.fp8_dequantize import dequantize_fp8 as kernel

        out, suspect = kernel(codes, scale, block_shape=block_shape, dtype=dtype)
        if not suspect:
            return out
    return fp8_block.dequantize_fp8_block(codes, scale, block_shape=block_shape, dtype=dtype)


def quantize_int4(
    weight: Tensor,
    *,
    group_size: int,
    grid: int4.Int4Range = int4.Int4Range.FULL,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Round values to INT4, as `int4.quantize_int4`; on a GPU in groups of 8, 16, ... or 1024."""
    if weight.is_cuda:
        from k3quant.kernels.int4_quantize import quantize_int4 as kernel

        packed, scale, fault = kernel(
            weight, group_size=group_size, grid=grid, scale_dtype=scale_dtype
        )
        if not fault:
            return packed, scale
    return int4.quantize_int4(weight, group_size=group_size, grid=grid, scale_dtype=scale_dtype)


def dequantize_int4(
    packed: Tensor, scale: Tensor, *, cols: int, group_size: int, dtype: torch.dtype = BF16
) -> Tensor:
    """Compute integer * scale, as `int4.dequantize_int4`; group sizes as `quantize_int4`."""
    if packed.is_cuda and packed.shape[-1] * 8 == cols:
        from k3quant.kernels.int4_dequantize import dequantize_int4 as kernel

        out, suspect = kernel(packed, scale, group_size=group_size, dtype=dtype)
        if not suspect:
            return out
    return int4.dequantize_int4(packed, scale, cols=cols, group_size=group_size, dtype=dtype)


def quantize_mxfp8(weight: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Round values to MXFP8, as `mxfp8.quantize_mxfp8`."""
    if weight.is_cuda:
        from k3quant.kernels.mxfp8_quantize import quantize_mxfp8 as kernel

        codes, scale_e8m0, fault = kernel(weight, rounding)
        if not fault:
            return codes, scale_e8m0
    return mxfp8.quantize_mxfp8(weight, rounding)


def dequantize_mxfp8(codes: Tensor, scale_e8m0: Tensor, *, dtype: torch.dtype = BF16) -> Tensor:
    """Compute E4M3 * 2^(scale - 127), as `mxfp8.dequantize_mxfp8`."""
    if codes.is_cuda:
        from k3quant.kernels.mxfp8_dequantize import dequantize_mxfp8 as kernel

        out, suspect = kernel(codes, scale_e8m0, dtype=dtype)
        if not suspect:
            return out
    return mxfp8.dequantize_mxfp8(codes, scale_e8m0, dtype=dtype)


def quantize_int8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to integers under a scale a row, as `int8_channel.quantize_int8_channel`."""
    if weight.is_cuda:
        from k3quant.kernels.int8_quantize import quantize_int8 as kernel

        codes, scale, fault = kernel(weight)
        if not fault:
            return codes, scale
    return int8_channel.quantize_int8_channel(weight)


def dequantize_int8_channel(codes: Tensor, scale: Tensor, *, dtype: torch.dtype = BF16) -> Tensor:
    """Compute integer * scale, as `int8_channel.dequantize_int8_channel`."""
    if codes.is_cuda:
        from k3quant.kernels.int8_dequantize import dequantize_int8 as kernel

        out, suspect = kernel(codes, scale, dtype=dtype)
        if not suspect:
            return out
    return int8_channel.dequantize_int8_channel(codes, scale, dtype=dtype)
