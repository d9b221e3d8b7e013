"""MXFP4 to bfloat16 and back on the processor, bit for bit as `mxfp4`, without torch.

bfloat16 travels as its 16 bits in uint16. Little-endian machines only, as the files are.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats import faults
from k3quant.formats.jit import compiled, frozen, over_runs
from k3quant.formats.mx import (
    E2M1_ELEMENT,
    E2M1_MIDPOINTS,
    E2M1_TIE_ROUNDS_UP,
    E2M1_VALUES,
    E8M0_BIAS,
    E8M0_NAN,
    MX_BLOCK_SIZE,
    ScaleRounding,
)

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint32]

_BLOCK_BYTES = MX_BLOCK_SIZE // 2
_BF16_INFINITY = 0x7F80

# numba widens every integer operation to 64 bits; each result is narrowed at once so that the
# loops vectorise over 32-bit lanes.
_u32 = np.uint32


def dequantize_to_bf16(
    packed: Bytes, scale_e8m0: Bytes, *, out: Halves | None = None, threads: int = 1
) -> Halves:
    """Compute code * 2^(scale - 127) as bfloat16.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        out: `[..., cols]` uint16 to fill; pages that are already mapped make this several times
            faster than a new array. None allocates.
        threads: Upper bound of threads to use.

    Returns:
        `[..., cols]` uint16, the bits of bfloat16; `out` where it was given.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
        ValuesError: A scale byte is 255, or a value overflows bfloat16; `out` is then undefined.
    """
    shape = check_pair(packed, scale_e8m0)
    out = np.empty(shape, np.uint16) if out is None else out
    _check_out(out, shape)
    source = frozen(packed, "packed").reshape(-1, _BLOCK_BYTES)
    scales = frozen(scale_e8m0, "scales").reshape(-1)
    target = out.reshape(-1).view(np.uint32).reshape(-1, _BLOCK_BYTES)
    table = _pair_table()
    kernel = compiled(_dequantize_blocks)
    bad = over_runs(
        lambda a, b: kernel(source[a:b], scales[a:b], table, target[a:b]), len(scales), threads
    )
    if any(bad):
        refuse_nan_scales(scale_e8m0)
        raise _overflow(out, scale_e8m0)
    return out


def quantize_bf16(
    weight: Halves, rounding: ScaleRounding, *, threads: int = 1
) -> tuple[Bytes, Bytes]:
    """Round bfloat16 values to MXFP4.

    Args:
        weight: `[..., cols]` uint16, the bits of bfloat16, contiguous, columns a multiple of 32.
        rounding: Rule for the scale byte.
        threads: Upper bound of threads to use.

    Returns:
        `[..., cols / 2]` uint8, the even column in the low nibble, and `[..., cols / 32]` uint8
        scale bytes, as `mxfp4.quantize_mxfp4` gives them.

    Raises:
        SchemaError: The columns are no multiple of 32.
        ValuesError: A value is NaN or infinite.
    """
    *lead, cols = weight.shape
    if cols % MX_BLOCK_SIZE:
        raise SchemaError(f"columns: expected a multiple of {MX_BLOCK_SIZE}, got {cols}")
    packed = np.empty((*lead, cols // 2), np.uint8)
    scale_e8m0 = np.empty((*lead, cols // MX_BLOCK_SIZE), np.uint8)
    source = frozen(weight, "weight").reshape(-1).view(np.uint32).reshape(-1, _BLOCK_BYTES)
    codes, scales = packed.reshape(-1, _BLOCK_BYTES), scale_e8m0.reshape(-1)
    step = np.uint32(E2M1_ELEMENT.round_up_step(rounding, 7))
    thresholds = _threshold_table()
    kernel = compiled(_quantize_blocks)
    bad = over_runs(
        lambda a, b: kernel(source[a:b], thresholds, step, codes[a:b], scales[a:b]),
        len(scales),
        threads,
    )
    if any(bad):
        magnitude = weight.reshape(*lead, -1, MX_BLOCK_SIZE) & 0x7FFF
        wrong = (magnitude >= _BF16_INFINITY).any(axis=-1)
        *row, block = np.argwhere(wrong)[0]
        raise faults.not_finite(faults.place(row, block), int(wrong.sum()))
    return packed, scale_e8m0


def check_pair(packed: Bytes, scale_e8m0: Bytes) -> tuple[int, ...]:
    """Return the shape of the decoded weight.

    Raises:
        SchemaError: The scale grid is not one byte a block of 32 columns.
    """
    *lead, half = packed.shape
    if half % _BLOCK_BYTES:
        raise SchemaError(f"packed columns: expected a multiple of {_BLOCK_BYTES}, got {half}")
    expected = (*lead, half // _BLOCK_BYTES)
    if scale_e8m0.shape != expected:
        raise SchemaError(f"scale grid: expected {list(expected)}, got {list(scale_e8m0.shape)}")
    return (*lead, half * 2)


def refuse_nan_scales(scale_e8m0: Bytes) -> None:
    """Refuse scale byte 255, which is NaN.

    Raises:
        ValuesError: Names the first and says how many.
    """
    nan = scale_e8m0 == E8M0_NAN
    if nan.any():
        *row, block = np.argwhere(nan)[0]
        raise faults.nan_scale(faults.place(row, block), int(nan.sum()))


def _check_out(out: Halves, shape: tuple[int, ...]) -> None:
    if out.shape != shape or out.dtype != np.uint16 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous uint16 {list(shape)}, got {list(out.shape)}")


def _overflow(out: Halves, scale_e8m0: Bytes) -> ValuesError:
    """Return the error for the first block that decoded to infinity."""
    infinite = (out & 0x7FFF) == _BF16_INFINITY
    blocks = infinite.reshape(*scale_e8m0.shape, MX_BLOCK_SIZE).any(axis=-1)
    *row, block = np.argwhere(blocks)[0]
    cause = f"infinity under scale {scale_e8m0[*row, block]}"
    return faults.overflow(faults.place(row, block), "bfloat16", cause)


@cache
def _pair_table() -> Words:
    """Return both bfloat16 of every packed byte under every scale byte, `[256 * 256]` uint32."""
    values = np.array(E2M1_VALUES)
    with np.errstate(over="ignore"):  # infinity is what the table shall hold there
        exact = np.ldexp(values, np.arange(256)[:, None] - E8M0_BIAS).astype(np.float32)
    bits = exact.view(np.uint32) >> 16  # every finite value is exact in bfloat16
    bits[E8M0_NAN] = 0x7FC0
    byte = np.arange(256)
    table: Words = bits[:, byte & 0xF] | (bits[:, byte >> 4] << 16)
    return table.reshape(-1)


@cache
def _threshold_table() -> Words:
    """Return the bfloat16 bits above which a magnitude takes the next code, `[256, 7]`.

    Every midpoint times 2^(scale - 127) is exact in bfloat16, also among its subnormals. A tie
    that rounds up is expressed by the bits just below the midpoint.
    """
    scale = np.arange(E2M1_ELEMENT.max_scale + 1)[:, None]
    midpoints = np.ldexp(np.array(E2M1_MIDPOINTS), scale - E8M0_BIAS).astype(np.float32)
    table: Words = (midpoints.view(np.uint32) >> 16) - np.array(E2M1_TIE_ROUNDS_UP, np.uint32)
    return table


def _dequantize_blocks(packed: Bytes, scale_e8m0: Bytes, table: Words, out: Words) -> bool:
    """Decode blocks; return whether one held NaN or infinity."""
    bad = False
    for block in range(scale_e8m0.shape[0]):
        scale = np.int32(scale_e8m0[block])
        if 2 <= scale <= 252:
            # All values are zero or normal here: exponent and mantissa of codes 2..7 are
            # consecutive, code 1 lies half a step off that line, code 0 is no float at all.
            base = _u32(((scale - 127) << 7) + 0x3F00)
            for pair in range(16):
                byte = _u32(packed[block, pair])
                low = _u32(byte & _u32(7))
                high = _u32((byte >> _u32(4)) & _u32(7))
                even = _u32(base + _u32(low << _u32(6)))
                odd = _u32(base + _u32(high << _u32(6)))
                even = _u32(even - _u32(0x40)) if low == _u32(1) else even
                odd = _u32(odd - _u32(0x40)) if high == _u32(1) else odd
                even = _u32(0) if low == _u32(0) else even
                odd = _u32(0) if high == _u32(0) else odd
                even = _u32(even | _u32((byte & _u32(8)) << _u32(12)))
                odd = _u32(odd | _u32((byte & _u32(0x80)) << _u32(8)))
                out[block, pair] = _u32(even | _u32(odd << _u32(16)))
        else:
            for pair in range(16):
                both = table[(scale << 8) | packed[block, pair]]
                bad |= (both & 0x7F80) == 0x7F80 or (both & 0x7F800000) == 0x7F800000
                out[block, pair] = both
    return bad


def _quantize_blocks(
    pairs: Words, thresholds: Words, step: np.uint32, packed: Bytes, scale_e8m0: Bytes
) -> bool:
    """Encode blocks of 16 pairs of bfloat16; return whether one held NaN or infinity."""
    largest = _u32(0)
    for block in range(scale_e8m0.shape[0]):
        amax = _u32(0)
        for pair in range(16):
            both = pairs[block, pair]
            odd = _u32((both >> _u32(16)) & _u32(0x7FFF))
            amax = max(amax, max(_u32(both & _u32(0x7FFF)), odd))
        largest = max(largest, amax)
        scale = int(_u32(amax + step) >> _u32(7)) - 2
        scale = min(max(scale, 0), 252)
        scale_e8m0[block] = scale
        t0, t1, t2, t3, t4, t5, t6 = thresholds[scale]
        for pair in range(16):
            both = pairs[block, pair]
            x = _u32(both & _u32(0x7FFF))
            y = _u32((both >> _u32(16)) & _u32(0x7FFF))
            even = _u32((x > t0) + _u32(x > t1) + _u32(x > t2) + _u32(x > t3))
            even = _u32(even + _u32(x > t4) + _u32(x > t5) + _u32(x > t6))
            odd = _u32((y > t0) + _u32(y > t1) + _u32(y > t2) + _u32(y > t3))
            odd = _u32(odd + _u32(y > t4) + _u32(y > t5) + _u32(y > t6))
            even = _u32(even | _u32((both >> _u32(12)) & _u32(8)))
            odd = _u32(_u32(odd << _u32(4)) | _u32((both >> _u32(24)) & _u32(0x80)))
            packed[block, pair] = np.uint8(even | odd)
    return bool(largest >= _u32(0x7F80))
