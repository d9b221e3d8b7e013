"""Rounding shared by kernels; reference: formats.e2m1, formats.e4m3 and torch's own casts.

Triton's interpreter truncates where the device rounds to nearest even, so the one cast that needs
rounding is spelled in integers there.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

# Fixed when a kernel is defined, as triton itself decides it then.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_bf16(x):
    """Round float32 to bfloat16, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        result = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(tl.bfloat16)
    return result


@triton.jit
def to_float32(x):
    """Widen a float of any dtype, exactly."""
    if x.dtype.is_bf16():
        result = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    """Round float32 to a float dtype, ties to even."""
    return to_bf16(x) if DTYPE.is_bf16() else x.to(DTYPE)


@triton.jit
def nearest_code(magnitude, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Return the code of the nearest small float, ties to even.

    The sum with a power of two whose last bit weighs one step leaves the number of steps in its
    low bits, rounded by the addition itself.

    Args:
        magnitude: float32, not above the format's largest value.
        MANTISSA_BITS: Explicit mantissa bits of the format.
        MIN_EXPONENT: Exponent of its smallest normal value.

    Returns:
        int32 codes without sign.
    """
    SMALLEST: tl.constexpr = 2.0**MIN_EXPONENT
    leading = tl.maximum(magnitude, SMALLEST).to(tl.int32, bitcast=True) & 0x7F800000
    ruler = leading.to(tl.float32, bitcast=True) * (2.0 ** (23 - MANTISSA_BITS))
    steps = (magnitude + ruler).to(tl.int32, bitcast=True) - ruler.to(tl.int32, bitcast=True)
    octave = (leading >> (23 - MANTISSA_BITS)) - ((127 + MIN_EXPONENT) << MANTISSA_BITS)
    return steps + octave


@triton.jit
def decode_e2m1_byte(packed):
    """Return the values of both nibbles of bytes, float32, low nibble first.

    The three bits under the sign, read as the lowest exponent bits and the first mantissa bit of
    a float32, are the value times 2^-126, its subnormal included.

    Args:
        packed: Any shape, uint32 holding one byte.
    """
    SHIFT_UP: tl.constexpr = 2.0**126
    low = ((packed & 0x07) << 22) | ((packed & 0x08) << 28)
    high = ((packed & 0x70) << 18) | ((packed & 0x80) << 24)
    return low.to(tl.float32, bitcast=True) * SHIFT_UP, high.to(tl.float32, bitcast=True) * SHIFT_UP


@triton.jit
def decode_e4m3_byte(codes):
    """Return the float32 values of E4M3 bytes; the two NaN bytes give 480.

    Args:
        codes: Any shape, uint32 holding one byte.
    """
    SHIFT_UP: tl.constexpr = 2.0**120
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * SHIFT_UP


@triton.jit
def encode_e4m3_byte(x):
    """Round finite float32 values to E4M3 bytes, saturating; uint32."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    code = nearest_code(magnitude, MANTISSA_BITS=3, MIN_EXPONENT=-6)
    return code.to(tl.uint32, bitcast=True) | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)


@triton.jit
def dot_bf16(a, b, total):
    """Add the product of two bfloat16 matrices to a float32 one."""
    return tl.dot(to_float32(a), to_float32(b), total) if INTERPRETED else tl.dot(a, b, total)
