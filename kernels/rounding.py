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


@triton.jit
def split_divisor(divisor):
    """Prepare divisions by the same positive numbers; zero quotients for infinity.

    Args:
        divisor: float32, normal and below 2^127, or infinite.

    Returns:
        Its mantissa in 1..2, the power of two that turns it into that, and the mantissa's
        reciprocal, rounded to nearest.
    """
    bits = divisor.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    lift = tl.maximum(0x7F000000 - (bits & 0x7F800000), 0).to(tl.float32, bitcast=True)
    if INTERPRETED:
        inverse = 1.0 / mantissa
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [mantissa], dtype=tl.float32, is_pure=True, pack=1
        )
    return mantissa, lift, inverse


@triton.jit
def divide(x, mantissa, lift, inverse, SHORT: tl.constexpr):
    """Divide by what `split_divisor` has split, to nearest even, for quotients above 2^-100.

    A product with a rounded reciprocal and one correction: for dividends of at most 11 bits this
    was compared with the division for every mantissa of both. Longer ones need two. What does not
    fit float32 becomes infinity or NaN.

    Args:
        x: float32, any shape that broadcasts with the parts of the divisor.
        mantissa: Of the divisor.
        lift: Likewise.
        inverse: Likewise.
        SHORT: Whether `x` was a bfloat16 or float16.
    """
    x = x * lift
    if INTERPRETED:
        quotient = x / mantissa
    else:
        quotient = x * inverse
        # This way around the sign of a zero stays.
        quotient = tl.fma(tl.fma(quotient, mantissa, -x), -inverse, quotient)
        if not SHORT:
            quotient = tl.fma(tl.fma(quotient, mantissa, -x), -inverse, quotient)
    return quotient


@triton.jit
def encode_e4m3_pair(first, second):
    """Round finite float32 values to two E4M3 bytes, saturating; uint16, the first lowest."""
    if INTERPRETED:
        codes = (encode_e4m3_byte(first) | (encode_e4m3_byte(second) << 8)).to(tl.uint16)
    else:
        codes = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [first, second],
            dtype=tl.uint16,
            is_pure=True,
            pack=1,
        )
    return codes


_DECODE_E4M3 = tl.constexpr("""
{
.reg .b16 low, high, one, other;
.reg .b32 halves;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 halves, low;
mov.b32 {one, other}, halves;
cvt.f32.f16 $0, one;
cvt.f32.f16 $1, other;
cvt.rn.f16x2.e4m3x2 halves, high;
mov.b32 {one, other}, halves;
cvt.f32.f16 $2, one;
cvt.f32.f16 $3, other;
}
""")


@triton.jit
def decode_e4m3_word(words):
    """Return the float32 values of the four E4M3 bytes of words; NaN bytes give what they like."""
    if INTERPRETED:
        result = (
            decode_e4m3_byte(words & 0xFF),
            decode_e4m3_byte((words >> 8) & 0xFF),
            decode_e4m3_byte((words >> 16) & 0xFF),
            decode_e4m3_byte(words >> 24),
        )
    else:
        result = tl.inline_asm_elementwise(
            _DECODE_E4M3,
            "=&f,=&f,=&f,=&f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def is_nan_e4m3(words):
    """Mark in the highest bit of each byte of words the two NaN bytes."""
    return ((words & 0x7F7F7F7F) + 0x01010101) & 0x80808080


@triton.jit
def join_four(a, b, c, d, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Put four tensors of COLS / 4 columns together, a, b, c, d, a, b, ... along the last."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLS))
