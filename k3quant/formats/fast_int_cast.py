"""MXFP4 to integers under one scale a run, by tables: a packed byte becomes two integers.

A magnitude of MXFP4 is 1 or 1.5 times a power of two, so the largest of a run is one of 1020
numbers, and with it and a block's own scale byte every code's integer and error are known. The
loop translates bytes and counts them; the error follows from the counts.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3quant.formats import faults
from k3quant.formats.error_sums import ErrorSums
from k3quant.formats.fast_mxfp4 import refuse_nan_scales
from k3quant.formats.int_grid import IntGrid, ScaleDtype, scales_of
from k3quant.formats.jit import RUNS_PER_THREAD, compiled, frozen, over_runs
from k3quant.formats.mx import E2M1_VALUES, E8M0_BIAS, MX_BLOCK_SIZE
from k3quant.formats.octaves import magnitude_marks

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Pairs = npt.NDArray[Any]

_BLOCK_BYTES = MX_BLOCK_SIZE // 2

_PEAKS = 1020
"""Finite magnitudes by number: bits 21 to 30 of their float32; infinity and NaN come after."""

_OCTAVES = 12
"""In a block so many octaves below the run's largest magnitude, every code becomes 0."""

_ZEROS = _PEAKS * _OCTAVES
_LINES = _ZEROS + 256


class CastRuns(NamedTuple):
    """Runs that were cast.

    Attributes:
        scale: `[runs]` float32, rounded to the type it is stored in.
        sums: How far values moved.
    """

    scale: Floats
    sums: ErrorSums


class _Tables(NamedTuple):
    """What the loop looks up.

    Attributes:
        pairs: `[kinds, 256]`, both integers of a packed byte.
        kinds: `[_LINES]`, the kind of each line.
    """

    pairs: Pairs
    kinds: npt.NDArray[np.uint16]


def cast_runs(
    packed: Bytes,
    scale_e8m0: Bytes,
    out: Bytes,
    *,
    run: int,
    grid: IntGrid,
    dtype: ScaleDtype,
    threads: int,
) -> CastRuns:
    """Round every run to integers under amax / divisor.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        out: As many elements in `grid.bits` bits each, contiguous; it is filled.
        run: Columns under one scale, whole blocks.
        grid: Which integers.
        dtype: How the scale is stored.
        threads: Upper bound of threads to use.

    Raises:
        ValuesError: A scale byte is 255, a value overflows float32, or a scale its type.
    """
    wide = run // MX_BLOCK_SIZE
    runs = scale_e8m0.size // wide
    source = frozen(packed, "packed").reshape(-1, _BLOCK_BYTES)
    scales = frozen(scale_e8m0, "scales").reshape(-1)
    tables = _tables(grid, dtype)
    target = out.reshape(-1).view(tables.pairs.dtype).reshape(-1, _BLOCK_BYTES)
    marks, reach = magnitude_marks(), _reach_table()
    peaks = np.empty(runs, np.uint16)
    kernel = compiled(_cast_runs)

    def work(start: int, stop: int) -> ErrorSums:
        blocks = slice(start * wide, stop * wide)
        counts, used = np.zeros((_LINES, 256), np.uint32), np.zeros(_LINES, np.bool_)
        kernel(
            source[blocks], scales[blocks], np.empty(wide, np.uint16), marks, reach, tables.kinds,
            tables.pairs, peaks[start:stop], target[blocks], counts, used,
        )  # fmt: skip
        lines = np.flatnonzero(used)
        return _sums_of(lines, counts[lines], grid, dtype)

    least = -(-RUNS_PER_THREAD // wide)
    sums = over_runs(work, runs, threads, least=least)
    if runs and peaks.max() >= _PEAKS:
        refuse_unfit(packed, scale_e8m0)
    scale = _scale_table(grid, dtype)[peaks]
    refuse_infinite_scales(scale.reshape(*scale_e8m0.shape[:-1], scale_e8m0.shape[-1] // wide))
    return CastRuns(scale, sum(sums, ErrorSums()))


def refuse_unfit(packed: Bytes, scale_e8m0: Bytes) -> None:
    """Refuse what has no float32: NaN scales and infinite values.

    Raises:
        ValuesError: Names the first block.
    """
    refuse_nan_scales(scale_e8m0)
    codes = packed.reshape(*scale_e8m0.shape, _BLOCK_BYTES)
    for *row, block in np.argwhere(scale_e8m0 >= 253):
        byte = scale_e8m0[*row, block]
        pairs = codes[*row, block]
        largest = max(E2M1_VALUES[code & 7] for code in (*(pairs & 0xF), *(pairs >> 4)))
        if largest * 2.0 ** (int(byte) - E8M0_BIAS) >= 2.0**128:
            cause = f"infinity under scale {byte}"
            raise faults.overflow(faults.place(row, block), "float32", cause)


def refuse_infinite_scales(scale: Floats) -> None:
    """Refuse scales beyond the type they are stored in.

    Args:
        scale: `[..., runs]`, positive.

    Raises:
        ValuesError: Names the first and says how many.
    """
    bad = np.isinf(scale)
    if bad.any():
        where = f"scale {np.argwhere(bad)[0].tolist()}"
        raise faults.bad_scale(where, float("inf"), int(bad.sum()))


@cache
def _reach_table() -> npt.NDArray[np.uint16]:
    """Return by scale byte and marks the number of a block's largest magnitude, `[256, 256]`."""
    with np.errstate(over="ignore"):  # infinity is what the table shall hold there
        values = np.ldexp(np.array(E2M1_VALUES[:8]), np.arange(256)[:, None] - E8M0_BIAS)
        numbers = values.astype(np.float32).view(np.uint32) >> 21
    numbers[255] = _PEAKS + 2
    top = np.array([max(marks.bit_length() - 1, 0) for marks in range(256)])
    table: npt.NDArray[np.uint16] = numbers[:, top].astype(np.uint16)
    return table


@cache
def _scale_table(grid: IntGrid, dtype: ScaleDtype) -> Floats:
    amax = (np.arange(_PEAKS, dtype=np.uint32) << 21).view(np.float32)
    return scales_of(amax, grid.divisor, dtype)


@cache
def _tables(grid: IntGrid, dtype: ScaleDtype) -> _Tables:
    steps = _steps_of(np.arange(_LINES), grid, dtype).astype(np.int8)
    kinds, kind_of_line = np.unique(steps, axis=0, return_inverse=True)
    stored = (kinds + 8 if grid.bits == 4 else kinds).view(np.uint8).astype(np.uint16)
    byte = np.arange(256)
    pairs = stored[:, byte & 0xF] | stored[:, byte >> 4] << np.uint16(grid.bits)
    pairs = np.ascontiguousarray(pairs.astype(np.uint8) if grid.bits == 4 else pairs)
    return _Tables(pairs, kind_of_line.reshape(-1).astype(np.uint16))


def _values_of(lines: Ints) -> Floats:
    """Return the value of every code in a line's blocks, `[lines, 16]`."""
    peaks, octaves = np.divmod(lines, _OCTAVES)
    scale = np.where(lines < _ZEROS, (peaks >> 2) + 1 - octaves, lines - _ZEROS)
    with np.errstate(over="ignore"):  # in lines that no block has
        values = np.ldexp(np.array(E2M1_VALUES), scale[:, None] - E8M0_BIAS)
        narrowed: Floats = values.astype(np.float32)
        return narrowed


def _steps_of(lines: Ints, grid: IntGrid, dtype: ScaleDtype) -> Floats:
    """Return the integer of every code in a line's blocks, `[lines, 16]`."""
    peaks = np.minimum(lines // _OCTAVES, _PEAKS - 1)
    scale = _scale_table(grid, dtype)[peaks][:, None]
    with np.errstate(over="ignore", invalid="ignore"):  # in lines that no block has
        steps = np.rint(_values_of(lines) / scale).clip(grid.smallest, grid.largest)
    known = (lines < _ZEROS)[:, None] & np.isfinite(steps)
    result: Floats = np.where(known, steps, np.float32(0))
    return result


def _sums_of(
    lines: Ints, counts: npt.NDArray[np.uint32], grid: IntGrid, dtype: ScaleDtype
) -> ErrorSums:
    """Return the error of the bytes that were counted, `[lines, 256]`."""
    by_nibble = counts.astype(np.int64).reshape(-1, 16, 16)
    by_code = by_nibble.sum(axis=1) + by_nibble.sum(axis=2)
    values, steps = _values_of(lines), _steps_of(lines, grid, dtype)
    scale = _scale_table(grid, dtype)[np.minimum(lines // _OCTAVES, _PEAKS - 1)]
    back = np.zeros_like(steps)
    np.multiply(steps, scale[:, None], out=back, where=steps != 0)
    there = by_code > 0
    reference = np.where(there, values, np.float32(0)).astype(np.float64)
    moved = np.where(there, back - reference, 0.0)
    return ErrorSums(
        count=int(by_code.sum()),
        equal=int(by_code[moved == 0].sum()),
        max_abs=float(np.abs(moved).max(initial=0.0)),
        noise=float((by_code * moved**2).sum()),
        signal=float((by_code * reference**2).sum()),
        flushed=int(by_code[(reference != 0) & (back == 0)].sum()),
    )


def _cast_runs(
    packed: Bytes,
    scale_e8m0: Bytes,
    own: npt.NDArray[np.uint16],
    marks: Bytes,
    reach: npt.NDArray[np.uint16],
    kinds: npt.NDArray[np.uint16],
    pairs: Pairs,
    peaks: npt.NDArray[np.uint16],
    out: Pairs,
    counts: npt.NDArray[np.uint32],
    used: npt.NDArray[np.bool_],
) -> None:
    """Find the largest magnitude of each run, then translate and count its bytes.

    `own` is scratch for the largest magnitudes of one run's blocks.
    """
    wide = own.shape[0]
    for run in range(peaks.shape[0]):
        first = run * wide
        peak = np.uint16(0)
        for i in range(wide):
            seen = np.uint8(0)
            for pair in range(16):
                seen |= marks[packed[first + i, pair]]
            own[i] = reach[scale_e8m0[first + i], seen]
            peak = max(peak, own[i])
        peaks[run] = peak
        if peak >= _PEAKS:
            continue
        for i in range(wide):
            block = first + i
            octaves = (np.int64(peak) >> 2) + 1 - np.int64(scale_e8m0[block])
            if own[i] > 0 and octaves < _OCTAVES:
                line = np.int64(peak) * _OCTAVES + octaves
            else:
                line = np.int64(_ZEROS) + scale_e8m0[block]
            used[line] = True
            kind = kinds[line]
            for pair in range(16):
                byte = packed[block, pair]
                out[block, pair] = pairs[kind, byte]
                counts[line, byte] += np.uint32(1)
