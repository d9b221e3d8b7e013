"""MXFP4 to E4M3 on the processor, byte for byte as `casts` and `cast_fp8`, without torch."""

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.fast_mxfp4 import check_pair, refuse_nan_scales
from k3quant.formats.jit import RUNS_PER_THREAD, compiled, frozen, over_runs
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.formats.octaves import e4m3_range, magnitude_marks, members, nearest_e4m3

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int32]

_BLOCK_BYTES = MX_BLOCK_SIZE // 2

# Within these octaves lies everything E4M3 can tell from zero and from saturation.
_FEWEST, _MOST = -15, 10
_NO_BOUND = 1 << 16
_MIN_EXPONENT = -126  # of a normal float32


class Fp8Arrays(NamedTuple):
    """A cast weight.

    Attributes:
        codes: `[rows, cols]` uint8 E4M3 bytes.
        scale: `[ceil(rows / R), ceil(cols / C)]` float32, powers of two.
        counts: What was kept and lost; nothing ever saturates.
    """

    codes: Bytes
    scale: npt.NDArray[np.float32]
    counts: CastCounts


def cast_to_mxfp8(
    packed: Bytes, scale_e8m0: Bytes, *, out: Bytes | None = None, threads: int = 1
) -> Bytes:
    """Write every code as the E4M3 byte of the same value; the scale bytes stay as they are.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8.
        out: `[..., cols]` uint8 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        `[..., cols]` uint8 E4M3 bytes, as `casts.cast_mxfp4_to_mxfp8` gives them.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
    """
    shape = check_pair(packed, scale_e8m0)
    refuse_nan_scales(scale_e8m0)
    out = _checked_out(out, shape)
    source, target = _block_views(packed, out)
    table, kernel = _pair_table()[-_FEWEST], compiled(_write_codes)
    over_runs(lambda a, b: kernel(source[a:b], table, target[a:b]), len(source), threads)
    return out


def cast_to_fp8(
    packed: Bytes,
    scale_e8m0: Bytes,
    *,
    block_shape: tuple[int, int] = (128, 128),
    out: Bytes | None = None,
    threads: int = 1,
) -> Fp8Arrays:
    """Write codes as E4M3 under one power of two a tile.

    Args:
        packed: `[rows, cols / 2]` uint8, low nibble first, contiguous, not empty.
        scale_e8m0: `[rows, cols / 32]` uint8, contiguous.
        block_shape: Rows and columns of a full tile; columns are a multiple of 32.
        out: `[rows, cols]` uint8 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        The cast weight, as `cast_fp8.cast_mxfp4_to_fp8` gives it.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255.
        ValueError: A tile would cut a block in two.
    """
    rows, cols = check_pair(packed, scale_e8m0)
    if block_shape[1] % MX_BLOCK_SIZE:
        raise ValueError(f"tile columns: expected a multiple of 32, got {block_shape[1]}")
    refuse_nan_scales(scale_e8m0)
    out = _checked_out(out, (rows, cols))
    source, target = _block_views(packed, out)
    scales = frozen(scale_e8m0, "scales").reshape(-1)
    fewest, most = _range_tables()

    marks, wanted = np.empty(scales.size, np.uint8), np.empty(scales.size, np.int32)
    find = compiled(_want_exponents)
    over_runs(
        lambda a, b: find(
            source[a:b], scales[a:b], magnitude_marks(), most, marks[a:b], wanted[a:b]
        ),
        scales.size,
        threads,
    )
    tile = (block_shape[0], block_shape[1] // MX_BLOCK_SIZE)
    tiles = _largest_of_tiles(wanted.reshape(scale_e8m0.shape), tile)
    by_row = (rows, scale_e8m0.shape[1])
    write, pairs = compiled(_write_tiles), _pair_table()
    sources, targets = (x.reshape(*by_row, _BLOCK_BYTES) for x in (source, target))
    grid, sets = scales.reshape(by_row), marks.reshape(by_row)
    lost = np.empty(by_row, np.bool_)
    over_runs(
        lambda a, b: write((a, b, *tile), sources, grid, sets, tiles, fewest, pairs, targets, lost),
        rows,
        threads,
        least=-(-RUNS_PER_THREAD // by_row[1]),
    )
    counts = _count_lost(source, target, lost.reshape(-1))
    return Fp8Arrays(out, np.ldexp(np.float32(1), tiles), counts)


def _count_lost(packed: Bytes, codes: Halves, lost: npt.NDArray[np.bool_]) -> CastCounts:
    """Count the lost blocks, and the elements in them that were not zero and are."""
    before, after = packed[lost], codes[lost]
    nonzero = np.count_nonzero(before & 0x07) + np.count_nonzero(before & 0x70)
    kept = np.count_nonzero(after & 0x7F) + np.count_nonzero(after & 0x7F00)
    return CastCounts(blocks=lost.size, exact=lost.size - len(before), flushed=int(nonzero - kept))


def _checked_out(out: Bytes | None, shape: tuple[int, ...]) -> Bytes:
    if out is None:
        return np.empty(shape, np.uint8)
    if out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous uint8 {list(shape)}, got {list(out.shape)}")
    return out


def _block_views(packed: Bytes, out: Bytes) -> tuple[Bytes, Halves]:
    """View both as blocks of 16 pairs, `[blocks, 16]`."""
    source = frozen(packed, "packed").reshape(-1, _BLOCK_BYTES)
    return source, out.reshape(-1).view(np.uint16).reshape(-1, _BLOCK_BYTES)


def _largest_of_tiles(wanted: Ints, tile: tuple[int, int]) -> Ints:
    """Return the exponent of each tile's scale, 0 where all blocks are zero."""
    rows, cols = wanted.shape
    tiles = np.maximum.reduceat(wanted, np.arange(0, rows, tile[0]), axis=0)
    tiles = np.maximum.reduceat(tiles, np.arange(0, cols, tile[1]), axis=1)
    result: Ints = np.maximum(np.where(tiles == -_NO_BOUND, np.int32(0), tiles), _MIN_EXPONENT)
    return result


@cache
def _range_tables() -> tuple[Ints, Ints]:
    """Return by set of magnitudes the fewest and most octaves that are exact, `[256]` each."""
    fewest, most = np.full(256, -_NO_BOUND, np.int32), np.full(256, _NO_BOUND, np.int32)
    for marks in range(2, 256):
        ranges = [e4m3_range(magnitude) for magnitude in members(marks) if magnitude]
        fewest[marks], most[marks] = max(r[0] for r in ranges), min(r[1] for r in ranges)
    return fewest, most


@cache
def _pair_table() -> Halves:
    """Return both E4M3 bytes of a packed byte under each number of octaves, `[26, 256]`."""
    codes = np.array(
        [
            [nearest_e4m3(code & 7, octaves) | (code & 8) << 4 for code in range(16)]
            for octaves in range(_FEWEST, _MOST + 1)
        ],
        np.uint16,
    )
    byte = np.arange(256)
    table: Halves = codes[:, byte & 0xF] | (codes[:, byte >> 4] << np.uint16(8))
    return table


def _want_exponents(
    packed: Bytes, scale_e8m0: Bytes, table: Bytes, most: Ints, marks: Bytes, wanted: Ints
) -> None:
    """Find each block's magnitudes, and the least tile exponent that does not saturate it."""
    for block in range(packed.shape[0]):
        seen = np.uint8(0)
        for pair in range(16):
            seen |= table[packed[block, pair]]
        marks[block] = seen
        # Nothing but zeros, magnitude 0 alone, asks for no exponent.
        wanted[block] = -65536 if seen == 1 else np.int32(scale_e8m0[block]) - 127 - most[seen]


def _write_codes(packed: Bytes, table: Halves, out: Halves) -> None:
    for block in range(packed.shape[0]):
        for pair in range(16):
            out[block, pair] = table[packed[block, pair]]


def _write_tiles(
    span: tuple[int, int, int, int],
    packed: Bytes,
    scale_e8m0: Bytes,
    marks: Bytes,
    tiles: Ints,
    fewest: Ints,
    table: Halves,
    out: Halves,
    lost: npt.NDArray[np.bool_],
) -> None:
    """Write rows start to stop, and mark the blocks that are not exact.

    `span` is start, stop, and rows and blocks of a tile.
    """
    start, stop, tall, wide = span
    for row in range(start, stop):
        for col in range(packed.shape[1]):
            tile = tiles[row // tall, col // wide]
            octaves = np.int32(scale_e8m0[row, col]) - 127 - tile
            lost[row, col] = octaves < fewest[marks[row, col]]
            line = min(max(octaves, -15), 10) + 15
            for pair in range(16):
                out[row, col, pair] = table[line, packed[row, col, pair]]
