"""bfloat16 to E4M3 tiles on the processor, byte for byte as `fp8_block`, without torch.

Weights are matrices here; bfloat16 travels as its 16 bits in uint16.
"""

import numpy as np
import numpy.typing as npt

from k3quant.formats import faults
from k3quant.formats.jit import RUNS_PER_THREAD, compiled, frozen, over_runs
from k3quant.formats.mx import MX_BLOCK_SIZE

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

_E4M3_MAX = np.float32(448)
_BF16_INFINITY = 0x7F80

_u32 = np.uint32
_i32 = np.int32


def quantize_bf16_to_fp8(
    weight: Halves,
    *,
    block_shape: tuple[int, int] = (128, 128),
    out: Bytes | None = None,
    threads: int = 1,
) -> tuple[Bytes, Floats]:
    """Round bfloat16 values to E4M3 under amax / 448 of their tile.

    Args:
        weight: `[rows, cols]` uint16, the bits of bfloat16, contiguous, not empty.
        block_shape: Rows and columns of a full tile; `(1, cols)` for one scale a row.
        out: `[rows, cols]` uint8 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        `[rows, cols]` uint8 E4M3 bytes and `[ceil(rows / R), ceil(cols / C)]` float32 scales, as
        `fp8_block.quantize_fp8_block` gives them.

    Raises:
        ValuesError: A value is NaN or infinite.
    """
    rows, cols = weight.shape
    tall, wide = block_shape
    source = frozen(weight, "weight")
    out = np.empty((rows, cols), np.uint8) if out is None else out
    if out.shape != (rows, cols) or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous uint8 [{rows}, {cols}], got {list(out.shape)}")
    target, least = out, -(-RUNS_PER_THREAD * MX_BLOCK_SIZE // cols)

    by_row = np.empty((rows, -(-cols // wide)), np.uint16)
    find = compiled(_find_amax)
    over_runs(lambda a, b: find(source[a:b], wide, by_row[a:b]), rows, threads, least=least)
    scale = _scales(np.maximum.reduceat(by_row, np.arange(0, rows, tall), axis=0))

    write = compiled(_write_rows)

    def work(start: int, stop: int) -> None:
        scratch = np.empty(min(wide, cols), np.float32)
        write((start, stop, tall, wide), source, scale, scratch, scratch.view(np.uint32), target)

    over_runs(work, rows, threads, least=least)
    return out, scale


def _scales(amax_bits: Halves) -> Floats:
    """Return amax / 448 of each tile, never subnormal, and 1.0 for zero.

    Raises:
        ValuesError: An amax is NaN or infinite.
    """
    bad = amax_bits >= _BF16_INFINITY
    if bad.any():
        where = f"tile {np.argwhere(bad)[0].tolist()}"
        raise faults.not_finite(where, int(bad.sum()))
    amax = (amax_bits.astype(np.uint32) << 16).view(np.float32)
    scale: Floats = np.maximum(amax / _E4M3_MAX, np.finfo(np.float32).tiny)
    scale[amax_bits == 0] = 1.0
    return scale


def _find_amax(weight: Halves, wide: int, amax: Halves) -> None:
    for row in range(weight.shape[0]):
        for tile in range(amax.shape[1]):
            largest = np.uint16(0)
            for col in range(tile * wide, min((tile + 1) * wide, weight.shape[1])):
                largest = max(largest, np.uint16(weight[row, col] & np.uint16(0x7FFF)))
            amax[row, tile] = largest


def _write_rows(
    span: tuple[int, int, int, int],
    weight: Halves,
    scale: Floats,
    quotient: Floats,
    bits: Words,
    out: Bytes,
) -> None:
    """Write rows start to stop; `span` is start, stop, and rows and columns of a tile.

    `bits` are the bits of `quotient`, which is scratch for one row of a tile.
    """
    start, stop, tall, wide = span
    for row in range(start, stop):
        for tile in range(scale.shape[1]):
            first, last = tile * wide, min((tile + 1) * wide, weight.shape[1])
            divisor = scale[row // tall, tile]
            source, target = weight[row, first:last], out[row, first:last]
            for i in range(last - first):
                bits[i] = _u32(source[i]) << _u32(16)
            for i in range(last - first):
                quotient[i] = quotient[i] / divisor
            for i in range(last - first):
                magnitude = _u32(bits[i] & _u32(0x7FFFFFFF))
                # Normal E4M3 starts at 2^-6: round half to even at three bits of mantissa, then
                # take 120, the difference of the biases, from the exponent. No quotient rounds
                # beyond 448: the scale is amax / 448.
                half = _u32(_u32(0x7FFFF) + _u32((magnitude >> _u32(20)) & _u32(1)))
                normal = _i32(_u32(magnitude + half) >> _u32(20)) - _i32(960)
                # Below, the codes count steps of 2^-9, and 8 of them are the first normal.
                steps = _i32(np.rint(np.abs(quotient[i]) * np.float32(512)))
                code = _u32(normal) if magnitude >= _u32(0x3C800000) else _u32(steps)
                target[i] = np.uint8(code | _u32((bits[i] >> _u32(24)) & _u32(0x80)))
