"""MXFP4 to FP8 tiles: every code as E4M3 under a power of two for each 128 x 128 tile, or row.

A block is exact while its values divided by the tile's scale are E4M3 values, subnormals included;
blocks that use all codes may lie 14 octaves apart in one tile. The scale 2^t puts the largest
values of a tile as high as E4M3 goes without saturating, and no other power of two has less squared
error: one octave lower cuts at least 32 * 2^t off the largest element, more than rounding costs all
others together at 2^(t - 10) each; one octave higher only coarsens the subnormals.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from k3quant.formats.blocks import check_packed, join_runs, split_runs
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.e2m1 import E2M1_VALUES, unpack_nibbles
from k3quant.formats.e4m3 import encode_e4m3
from k3quant.formats.e8m0 import E8M0_BIAS, check_scales, two_to
from k3quant.formats.fp8_block import FP8_BLOCK_SHAPE
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.formats.octaves import e4m3_range
from k3quant.formats.tiles import BlockShape, cut_tiles, spread_tiles

# Within these octaves lies everything E4M3 can tell from zero and from saturation.
_FEWEST, _MOST = -15, 10
_NO_BOUND = 1 << 16
_MIN_EXPONENT = -126  # of a normal float32


class Fp8Cast(NamedTuple):
    """A cast weight.

    Attributes:
        codes: `[..., rows, cols]` uint8 E4M3 bytes.
        scale: `[..., ceil(rows / R), ceil(cols / C)]` float32, powers of two.
        counts: What was kept and lost; nothing ever saturates.
    """

    codes: Tensor
    scale: Tensor
    counts: CastCounts


def cast_mxfp4_to_fp8(
    packed: Tensor, scale_e8m0: Tensor, *, block_shape: BlockShape = FP8_BLOCK_SHAPE
) -> Fp8Cast:
    """Write codes as E4M3 under one power of two a tile.

    Args:
        packed: `[..., rows, cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., rows, cols / 32]` uint8.
        block_shape: Rows and columns of a full tile; columns are a multiple of 32, or all of them.

    Returns:
        The cast weight. An all-zero tile gets scale 1.0; zeros keep their sign.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
        ValueError: A tile would cut a block in two.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    check_scales(scale_e8m0)
    cols = packed.shape[-1] * 2
    if block_shape[1] % MX_BLOCK_SIZE and block_shape[1] != cols:
        raise ValueError(f"tile columns: expected a multiple of 32, got {block_shape[1]}")
    nibbles = split_runs(unpack_nibbles(packed), MX_BLOCK_SIZE)
    exponent = scale_e8m0.long() - E8M0_BIAS
    fewest, most = _reach(nibbles)
    zero = most == _NO_BOUND

    block_tile = (block_shape[0], block_shape[1] // MX_BLOCK_SIZE)
    wanted = (exponent - most).masked_fill(zero, -_NO_BOUND)
    tiles = cut_tiles(wanted, block_tile, fill=-_NO_BOUND).amax(dim=(-3, -1))
    tiles = tiles.masked_fill(tiles == -_NO_BOUND, 0).clamp(min=_MIN_EXPONENT)

    octaves = exponent - spread_tiles(tiles, tuple(exponent.shape), block_tile)
    exact = zero | ((fewest <= octaves) & (octaves <= most))
    row = octaves.clamp(_FEWEST, _MOST) - _FEWEST
    codes = _code_table(packed.device)[row[..., None], nibbles.int()]
    flushed = ((codes & 0x7F) == 0) & ((nibbles & 7) != 0)
    counts = CastCounts(
        blocks=scale_e8m0.numel(), exact=int(exact.sum()), flushed=int(flushed.sum())
    )
    return Fp8Cast(join_runs(codes), two_to(tiles).float(), counts)


def _reach(nibbles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fewest and most octaves under which each block is exact in E4M3.

    Args:
        nibbles: `[..., blocks, 32]` uint8 codes.

    Returns:
        Two `[..., blocks]` int64; a zero block is bounded by nothing.
    """
    ranges = [(-_NO_BOUND, _NO_BOUND), *(e4m3_range(code) for code in range(1, 8))]
    reach = torch.tensor(ranges, device=nibbles.device)[(nibbles & 7).int()]
    return reach[..., 0].amax(dim=-1), reach[..., 1].amin(dim=-1)


def _code_table(device: torch.device) -> Tensor:
    """Return the E4M3 byte of each code under each number of octaves, `[26, 16]` uint8."""
    octaves = torch.arange(_FEWEST, _MOST + 1, device=device)[:, None]
    values = torch.tensor(E2M1_VALUES, device=device)
    return encode_e4m3(values * two_to(octaves).float())
