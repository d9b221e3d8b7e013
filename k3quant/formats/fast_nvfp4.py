"""MXFP4 to NVFP4 on the processor, byte for byte as `cast_nvfp4`: only scales change as a rule.

Halves whose group scale is out of E4M3's reach go to the reference, one by one; only then does
this module import torch.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.fast_mxfp4 import check_pair, refuse_nan_scales
from k3quant.formats.jit import compiled, frozen, over_runs
from k3quant.formats.mx import E8M0_BIAS, E8M0_NAN, MX_BLOCK_SIZE
from k3quant.formats.nvfp4_exponent import NEEDS_SHAPE, SMALLEST_EXPONENT, Needs, best_exponent
from k3quant.formats.octaves import (
    E4M3_SCALE_EXPONENTS,
    e4m3_power,
    magnitude_marks,
    members,
    shift_range,
)

Bytes = npt.NDArray[np.uint8]

_BLOCK_BYTES = MX_BLOCK_SIZE // 2
_HALF_BYTES = _BLOCK_BYTES // 2
_OUT_OF_REACH = 0


class Nvfp4Arrays(NamedTuple):
    """A cast weight.

    Attributes:
        packed: `[..., cols / 2]` uint8; the very array that came in when no code moved.
        scale_e4m3: `[..., cols / 16]` uint8 group scales.
        counts: What was kept and lost.
    """

    packed: Bytes
    scale_e4m3: Bytes
    counts: CastCounts


def shared_exponent(weights: Sequence[tuple[Bytes, Bytes]]) -> int:
    """Return `best_exponent` of weights that share a tensor scale, from scale bytes where they do.

    Where all scale bytes lie within E4M3's reach of each other and the largest one belongs to a
    block that is not all zero, no other exponent is as good as the one that puts it at the top.

    Args:
        weights: Packed codes `[..., cols / 2]` and scales `[..., cols / 32]` of each, contiguous.

    Raises:
        SchemaError: A scale grid does not fit its packed columns.
        ValuesError: A scale byte is 255.
    """
    scales = [scale for _, scale in weights if scale.size]
    if not scales:
        return 0
    highest = max(int(scale.max()) for scale in scales)
    lowest = min(int(scale.min()) for scale in scales)
    smallest, largest = E4M3_SCALE_EXPONENTS
    usual = highest - E8M0_BIAS - largest
    within = highest < E8M0_NAN and highest - lowest <= largest - smallest
    if within and usual >= SMALLEST_EXPONENT and _holds_value(weights, highest):
        return usual
    needs = [count_scale_needs(packed, scale) for packed, scale in weights]
    return best_exponent(np.sum(needs, axis=0))


def _holds_value(weights: Sequence[tuple[Bytes, Bytes]], scale: int) -> bool:
    """Return whether a block under a scale byte holds a code that is not zero."""
    for packed, scale_e8m0 in weights:
        check_pair(packed, scale_e8m0)
        blocks = packed.reshape(-1, _BLOCK_BYTES)[scale_e8m0.reshape(-1) == scale]
        if (blocks & 0x77).any():
            return True
    return False


def count_scale_needs(packed: Bytes, scale_e8m0: Bytes, *, threads: int = 1) -> Needs:
    """Count what group scales the halves of a weight need, for `nvfp4_exponent.best_exponent`.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        threads: Upper bound of threads to use.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    check_pair(packed, scale_e8m0)
    source = frozen(packed, "packed").reshape(-1, _HALF_BYTES)
    scales = frozen(scale_e8m0, "scales").reshape(-1)
    marks, reach = magnitude_marks(), _reach_table()
    kernel = compiled(_count_halves)

    def count(start: int, stop: int) -> npt.NDArray[np.int64]:
        needs = np.zeros((NEEDS_SHAPE[0], NEEDS_SHAPE[1] * NEEDS_SHAPE[2]), np.int64)
        kernel(source[2 * start : 2 * stop], scales[start:stop], marks, reach, needs)
        return needs

    needs: Needs = np.sum(over_runs(count, len(scales), threads), axis=0).reshape(NEEDS_SHAPE)
    refuse_nan_scales(scale_e8m0)
    return needs


def cast_to_nvfp4(packed: Bytes, scale_e8m0: Bytes, *, exponent: int) -> Nvfp4Arrays:
    """Turn scale bytes into group scales; move codes only where a scale is out of reach.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        exponent: m of the tensor scale: value = code * group scale * 2^m.

    Returns:
        The cast weight, as `cast_nvfp4.cast_mxfp4_to_nvfp4` gives it.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    check_pair(packed, scale_e8m0)
    pairs = _scale_table(exponent).take(scale_e8m0)
    grid = (*scale_e8m0.shape[:-1], scale_e8m0.shape[-1] * 2)
    scale_e4m3 = pairs.view(np.uint8).reshape(grid)
    blocks = scale_e8m0.size
    lost = np.flatnonzero(pairs.reshape(-1) == _OUT_OF_REACH)
    if not len(lost):
        return Nvfp4Arrays(packed, scale_e4m3, CastCounts(blocks=blocks, exact=blocks))
    refuse_nan_scales(scale_e8m0)

    import torch

    from k3quant.formats.cast_nvfp4 import cast_mxfp4_to_nvfp4

    source = packed.reshape(-1, _BLOCK_BYTES)[lost]
    scales = scale_e8m0.reshape(-1, 1)[lost]
    cast = cast_mxfp4_to_nvfp4(
        torch.from_numpy(source), torch.from_numpy(scales), exponent=exponent
    )
    scale_e4m3.reshape(-1, 2)[lost] = cast.scale_e4m3.numpy()
    moved = cast.packed.numpy()
    if not np.array_equal(moved, source):
        packed = packed.copy()
        packed.reshape(-1, _BLOCK_BYTES)[lost] = moved
    in_reach = CastCounts(blocks=blocks - len(lost), exact=blocks - len(lost))
    return Nvfp4Arrays(packed, scale_e4m3, in_reach + cast.counts)


def _scale_table(exponent: int) -> npt.NDArray[np.uint16]:
    """Return by scale byte the group scale of both halves, `_OUT_OF_REACH` where E4M3 has none."""
    table = np.full(256, _OUT_OF_REACH, np.uint16)
    smallest, largest = E4M3_SCALE_EXPONENTS
    for group_exponent in range(smallest, largest + 1):
        byte = group_exponent + exponent + E8M0_BIAS
        if 0 <= byte < E8M0_NAN:
            table[byte] = e4m3_power(group_exponent) * 0x0101
    return table


@cache
def _reach_table() -> Bytes:
    """Return by the marks of a half where it counts: down * 4 + up, 255 for all zero."""
    table = np.full(256, 255, np.uint8)
    for marks in range(2, 256):
        ranges = [shift_range(code) for code in members(marks)]
        down, up = -max(low for low, _ in ranges), min(high for _, high in ranges)
        table[marks] = down * NEEDS_SHAPE[2] + up
    return table


def _count_halves(
    packed: Bytes, scale_e8m0: Bytes, marks: Bytes, reach: Bytes, needs: npt.NDArray[np.int64]
) -> None:
    for half in range(packed.shape[0]):
        seen = np.uint8(0)
        for pair in range(8):
            seen |= marks[packed[half, pair]]
        where = reach[seen]
        if where != 255:
            needs[scale_e8m0[half >> 1], where] += 1
