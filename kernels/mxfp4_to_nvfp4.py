"""MXFP4 to NVFP4 by re-scaling, with its exactness counts; reference: formats.cast_nvfp4.

Where E4M3 holds the group scale, which is nearly everywhere, codes are copied and one scale byte
becomes two. Other halves are moved by octaves where all their codes allow it. What no move keeps
is only marked: it needs a search, which the caller leaves to the reference.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.formats.octaves import MAX_SHIFT, shifted_code
from k3quant.kernels.nibble_table import look_up

LOST = 0xFF
"""The scale byte of a half that no scale keeps."""

_BLOCKS = 128
_WARPS = 4


class Nvfp4Rescale(NamedTuple):
    """A re-scaled weight.

    Attributes:
        packed: `[..., cols / 2]` uint8, low nibble first; halves under `LOST` are as they came.
        scale_e4m3: `[..., cols / 16]` uint8 group scales, `LOST` where none keeps the half.
        counts: `[3]` int32: blocks with a lost half, exact blocks with a moved half, NaN scale
            bytes (their number may be too low, but not zero when there are any).
    """

    packed: Tensor
    scale_e4m3: Tensor
    counts: Tensor


def rescale_mxfp4_to_nvfp4(packed: Tensor, scale_e8m0: Tensor, *, exponent: int) -> Nvfp4Rescale:
    """Turn scale bytes into group scales, moving codes only where a scale is out of reach.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.
        exponent: m of the tensor scale: value = code * group scale * 2^m.

    Returns:
        The re-scaled weight.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    packed, scale_e8m0 = packed.contiguous(), scale_e8m0.contiguous()
    grid_shape = (*scale_e8m0.shape[:-1], scale_e8m0.shape[-1] * 2)
    out = torch.empty_like(packed)
    scale_e4m3 = torch.empty(grid_shape, dtype=torch.uint8, device=packed.device)
    counts = torch.zeros(3, dtype=torch.int32, device=packed.device)
    blocks = scale_e8m0.numel()
    if blocks:
        _rescale_mxfp4_to_nvfp4_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            packed.view(torch.int32),
            scale_e8m0,
            _shift_table(packed.device),
            out.view(torch.int32),
            scale_e4m3.view(torch.int16),
            counts,
            blocks,
            exponent + 127,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return Nvfp4Rescale(out, scale_e4m3, counts)


@cache
def _shift_table(device: torch.device) -> Tensor:
    """Return the codes that codes 0..7 become under -3 to 3 octaves, `[7, 2]` int32."""
    shifts = range(-MAX_SHIFT, MAX_SHIFT + 1)
    rows = [[shifted_code(code, shift) or 0 for code in range(8)] for shift in shifts]
    return torch.tensor(rows, dtype=torch.uint8).view(torch.int32).to(device)


@triton.jit
def reach_of_halves(words):
    """Return how far the codes of halves can move and which halves are all zero.

    Args:
        words: `[halves, 2]` uint32 of eight nibbles each.

    Returns:
        Octaves down, 0..3, octaves up, 0..3, and whether all codes are zero, `[halves]` each.
    """
    bit0, bit1, bit2 = words, words >> 1, words >> 2
    # Each group of codes bounds the move: 1 and 3 by none, 2 and 5 by one, 4 and 7 by two octaves
    # down; 6 and 7 by none, 4 and 5 by one, 2 and 3 by two octaves up.
    none_down = bit0 & ~bit2
    one_down = (bit1 & ~bit0 & ~bit2) | (bit2 & ~bit1 & bit0)
    two_down = bit2 & ~(bit0 ^ bit1)
    down = _fewest(none_down, one_down, two_down)
    up = _fewest(bit2 & bit1, bit2, bit1)
    magnitude = tl.reduce(words & 0x77777777, 1, _either)
    return down, up, magnitude == 0


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _fewest(none, one, two):
    """Return by the first of three flags that any nibble has 0, 1, 2, else 3."""
    flags = (none & 0x11111111) | ((one & 0x11111111) << 1) | ((two & 0x11111111) << 2)
    flags = tl.reduce(flags, 1, _either)
    return tl.where(
        (flags & 0x11111111) != 0,
        0,
        tl.where((flags & 0x22222222) != 0, 1, tl.where((flags & 0x44444444) != 0, 2, 3)),
    )


@triton.jit
def _squeeze(codes):
    """Pack four bytes of a code each into 16 bits; the sign is a byte's highest bit."""
    nibbles = (codes & 0x07070707) | ((codes & 0x80808080) >> 4)
    pairs = (nibbles | (nibbles >> 4)) & 0x00FF00FF
    return (pairs | (pairs >> 8)) & 0xFFFF


@triton.jit(do_not_specialize=["zero_byte"])
def _rescale_mxfp4_to_nvfp4_kernel(
    words_ptr,
    scale_ptr,
    table_ptr,
    out_ptr,
    group_scale_ptr,
    counts_ptr,
    blocks,
    zero_byte,
    BLOCKS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    scale = tl.load(scale_ptr + start + block, mask=live, other=zero_byte).to(tl.int32)
    offsets = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(words_ptr + start * 4 + offsets, mask=live[:, None], other=0)

    need = scale - zero_byte
    nearest = tl.minimum(tl.maximum(need, -9), 8)
    shift = need - nearest
    # E4M3 of a power of two: an exponent field from -6 on, below it one bit of the fraction.
    byte = tl.where(nearest >= -6, (nearest + 7) << 3, 1 << tl.maximum(nearest + 9, 0))
    pair = byte * 0x0101
    if tl.max((shift != 0).to(tl.int32), axis=0) > 0:
        halves = tl.reshape(words, (BLOCKS * 2, 2)).to(tl.uint32, bitcast=True)
        down, up, zero = reach_of_halves(halves)
        both = tl.reshape(tl.broadcast_to(shift[:, None], (BLOCKS, 2)), (BLOCKS * 2,))
        exact = zero | ((-down <= both) & (both <= up))
        moved = exact & (both != 0) & ~zero
        entry = table_ptr + (tl.where(moved, both, 0) + 3) * 2
        low = tl.load(entry).to(tl.uint32, bitcast=True)
        high = tl.load(entry + 1).to(tl.uint32, bitcast=True)
        first, second = look_up(halves, low[:, None], high[:, None])
        halves = _squeeze(first) | (_squeeze(second) << 16)
        words = tl.reshape(halves, (BLOCKS, 4)).to(tl.int32, bitcast=True)
        exact = tl.reshape(exact, (BLOCKS, 2))
        even, odd = tl.split(exact)
        pair = tl.where(even, byte, 0xFF) | (tl.where(odd, byte, 0xFF) << 8)
        whole = even & odd
        rescued = whole & (tl.max(tl.reshape(moved, (BLOCKS, 2)).to(tl.int32), axis=1) > 0)
        tl.atomic_add(counts_ptr, tl.sum((live & ~whole).to(tl.int32), axis=0))
        tl.atomic_add(counts_ptr + 1, tl.sum((live & rescued).to(tl.int32), axis=0))
    tl.store(out_ptr + start * 4 + offsets, words, mask=live[:, None])
    tl.store(group_scale_ptr + start + block, pair.to(tl.int16), mask=live)
    flag = counts_ptr + 2 + tl.zeros((BLOCKS,), tl.int32)
    tl.store(flag, 1, mask=live & (scale == 255))
