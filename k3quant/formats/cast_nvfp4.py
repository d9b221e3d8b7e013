"""MXFP4 to NVFP4: the same codes, one E4M3 group scale for each half of a block.

Under a power of two as tensor scale a half is exact while its group scale is a power of two that
E4M3 holds, 18 octaves with the subnormals; halves up to three octaves outside are rescued when all
their codes can move. No other group scale can be exact: a product of two codes' odd parts, 1 or 3,
leaves only powers of two and 1.5 times those, and the latter reach no further.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.e2m1 import (
    E2M1_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)
from k3quant.formats.e4m3 import E4M3_MAX_CODE, decode_e4m3, encode_e4m3
from k3quant.formats.e8m0 import E8M0_BIAS, check_scales, two_to
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.formats.nvfp4 import NVFP4_GROUP_SIZE
from k3quant.formats.nvfp4_exponent import NEEDS_SHAPE, Needs
from k3quant.formats.octaves import E4M3_SCALE_EXPONENTS, shift_range, shift_table

_HALF_BYTES = NVFP4_GROUP_SIZE // 2
_SEARCHED_AT_ONCE = 1024


class Nvfp4Cast(NamedTuple):
    """A cast weight.

    Attributes:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e4m3: `[..., cols / 16]` uint8 group scales.
        counts: What was kept and lost.
    """

    packed: Tensor
    scale_e4m3: Tensor
    counts: CastCounts


class _Halves(NamedTuple):
    """The halves of a weight: codes, block exponent, and how far the codes can move."""

    packed: Tensor  # [halves, 8]
    exponent: Tensor  # [halves]
    down: Tensor  # [halves], 0..3
    up: Tensor  # [halves], 0..3
    zero: Tensor  # [halves] bool


def count_scale_needs(packed: Tensor, scale_e8m0: Tensor) -> Needs:
    """Count what group scales the halves of a weight need, for `best_exponent`.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    halves = _halves(packed, scale_e8m0)
    byte = halves.exponent + E8M0_BIAS
    index = (byte * NEEDS_SHAPE[1] + halves.down) * NEEDS_SHAPE[2] + halves.up
    size = NEEDS_SHAPE[0] * NEEDS_SHAPE[1] * NEEDS_SHAPE[2]
    counts = torch.bincount(index[~halves.zero], minlength=size)
    return counts.cpu().numpy().reshape(NEEDS_SHAPE)


def cast_mxfp4_to_nvfp4(packed: Tensor, scale_e8m0: Tensor, *, exponent: int) -> Nvfp4Cast:
    """Turn scale bytes into group scales, and move codes only where a scale is out of reach.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.
        exponent: m of the tensor scale: value = code * group scale * 2^m. See `best_exponent`.

    Returns:
        The cast weight. Halves in reach keep their bytes; so do all-zero halves, under the
        nearest power of two. Halves that no scale keeps are rounded again under the group scale
        of least squared error.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    halves = _halves(packed, scale_e8m0)
    need = halves.exponent - exponent
    group_exponent = need.clamp(*E4M3_SCALE_EXPONENTS)
    shift = need - group_exponent
    exact = halves.zero | ((-halves.down <= shift) & (shift <= halves.up))
    moved = exact & (shift != 0) & ~halves.zero

    new_packed = halves.packed.clone()
    for octaves, table in shift_table().items():
        here = moved & (shift == octaves)
        new_packed[here] = torch.from_numpy(table).to(packed.device)[halves.packed[here].int()]
    new_scale = encode_e4m3(two_to(group_exponent).float())

    saturated = flushed = 0
    lost = (~exact).nonzero().flatten()
    for start in range(0, len(lost), _SEARCHED_AT_ONCE):
        rows = lost[start : start + _SEARCHED_AT_ONCE]
        values = _values(halves.packed[rows], need[rows])
        new_packed[rows], new_scale[rows] = _search(values)
        limit = decode_e4m3(new_scale[rows], torch.float64)[:, None] * E2M1_MAX
        saturated += int((values.abs() > limit).sum())
        flushed += int(((values != 0) & (unpack_nibbles(new_packed[rows]) & 7 == 0)).sum())

    whole, rescued = exact.view(-1, 2).all(dim=-1), moved.view(-1, 2).any(dim=-1)
    counts = CastCounts(
        blocks=scale_e8m0.numel(),
        exact=int(whole.sum()),
        rescued=int((whole & rescued).sum()),
        saturated=saturated,
        flushed=flushed,
    )
    grid = (*scale_e8m0.shape[:-1], scale_e8m0.shape[-1] * 2)
    return Nvfp4Cast(new_packed.view(packed.shape), new_scale.view(grid), counts)


def _halves(packed: Tensor, scale_e8m0: Tensor) -> _Halves:
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    check_scales(scale_e8m0)
    rows = packed.reshape(-1, _HALF_BYTES)
    magnitude = (unpack_nibbles(rows) & 7).int()
    ranges = torch.tensor([shift_range(code) for code in range(8)], device=packed.device)
    reach = ranges[magnitude]  # [halves, 16, 2]
    return _Halves(
        packed=rows,
        exponent=scale_e8m0.reshape(-1).repeat_interleave(2).long() - E8M0_BIAS,
        down=-reach[..., 0].amax(dim=-1),
        up=reach[..., 1].amin(dim=-1),
        zero=(magnitude == 0).all(dim=-1),
    )


def _values(packed: Tensor, need: Tensor) -> Tensor:
    """Return the values of halves in units of 2^m, `[halves, 16]` float64, exactly."""
    return decode_e2m1(unpack_nibbles(packed), torch.float64) * two_to(need)[:, None]


def _search(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and the group scale of least squared error; of equals, the smallest scale.

    Args:
        values: `[halves, 16]` float64.

    Returns:
        `[halves, 8]` uint8 packed codes and `[halves]` uint8 E4M3 scales.
    """
    byte = torch.arange(1, E4M3_MAX_CODE + 1, device=values.device, dtype=torch.uint8)
    scale = decode_e4m3(byte, torch.float64)[:, None]  # [126, 1]
    codes = encode_e2m1(values[:, None, :] / scale)  # [halves, 126, 16]
    error = _sum_in_order((decode_e2m1(codes, torch.float64) * scale - values[:, None, :]).square())
    # Neither sums nor the choice among equals may depend on the device.
    least = error == error.amin(dim=-1, keepdim=True)
    index = torch.arange(len(byte), device=values.device)
    best = torch.where(least, index, len(byte)).amin(dim=-1)
    rows = torch.arange(len(values), device=values.device)
    return pack_nibbles(codes[rows, best]), byte[best]


def _sum_in_order(values: Tensor) -> Tensor:
    """Sum the last dimension, a power of two, by halves."""
    while values.shape[-1] > 1:
        first, second = values.chunk(2, dim=-1)
        values = first + second
    return values[..., 0]
