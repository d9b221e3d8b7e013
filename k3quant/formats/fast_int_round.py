"""Floats to integers under one scale a run, bit for bit as `int4` and `int8_channel`.

bfloat16 travels as its 16 bits in uint16.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from k3quant.errors import ValuesError
from k3quant.formats import faults
from k3quant.formats.error_sums import ErrorSums
from k3quant.formats.fast_int_cast import CastRuns, refuse_infinite_scales
from k3quant.formats.int_grid import (
    IntGrid,
    ScaleDtype,
    scales_of,
    store_scales,
    widen_scales,
)
from k3quant.formats.jit import RUNS_PER_THREAD, compiled, frozen, over_runs
from k3quant.formats.mx import MX_BLOCK_SIZE

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

Compare = Literal["F32", "BF16"]
"""The type a candidate's decoded values are rounded to before they are compared."""

_LANES = 128
"""Sums kept beside each other, so that additions need not wait for one another."""

_u32 = np.uint32


def round_runs(
    weight: npt.NDArray[Any],
    out: Bytes,
    *,
    run: int,
    grid: IntGrid,
    dtype: ScaleDtype,
    compare: Compare | None = None,
    threads: int,
) -> CastRuns:
    """Round every run to integers under amax / divisor.

    Args:
        weight: `[..., cols]` float32, or the bits of bfloat16 in uint16, contiguous.
        out: As many elements in `grid.bits` bits each, contiguous; it is filled.
        run: Columns under one scale.
        grid: Which integers.
        dtype: How the scale is stored.
        compare: The type in which a scale of 16 bits is compared with its neighbours, of which
            the best is taken; None takes the scale as it is.
        threads: Upper bound of threads to use.

    Raises:
        ValuesError: A value is NaN or infinite, a scale is beyond its type, or what is decoded
            beyond float32.
    """
    *lead, cols = weight.shape
    grouped = (*lead, cols // run)
    runs = weight.size // run
    bits = frozen(weight, "weight").reshape(runs, run)
    bits = bits if bits.dtype == np.uint16 else bits.view(np.uint32)
    target = out.reshape(runs, run * grid.bits // 8)
    least = -(-RUNS_PER_THREAD * MX_BLOCK_SIZE // run)

    amax = np.empty(runs, bits.dtype)
    find = compiled(_find_amax)
    magnitude = bits.dtype.type((1 << (bits.itemsize * 8 - 1)) - 1)
    over_runs(lambda a, b: find(bits[a:b], magnitude, amax[a:b]), runs, threads, least=least)
    scale = scales_of(_finite(amax, grouped), grid.divisor, dtype)
    refuse_infinite_scales(scale.reshape(grouped))
    if compare is not None:
        scale = _best_neighbours(bits, scale, dtype, compare, threads, least)
        refuse_infinite_scales(scale.reshape(grouped))

    write = compiled(_write_runs)

    def work(start: int, stop: int) -> ErrorSums:
        lanes = min(run, _LANES)
        values, steps = np.empty(run, np.float32), np.empty(run, np.float32)
        noise, signal, moved = np.zeros(lanes), np.zeros(lanes), np.zeros(lanes)
        equal, flushed = write(
            bits[start:stop], scale[start:stop], grid, values, values.view(np.uint32), steps,
            noise, signal, moved, target[start:stop],
        )  # fmt: skip
        return ErrorSums(
            count=(stop - start) * run, equal=equal, max_abs=float(moved.max(initial=0.0)),
            noise=float(noise.sum()), signal=float(signal.sum()), flushed=flushed,
        )  # fmt: skip

    sums = sum(over_runs(work, runs, threads, least=least), ErrorSums())
    if np.isinf(sums.max_abs):
        raise _overflow(bits, scale, grid, grouped)
    return CastRuns(scale, sums)


def _finite(amax: Bits, grouped: tuple[int, ...]) -> Floats:
    """Return largest magnitudes as float32.

    Raises:
        ValuesError: One is NaN or infinite; names the first.
    """
    values = _widened(amax)
    bad = ~np.isfinite(values).reshape(grouped)
    if bad.any():
        *row, place = np.argwhere(bad)[0]
        raise faults.not_finite(faults.place(row, place), int(bad.sum()))
    return values


def _overflow(bits: Bits, scale: Floats, grid: IntGrid, grouped: tuple[int, ...]) -> ValuesError:
    """Return the error for the first run whose integers times the scale are infinite."""
    values = _widened(bits)
    with np.errstate(over="ignore"):
        steps = np.rint(values / scale[:, None]).clip(grid.smallest, grid.largest)
        infinite = np.isinf(steps * scale[:, None]).any(axis=1)
    first = int(infinite.argmax())
    *row, place = np.unravel_index(first, grouped)
    cause = f"infinity under scale {float(scale[first])}"
    return faults.overflow(faults.place([int(i) for i in row], int(place)), "float32", cause)


def _best_neighbours(
    bits: Bits, scale: Floats, dtype: ScaleDtype, compare: Compare, threads: int, least: int
) -> Floats:
    """Return each scale, or its neighbour of 16 bits where that is nearer to the values.

    Where two are equally near up to rounding, the reference decides.
    """
    run = bits.shape[1]
    stored = store_scales(scale, dtype)
    near = [(stored.view(np.uint16) + np.uint16(step & 0xFFFF)) for step in (0, 1, -1)]
    candidates = np.stack([widen_scales(n.view(stored.dtype), dtype) for n in near], axis=1)
    choice = np.empty(len(scale), np.int8)
    choose = compiled(_choose_scales)

    def work(start: int, stop: int) -> None:
        values, back = np.empty(run, np.float32), np.empty(run, np.float32)
        choose(
            bits[start:stop], candidates[start:stop], values, values.view(np.uint32),
            compare == "BF16", back, back.view(np.uint32), np.empty(run), choice[start:stop],
        )  # fmt: skip

    over_runs(work, len(scale), threads, least=least)
    best: Floats = np.take_along_axis(candidates, np.maximum(choice, 0)[:, None], axis=1)[:, 0]
    unsure = np.flatnonzero(choice < 0)
    if len(unsure):
        best[unsure] = _reference_scales(_widened(bits[unsure]), dtype, compare)
    return best


def _reference_scales(values: Floats, dtype: ScaleDtype, compare: Compare) -> Floats:
    import torch

    from k3quant.formats.int4 import Int4Range, quantize_int4

    weight = torch.from_numpy(values)
    _, scale = quantize_int4(
        weight.bfloat16() if compare == "BF16" else weight,
        group_size=values.shape[1],
        grid=Int4Range.BALANCED,
        scale_dtype=torch.bfloat16 if dtype == "BF16" else torch.float16,
    )
    found: Floats = scale.float().numpy()[:, 0]
    return found


def _widened(bits: Bits) -> Floats:
    widened = bits.astype(np.uint32) << (32 - bits.itemsize * 8)
    values: Floats = widened.view(np.float32)
    return values


def _find_amax(bits: Bits, magnitude: Any, amax: Bits) -> None:
    for run in range(bits.shape[0]):
        largest = bits[run, 0] & magnitude
        for i in range(bits.shape[1]):
            largest = max(largest, bits[run, i] & magnitude)
        amax[run] = largest


def _write_runs(
    weight: Bits,
    scale: Floats,
    grid: IntGrid,
    values: Floats,
    bits: npt.NDArray[np.uint32],
    steps: Floats,
    noise: Doubles,
    signal: Doubles,
    moved: Doubles,
    out: Bytes,
) -> tuple[int, int]:
    """Write runs and add to the sums; return elements that are equal, and flushed.

    `bits` are the bits of `values`, which is scratch for one run, as `steps` is.
    """
    equal = flushed = 0
    size, lanes = weight.shape[1], noise.shape[0]
    smallest, largest = np.float32(grid.smallest), np.float32(grid.largest)
    shift = _u32(32 - weight.itemsize * 8)
    for run in range(weight.shape[0]):
        divisor, source, target = scale[run], weight[run], out[run]
        for i in range(size):
            bits[i] = _u32(source[i]) << shift
        for i in range(size):
            steps[i] = min(max(np.rint(values[i] / divisor), smallest), largest)
        for begin in range(0, size, lanes):
            piece, whole = values[begin : begin + lanes], steps[begin : begin + lanes]
            for i in range(piece.shape[0]):
                exact = np.float64(piece[i])
                apart = np.float64(whole[i] * divisor) - exact
                noise[i] += apart * apart
                signal[i] += exact * exact
                moved[i] = max(moved[i], abs(apart))
            for i in range(piece.shape[0]):
                equal += whole[i] * divisor == piece[i]
                flushed += (piece[i] != 0) & (whole[i] == 0)
        if grid.bits == 8:
            for i in range(size):
                target[i] = np.uint8(np.int8(steps[i]))
        else:
            for i in range(size // 2):
                low, high = np.int32(steps[2 * i]) + 8, np.int32(steps[2 * i + 1]) + 8
                target[i] = np.uint8(low | high << 4)
    return equal, flushed


def _choose_scales(
    weight: Bits,
    candidates: Floats,
    values: Floats,
    bits: npt.NDArray[np.uint32],
    narrow: bool,
    back: Floats,
    back_bits: npt.NDArray[np.uint32],
    squares: Doubles,
    choice: npt.NDArray[np.int8],
) -> None:
    """Find the candidate of the least squared error, -1 where it is not certain.

    `narrow` rounds what is decoded to bfloat16. `bits` and `back_bits` are the bits of
    `values` and `back`, which are scratch for one run, as `squares` is.
    """
    size = weight.shape[1]
    shift = _u32(32 - weight.itemsize * 8)
    for run in range(weight.shape[0]):
        source = weight[run]
        for i in range(size):
            bits[i] = _u32(source[i]) << shift
        least, second, found, numbers = np.inf, np.inf, 0, True
        for number in range(candidates.shape[1]):
            scale = candidates[run, number]
            for i in range(size):
                step = min(max(np.rint(values[i] / scale), np.float32(-7)), np.float32(7))
                back[i] = step * scale
            if narrow:
                for i in range(size):
                    odd = _u32((back_bits[i] >> _u32(16)) & _u32(1))
                    rounded = _u32(back_bits[i] + _u32(_u32(0x7FFF) + odd))
                    back_bits[i] = _u32(rounded & _u32(0xFFFF0000))
            e0 = e1 = e2 = e3 = 0.0
            for i in range(size):
                apart = np.float64(back[i]) - np.float64(values[i])
                squares[i] = apart * apart
            for i in range(0, size, 4):  # four sums, so that additions need not wait
                e0 += squares[i]
                e1 += squares[i + 1]
                e2 += squares[i + 2]
                e3 += squares[i + 3]
            error = (e0 + e1) + (e2 + e3)
            numbers &= not np.isnan(error)
            if error < least:
                least, second, found = error, least, number
            else:
                second = min(second, error)
        # Sums that are closer may order otherwise when they are added in another order.
        certain = numbers and (least == 0 or second - least > 1e-12 * second)
        choice[run] = found if certain else -1
