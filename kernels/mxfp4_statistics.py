"""What an MXFP4 weight holds, counted in one pass; reference: formats.fast_stats, cast_nvfp4.

Programs walk over tiles and keep their counts to themselves until the end.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.formats.nvfp4_exponent import NEEDS_SHAPE
from k3quant.kernels.mxfp4_to_nvfp4 import reach_of_halves

_BLOCKS = 256
_WARPS = 4
_PROGRAMS = 1056  # eight for each of 132 multiprocessors


class Mxfp4Counts(NamedTuple):
    """Counts over one weight, on its device.

    Attributes:
        scales: `[256]` int64, blocks by scale byte.
        bytes: `[256]` int64, packed bytes by value.
        zero_blocks: int64 scalar, blocks whose elements are all zero, of either sign.
        amax: float32 scalar, the largest magnitude of all blocks whose scale is a number; infinity
            where a value is beyond float32.
    """

    scales: Tensor
    bytes: Tensor
    zero_blocks: Tensor
    amax: Tensor


def count_mxfp4(packed: Tensor, scale_e8m0: Tensor) -> Mxfp4Counts:
    """Count scale bytes, packed bytes and zero blocks, and find the largest magnitude.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8; 255 is counted like any other.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    packed, scale_e8m0 = packed.contiguous(), scale_e8m0.contiguous()
    blocks, device = scale_e8m0.numel(), packed.device
    scales = torch.zeros(256, dtype=torch.int64, device=device)
    by_byte = torch.zeros(256, dtype=torch.int64, device=device)
    zero_blocks = torch.zeros((), dtype=torch.int64, device=device)
    largest = torch.zeros((), dtype=torch.int32, device=device)
    if blocks:
        programs = min(_PROGRAMS, triton.cdiv(blocks, _BLOCKS))
        _count_mxfp4_kernel[(programs,)](
            packed,
            scale_e8m0,
            scales,
            by_byte,
            zero_blocks,
            largest,
            blocks,
            programs,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return Mxfp4Counts(scales, by_byte, zero_blocks, largest.view(torch.float32))


def count_scale_needs(packed: Tensor, scale_e8m0: Tensor) -> Tensor:
    """Count what group scales the halves of a weight need.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8; 255 is counted like any other.

    Returns:
        `[256, 4, 4]` int64: halves that are not all zero, by scale byte, octaves down, octaves up.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    packed, scale_e8m0 = packed.contiguous(), scale_e8m0.contiguous()
    blocks, size = scale_e8m0.numel(), NEEDS_SHAPE[0] * NEEDS_SHAPE[1] * NEEDS_SHAPE[2]
    programs = max(1, min(_PROGRAMS, triton.cdiv(blocks, _BLOCKS)))
    needs = torch.zeros((programs, size), dtype=torch.int32, device=packed.device)
    if blocks:
        _count_scale_needs_kernel[(programs,)](
            packed.view(torch.int32),
            scale_e8m0,
            needs,
            blocks,
            programs,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return needs.sum(dim=0, dtype=torch.int64).reshape(NEEDS_SHAPE)


@triton.jit
def _count_mxfp4_kernel(
    packed_ptr,
    scale_ptr,
    scales_ptr,
    bytes_ptr,
    zero_blocks_ptr,
    largest_ptr,
    blocks,
    programs,
    BLOCKS: tl.constexpr,
):
    block, column = tl.arange(0, BLOCKS), tl.arange(0, 16)
    bins = tl.arange(0, 256)
    scales = tl.zeros((256,), tl.int64)
    by_byte = tl.zeros((256,), tl.int64)
    zeros = tl.zeros((BLOCKS,), tl.int64)
    largest = tl.zeros((BLOCKS,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, BLOCKS), programs):
        start = tile * tl.full((), BLOCKS, tl.int64)
        live = block < blocks - start
        scale = tl.load(scale_ptr + start + block, mask=live, other=0).to(tl.int32)
        offsets = start * 16 + block[:, None] * 16 + column[None, :]
        packed = tl.load(packed_ptr + offsets, mask=live[:, None], other=0).to(tl.int32)
        scales += tl.histogram(scale, 256).to(tl.int64)
        by_byte += tl.histogram(tl.reshape(packed, (BLOCKS * 16,)), 256).to(tl.int64)
        code = tl.max(tl.maximum(packed & 7, (packed >> 4) & 7), axis=1)
        zeros += (live & (code == 0)).to(tl.int64)
        largest = tl.maximum(largest, _magnitude_bits(code, scale))
        # Blocks beyond the end were read as zeros; take them out again.
        beyond = BLOCKS - tl.sum(live.to(tl.int32), axis=0)
        scales -= tl.where(bins == 0, beyond, 0)
        by_byte -= tl.where(bins == 0, beyond * 16, 0)
    tl.atomic_add(scales_ptr + bins, scales, mask=scales > 0)
    tl.atomic_add(bytes_ptr + bins, by_byte, mask=by_byte > 0)
    tl.atomic_add(zero_blocks_ptr, tl.sum(zeros, axis=0))
    tl.atomic_max(largest_ptr, tl.max(largest, axis=0))


@triton.jit
def _magnitude_bits(code, scale):
    """Return the float32 bits of code * 2^(scale - 127), zero for scale byte 255."""
    value = (code << 22).to(tl.float32, bitcast=True) * (2.0**126)
    power = tl.where(scale == 0, 0x400000, scale << 23).to(tl.float32, bitcast=True)
    return tl.where(scale == 255, 0, (value * power).to(tl.int32, bitcast=True))


@triton.jit
def _count_scale_needs_kernel(
    words_ptr, scale_ptr, needs_ptr, blocks, programs, BLOCKS: tl.constexpr
):
    block, column = tl.arange(0, BLOCKS), tl.arange(0, 4)
    mine = needs_ptr + tl.program_id(0).to(tl.int64) * 4096
    for tile in range(tl.program_id(0), tl.cdiv(blocks, BLOCKS), programs):
        start = tile * tl.full((), BLOCKS, tl.int64)
        live = block < blocks - start
        scale = tl.load(scale_ptr + start + block, mask=live, other=0).to(tl.int32)
        offsets = start * 4 + block[:, None] * 4 + column[None, :]
        words = tl.load(words_ptr + offsets, mask=live[:, None], other=0)
        halves = tl.reshape(words, (BLOCKS * 2, 2)).to(tl.uint32, bitcast=True)
        down, up, zero = reach_of_halves(halves)
        scale = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCKS, 2)), (BLOCKS * 2,))
        # Masked blocks were read as zeros, which do not count.
        tl.atomic_add(mine + scale * 16 + down * 4 + up, 1, mask=~zero, sem="relaxed")
